"""Short ways to run the system itself on small problems whose servers fail, under either clock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from netem.networks import NETWORKS
from policies import BlockRange, Hop, Placement, Problem, RoutingPolicy
from policies.online import OnlinePolicy
from policies.workload import RequestPlan
from policies.wsrr import WsRr
from testbed.experiments.experiment import Fault
from testbed.records.events import EVENTS
from testbed.records.requests import RequestRow
from testbed.records.summary import MoveRow, RunSummary
from testbed.results import read_tables
from testbed.results.hop_table import HopTable
from testbed.rundir import make_run_dir
from testbed.runtime.stage import Stage
from testbed.simulator.virtual import serve_by_system
from tests.support.problems import make_problem
from tests.support.simulation import experiment_of, placed_experiment

VIRTUAL = Stage("virtual", NETWORKS["memory"], "a test")
REAL = Stage("real", NETWORKS["loopback"], "a test")


class SystemRun(NamedTuple):
    """What a run left: requests in the order given, servers' moves, lines of ``events.jsonl``, summary and hops."""

    requests: Sequence[RequestRow]
    moves: Sequence[MoveRow]
    events: list[dict[str, Any]]
    summary: RunSummary
    table: HopTable

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds, in order."""
        return [event for event in self.events if event["event"] in kinds]

    def hops(self, request: int = 0) -> tuple[Hop, ...]:
        """The request's chain as its last token came."""
        rows = np.flatnonzero(self.table.request == request)
        rows = rows[self.table.token[rows] == self.table.token[rows].max()]
        last = {int(self.table.first[i]): i for i in rows}
        chain = (Hop(*(int(column[i]) for column in self._columns)) for _, i in sorted(last.items()))
        return tuple(chain)

    @property
    def _columns(self) -> tuple[Any, ...]:
        return self.table.server, self.table.first, self.table.last

    def token_at_s(self, request: int = 0) -> list[float]:
        """When the last block's answers of a request came."""
        chosen = (self.table.request == request) & (self.table.last == self.table.last.max())
        return [float(at_s) for at_s in self.table.received_at_s[chosen]]

    def ended_at_s(self) -> list[float | None]:
        """When every request was done; ``None`` of one that failed."""
        return [row.ended_at_s if row.is_completed else None for row in self.requests]


def pairs(n_pairs: int = 2, **options: Any) -> tuple[Problem, Placement]:
    """Servers s0, s2, ... hold the blocks [0, 2), s1, s3, ... [2, 4), with room for many sessions.

    A step of one token takes 0.12 s on a hop (0.05 s each way, 0.02 s of compute), a prompt of n tokens
    0.1 + 0.01 n s, an opening 0.1 s.
    """
    options = {"input_rtt_s": 0.1, "prefill_slope_s": 0.005, **options}
    problem = make_problem([1000.0] * 2 * n_pairs, **options)
    ranges = (BlockRange(0, 2), BlockRange(2, 4)) * n_pairs
    return problem, Placement("pairs", ranges, (900.0,) * 2 * n_pairs)


def fail(
    made: tuple[Problem, Placement],
    requests: Sequence[RequestPlan],
    *faults: Fault,
    routing: RoutingPolicy | None = None,
    online: OnlinePolicy | None = None,
    stage: Stage = VIRTUAL,
    **settings: Any,
) -> SystemRun:
    """Serves ``requests`` under ``faults`` with WS-RR or ``routing``; ``settings`` are fields of the experiment."""
    problem, placement = made
    # Hidden states carry a value of eight bytes.
    problem = replace(problem, model=replace(problem.model, hidden_size=8))
    experiment = experiment_of(problem, requests, planned=tuple(faults), **settings)
    placed = placed_experiment(problem, placement, routing or WsRr())
    with (
        tempfile.TemporaryDirectory() as folder,
        patch("testbed.runtime.emulation.online_policy", return_value=online),
    ):
        run_dir = make_run_dir(Path(folder) / "run", "small")
        served = serve_by_system(experiment, placed, run_dir, stage)
        lines = (run_dir / EVENTS).read_text(encoding="utf-8").splitlines()
        assert served.summary is not None
        table = read_tables(run_dir, experiment).hops
        return SystemRun(served.rows or (), served.moves, list(map(json.loads, lines)), served.summary, table)


def kill(server: int, at_s: float, for_s: float | None = None) -> Fault:
    return Fault("kill", server, at_s, for_s=for_s)

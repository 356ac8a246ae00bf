"""The system itself beside the fast engine: whether both serve requests alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

from nodes.records import HOP_COLUMNS
from policies import Placement, Problem
from policies.workload import RequestPlan
from testbed.experiments.experiment import Fault
from testbed.fast.outcome import FastRun
from testbed.fast.steps import COLUMNS
from testbed.records.events import event_data
from testbed.simulator.rows import outcome_rows
from tests.support.failing import SystemRun, fail
from tests.support.simulation import run_fast


def served_alike(
    made: tuple[Problem, Placement],
    requests: Sequence[RequestPlan],
    *faults: Fault,
    within_s: float = 1e-6,
    **options: Any,
) -> list[str]:
    """Serves requests in both engines, and checks that the system serves as the fast engine does; the steps, if it goes by
    steps, and recoveries to the nanosecond. Returns what became of the requests, in words."""
    words = []
    fast = run_fast(*made, requests, most_steps=10_000, **options)
    options.pop("planned", None)
    system = fail(made, requests, *faults, **options)
    for a, b in zip(outcome_rows(made[0], fast.requests), system.requests, strict=True):
        words.append(a.status)
        words.append("refused" if a.n_rejections else "let in at once")
        words.append("preempted" if a.n_preemptions else "kept")
        assert (a.request, a.status, a.n_rejections) == (b.request, b.status, b.n_rejections)
        assert a.n_recoveries == b.n_recoveries
        assert (a.n_preemptions, a.preempted_tokens) == (b.n_preemptions, b.preempted_tokens)
        assert b.preempted_s == pytest.approx(a.preempted_s, abs=within_s)
        assert a.chain == b.chain
        if a.status == "completed":
            for name in ("queue_s", "setup_s", "ttft_s", "e2e_s"):
                assert b.times[name] == pytest.approx(a.times[name], abs=within_s), (name, a, b)
    if fast.steps is not None:
        assert steps_of(fast) == steps_of(system)
    told, expected = (in_order_of_requests(lines) for lines in (map(event_data, fast.faults), system.events))
    assert told == expected
    return words


def in_order_of_requests(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ``told_of`` has of the lines, in their order; those of one instant request by request.

    Two sessions that hear of a lost connection at one instant go on in turns, which the fast engine does not have.
    """
    at_once = groupby(filter(None, map(told_of, lines)), key=itemgetter("at_s"))
    return [line for _, group in at_once for line in sorted(group, key=itemgetter("request"))]


def told_of(line: dict[str, Any]) -> dict[str, Any]:
    """What a line of ``events.jsonl`` has of a recovery but for its words, to the nanosecond; empty if it is about something else."""
    if line["event"] not in ("detected", "re-routed", "replayed", "unreachable"):
        return {}
    kept = {name: value for name, value in line.items() if name not in ("reason", "asked_s", "decision_s")}
    rounded = {name: round(value, 9) if isinstance(value, float) else value for name, value in kept.items()}
    return json.loads(json.dumps(rounded))  # type: ignore[no-any-return]


def steps_of(run: FastRun | SystemRun) -> list[tuple[float, ...]]:
    """Which request's which token was where, from when to when and with how many others; of those that completed."""
    names = ("request", "token", *(name for name in HOP_COLUMNS if not name.endswith("bytes")))
    if isinstance(run, SystemRun):
        columns = [getattr(run.table, name) for name in names]
        completed = {row.request for row in run.requests if row.is_completed}
    else:
        rows = np.array(run.steps).reshape(-1, len(COLUMNS))
        columns = [rows[:, COLUMNS.index(name)] for name in names]
        completed = {r.plan.index for r in run.requests if r.time_s is not None}
    return sorted(
        row for row in zip(*(np.round(c, 9).tolist() for c in columns), strict=True) if row[0] in completed
    )

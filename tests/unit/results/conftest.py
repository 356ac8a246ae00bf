"""Synthetic runs whose times can be worked out by hand.

One token is 1,000 bytes: with the headers of its one segment 1,052 bytes, 0.1 s on every link here.
A prompt of l <= 3 tokens takes l times that. Propagation is 0.05 s each way, decode 0.01 s per block and
token, prefill 0.02 + 0.005 l per block. So a decode step on two blocks takes 2 x 0.15 + 0.02 = 0.32 s.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from nodes.eventlog import EventLog
from nodes.records import Admitted, AnyRecord, Arrived, Completed, HopRecord, Opening, Rejected, Routed, Token
from policies.links import Link
from policies.problem import Batching, ModelSpec, Problem, ServerSpec
from policies.workload import RequestPlan
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Calibration, ComputePart, Experiment, NetworkPart, PolicyPart
from testbed.results import messages, model_links

LINK = Link(0.05, 84_160.0)


@pytest.fixture(autouse=True)
def bare_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have segments' headers but no frames of their own, and openings have no bytes: as can be worked out by hand."""
    one = SimpleNamespace(
        there=lambda at, forwarding: int,
        back=lambda n_hops, forwarding: int,
        opening=lambda n_pages, forwarding: 0,
        OK=0,
    )
    for module in (messages, model_links):
        monkeypatch.setattr(module, "framesizes", one)
    monkeypatch.setattr(messages, "bytes_on_wire", lambda tcp, n_bytes: n_bytes + 52 * -(-n_bytes // 1448))


Hop = tuple[int, int, int, float, float, float, float, int, int]


def make_experiment(
    lengths: Sequence[tuple[int, int]] = ((2, 3),),
    clients: Sequence[int] | None = None,
    calibration: Calibration | None = None,
    time_scale: float = 1.0,
    batching: Batching = "none",
) -> Experiment:
    """Servers s0 (East) and s1 (West), clients c0 and c1 (North); request i arrives at i seconds."""
    names, servers = ("c0", "c1"), ("s0", "s1")
    calibration = calibration or Calibration()
    grid = ((0.1, 0.1), (0.1, 0.1))
    clustered = load_experiment("clustered")  # the other fields of an experiment do not matter here
    return replace(
        clustered,
        name="synthetic",
        seed=7,
        time_scale=time_scale,
        problem=Problem(
            model=ModelSpec("four", 4, 500, 1.0, 1.0),
            servers=tuple(ServerSpec(name, "any", 100.0, 0.01, 0.02, 0.005, 1.0, 1.0) for name in servers),
            clients=names,
            raw_rtt_s=grid,
            token_rtt_s=((0.3, 0.3), (0.3, 0.3)),
            input_rtt_base_s=grid,
            input_rtt_slope_s=((0.2, 0.2), (0.2, 0.2)),
            server_rtt_s=grid,
            n_input_tokens=2,
            n_output_tokens=3,
            request_rate=1.0,
            join_order=(0, 1),
            initial_delay_s=calibration.initial_delay_s,
        ),
        sites={"s0": "East", "s1": "West", "c0": "North", "c1": "North"},
        network=NetworkPart(
            "memory", {pair: LINK for c in names for s in servers for pair in ((c, s), (s, c))}
        ),
        compute=ComputePart(batching=batching),
        policy=PolicyPart("cg-bp", "ws-rr"),
        calibration=calibration,
        workload=replace(
            clustered.workload,
            requests=tuple(
                RequestPlan(i, clients[i] if clients else 0, float(i), *pair)
                for i, pair in enumerate(lengths)
            ),
        ),
    )


def perfect_hop(
    server: int, first: int, last: int, sent_at_s: float, n_tokens: int = 1, prompt: bool = False
) -> Hop:
    """Return a hop whose times are those of the model for a hop alone."""
    way_s = 0.05 + 0.1 * n_tokens
    block_s = 0.02 + 0.005 * n_tokens if prompt else 0.01
    arrived = sent_at_s + way_s
    departed = arrived + (last - first) * block_s
    n_bytes = 1000 * n_tokens
    return (server, first, last, sent_at_s, arrived, departed, departed + way_s, n_bytes, n_bytes)


@dataclass
class SyntheticRun:
    """A run directory to which records are written one by one, as clients write them."""

    path: Path
    experiment: Experiment
    _logs: dict[str, EventLog] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.path / "events").mkdir(parents=True)
        self._write_plan("virtual")

    def in_real_time(self) -> None:
        """Make the run one in real time. By default it is in virtual time."""
        self._write_plan("real")

    def _write_plan(self, clock: str) -> None:
        problem = self.experiment.problem
        servers = [server.name for server in problem.servers]
        plan = {
            "placement": {
                "policy": "cg-bp",
                "design_concurrency": 5,
                "ranges": [[0, 2], [2, 4]]
                if len(servers) == 2
                else [[0, problem.model.n_blocks]] * len(servers),
                "cache_bytes": [98.0] * len(servers),
            },
            "servers": servers,
            "placement_decision_s": 0.002,
            "network": "fabric",
            "clock": {"name": clock, "why": "asked for"},
            "startup_s": {"total": 0.5},
        }
        (self.path / "plan.json").write_text(json.dumps(plan))

    def log(self, record: AnyRecord) -> None:
        client = self._client(record.request)
        if client not in self._logs:
            self._logs[client] = EventLog(self.path / "events" / f"{client}.log")
        self._logs[client].write(record)

    def reject(self, index: int, at_s: float, server: int = 0) -> None:
        self.log(Rejected(index, at_s, server, "no-capacity", 1.0, [], []))

    def arrive(self, index: int, at_s: float, intended_at_s: float | None = None) -> None:
        plan = self.experiment.workload.requests[index]
        intended_at_s = at_s if intended_at_s is None else intended_at_s
        lengths = plan.n_input_tokens, plan.n_output_tokens
        self.log(Arrived(index, at_s, self._client(index), intended_at_s, *lengths))

    def admit(
        self, index: int, chain: Sequence[tuple[int, int, int]], attempt_at_s: float, opened_at_s: float
    ) -> None:
        self.log(Routed(index, attempt_at_s, list(chain), 0.0, 0.001, 0.004))
        self.log(Admitted(index, opened_at_s, list(chain)))
        self.log(Opening(index, attempt_at_s, opened_at_s))

    def token(
        self,
        index: int,
        token: int,
        ready_at_s: float,
        hops: Sequence[Hop],
        finished_at_s: float | None = None,
        token_id: int = 0,
    ) -> float:
        """Log one token; returns when it was finished (by default when its last hop was received)."""
        end_s = hops[-1][6] if finished_at_s is None else finished_at_s
        self.log(Token(index, end_s, token, ready_at_s, [HopRecord(*hop) for hop in hops], token_id))
        return end_s

    def serve(
        self, index: int, at_s: float, chain: Sequence[tuple[int, int, int]], n_tokens: int | None = None
    ) -> float:
        """A request that arrives and is opened at once (0.1 s), each step as modelled; answers its end.

        With ``n_tokens`` the log ends after so many, otherwise the request completes.
        """
        plan = self.experiment.workload.requests[index]
        self.arrive(index, at_s)
        self.admit(index, chain, at_s, at_s + 0.1)
        now_s = at_s + 0.1
        for token in range(plan.n_output_tokens if n_tokens is None else n_tokens):
            hops, sent = [], now_s
            for server, first, last in chain:
                length = 1 if token else plan.n_input_tokens
                hops.append(perfect_hop(server, first, last, sent, length, not token))
                sent = hops[-1][6]
            now_s = self.token(index, token, now_s, hops)
        if n_tokens is None:
            self.log(Completed(index, now_s))
        return now_s

    def _client(self, index: int) -> str:
        return self.experiment.problem.clients[self.experiment.workload.requests[index].client]


MakeRun = Callable[..., SyntheticRun]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Returns a function that makes an empty run of ``make_experiment(**options)``."""
    return lambda **options: SyntheticRun(tmp_path / "run", make_experiment(**options))


@pytest.fixture
def hop() -> Callable[..., Hop]:
    return perfect_hop

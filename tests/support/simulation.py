"""Short ways to run the fast engine on small problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policies import Hop, Placement, Problem, RequestSpec, Route, RoutingPolicy, SystemState
from policies.links import UNLIMITED_BPS, Link
from policies.online import OnlinePolicy, SystemView
from policies.workload import RequestPlan
from policies.wsrr import WsRr
from testbed.control.placing import PlacedExperiment
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Calibration, Experiment
from testbed.fast.engine import simulate_fast
from testbed.fast.outcome import FastRun

_PARTS = ("network", "compute", "policy", "workload", "faults")


def experiment_of(problem: Problem, requests: Sequence[RequestPlan], **settings: Any) -> Experiment:
    """An experiment with this problem, whose links have half of its RTTs each way.

    ``settings`` are as in ``with_fields``, and ``session_setup_s``.
    """
    servers = [server.name for server in problem.servers]
    pairs = [
        *zip(problem.clients, problem.raw_rtt_s, strict=True),
        *zip(servers, problem.server_rtt_s, strict=True),
    ]
    links = {
        way: Link(rtt_s / 2, UNLIMITED_BPS)
        for name, row in pairs
        for server, rtt_s in zip(servers, row, strict=True)
        if name != server
        for way in ((name, server), (server, name))
    }
    calibration = Calibration(
        initial_delay_s=problem.initial_delay_s, session_setup_s=settings.pop("session_setup_s", 0.0)
    )
    experiment = with_fields(load_experiment("clustered"), links=links, requests=tuple(requests), **settings)
    sites = dict.fromkeys((*problem.clients, *servers), "here")
    return replace(experiment, name="small", problem=problem, sites=sites, calibration=calibration)


def with_fields(experiment: Experiment, **fields: Any) -> Experiment:
    """A copy whose parts have these fields; only one part has a field of that name."""
    for name, value in fields.items():
        if hasattr(experiment, name) and name not in _PARTS:  # it is none of a part
            experiment = replace(experiment, **{name: value})
            continue
        (part,) = (part for part in _PARTS if hasattr(getattr(experiment, part), name))
        changed = replace(getattr(experiment, part), **{name: value})
        experiment = replace(experiment, **{part: changed})
    return experiment


def placed_experiment(problem: Problem, placement: Placement, routing: RoutingPolicy) -> PlacedExperiment:
    """Its routers are held to no rules."""
    router: Any = routing.bind(problem, placement)
    bind_to: Any = routing.bind
    return PlacedExperiment(placement, router, 0.0, lambda usable: bind_to(problem, usable), bind_to)


def run_fast(
    problem: Problem,
    placement: Placement,
    requests: Sequence[RequestPlan],
    routing: RoutingPolicy | None = None,
    *,
    online: OnlinePolicy | None = None,
    load_bps: float = 1e9,
    max_attempts: int = 1000,
    on_cache: Callable[[float, int, float], None] | None = None,
    most_steps: int = 0,
    **settings: Any,
) -> FastRun:
    """Serves ``requests`` with ``routing`` (WS-RR)."""
    experiment = experiment_of(problem, requests, load_bps=load_bps, **settings)
    placed = placed_experiment(problem, placement, routing or WsRr())
    return simulate_fast(
        experiment, placed, online, max_attempts=max_attempts, on_cache=on_cache, most_steps=most_steps
    )


def arrivals(*at_s: float, client: int = 0, n_input: int = 1, n_output: int = 1) -> list[RequestPlan]:
    return [RequestPlan(i, client, t, n_input, n_output) for i, t in enumerate(at_s)]


@dataclass
class Always:
    """Answers what ``choose`` says, whatever the state, and remembers what it was asked."""

    choose: Callable[[RequestSpec, SystemState, float], Sequence[Hop] | None]
    asked: list[tuple[float, list[int]]] = field(default_factory=list)
    """(instant, sessions seen on every server)."""
    name: str = "always"

    def bind(self, problem: Problem, placement: Placement) -> Always:
        return self

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        self.asked.append((now_s, [state.n_active(j) for j in range(len(state.cache_bytes))]))
        hops = self.choose(request, state, now_s)
        return None if hops is None else Route(tuple(hops), 0.0, 0.0)


@dataclass
class Scripted:
    """An online policy that asks for ``placements`` at their instants, and keeps the views."""

    placements: Mapping[float, Placement | None]
    drains: bool = True
    at_once: int = 1
    views: list[SystemView] = field(default_factory=list)
    next_check_at_s: float = 0.0
    name: str = "scripted"

    def bind(self, problem: Problem, placement: Placement) -> Scripted:
        self.next_check_at_s = min(self.placements)
        return self

    def check(self, now_s: float, view: SystemView) -> Placement | None:
        self.views.append(view)
        due_at_s = self.next_check_at_s  # in real time it is a little later
        self.next_check_at_s = min((t for t in self.placements if t > due_at_s), default=float("inf"))
        return self.placements[due_at_s]

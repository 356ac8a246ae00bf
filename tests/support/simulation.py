"""Short ways to run the simulator's mode ``real`` on small problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies import Hop, Placement, Problem, RequestSpec, Route, RoutingPolicy, SystemState
from policies.online import SystemView
from policies.workload import RequestPlan
from policies.wsrr import WsRr
from testbed.simulation.moving import Online
from testbed.simulation.real import RealRun, simulate_real


def run_real(
    problem: Problem,
    placement: Placement,
    requests: Sequence[RequestPlan],
    routing: RoutingPolicy | None = None,
    **options: Any,
) -> RealRun:
    """Serve ``requests`` with ``routing`` (WS-RR); ``online`` and ``load_bps`` make an ``Online``."""
    routing = routing or WsRr()
    if "online" in options:
        options["online"] = Online(
            options.pop("online"), options.pop("load_bps", 1e9), lambda usable: routing.bind(problem, usable)
        )
    return simulate_real(problem, placement, routing.bind(problem, placement), requests, **options)


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
        self.next_check_at_s = min((t for t in self.placements if t > now_s), default=float("inf"))
        return self.placements[now_s]

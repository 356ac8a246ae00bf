"""Reference instances: explicit inputs and what the paper's public simulator answers on them.

``problem_of`` reads the input, ``replay`` runs policies with the reference's semantics: admission at
arrival, waiting rounded up to the backoff series, caches held from arrival to completion.
"""

from __future__ import annotations

from typing import Any

from policies.interfaces import PlacementPolicy, RoutingPolicy
from policies.problem import ModelSpec, Placement, Problem, RequestSpec, Route, ServerSpec, service_s
from policies.state import SystemState

Instance = dict[str, Any]


def problem_of(instance: Instance) -> Problem:
    model, workload = instance["model"], instance["workload"]
    l_in, l_out = workload["n_input_tokens"], workload["n_output_tokens"]
    servers = tuple(
        ServerSpec(
            name=f"server-{i}",
            hardware=s["type"],
            memory_bytes=s["memory_gb"] * 1e9,
            decode_s=s["decode_ms"] / 1e3,
            prefill_base_s=s["prefill_ms"] / 1e3,
            prefill_slope_s=0.0,
            petals_forward_rps=s["petals_forward_per_s"],
            petals_network_rps=s["petals_network_per_s"],
            block_cap=s["block_cap"],
        )
        for i, s in enumerate(instance["servers"])
    )
    raw = instance["raw_rtt_ms"]
    per_token = model["cache_gb_per_block_session"] * 1e9 / (l_in + l_out)
    return Problem(
        model=ModelSpec(
            model["name"],
            model["n_blocks"],
            model["d_model"],
            model["block_gb"] * 1e9,
            per_token,
            petals_cache_tokens=model["petals_cache_gb_per_block"] * 1e9 / per_token,
        ),
        servers=servers,
        clients=("client",),
        raw_rtt_s=(tuple(x / 1e3 for x in raw[0][1:]),),
        token_rtt_s=(tuple(s["token_rtt_ms"] / 1e3 for s in instance["servers"]),),
        input_rtt_base_s=(tuple(s["input_rtt_ms"] / 1e3 for s in instance["servers"]),),
        input_rtt_slope_s=(tuple(0.0 for _ in servers),),
        server_rtt_s=tuple(tuple(x / 1e3 for x in row[1:]) for row in raw[1:]),
        n_input_tokens=l_in,
        n_output_tokens=l_out,
        request_rate=workload["rate_per_s"],
        join_order=tuple(instance["petals_join_order"]),
        initial_delay_s=instance["initial_delay_ms"] / 1e3,
    )


def backoff_s(raw_s: float) -> float:
    """The first of 0, 1, 3, 7, 15, 31, 63, 123, 183, ... that is not below ``raw_s``."""
    total, step = 0.0, 1.0
    while total < raw_s:
        total += step
        step = min(2 * step, 60.0)
    return total


class Answer:
    """Per request: chain, waiting, whole time and first-token time (seconds)."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.waiting_s: list[float] = []
        self.time_s: list[float] = []
        self.ttft_s: list[float] = []


def replay(
    instance: Instance, placement: Placement, routing: RoutingPolicy, setup_s: float
) -> Answer:
    problem = problem_of(instance)
    workload = instance["workload"]
    request = RequestSpec(0, workload["n_input_tokens"], workload["n_output_tokens"])
    router = routing.bind(problem, placement)
    state = SystemState(placement.cache_bytes)
    answer = Answer()
    now_s = 0.0
    for number, gap_ms in enumerate(workload["inter_arrival_ms"]):
        now_s += gap_ms / 1e3
        state.advance(now_s)
        route = router.route(request, state, now_s)
        assert route is not None
        first_s, all_s = service_s(problem, request, route.hops)
        waiting = backoff_s(route.wait_s)
        extra = waiting + problem.initial_delay_s + setup_s
        answer.routes.append(route)
        answer.waiting_s.append(waiting)
        answer.time_s.append(extra + all_s)
        answer.ttft_s.append(extra + first_s)
        state.open(number, route.hops, problem.design_cache_bytes, now_s + extra + all_s)
    return answer


def place(instance: Instance, policy: PlacementPolicy) -> Placement:
    return policy.place(problem_of(instance))

"""|R|, the number of concurrent sessions that a placement is designed for, as the paper sets it."""

from __future__ import annotations

import math

from policies.cgbp import place_conservatively
from policies.problem import InfeasiblePlacement, Placement, Problem, RequestSpec, service_s
from policies.state import SystemState
from policies.wsrr import WsRr


def concurrency_bound(problem: Problem) -> int:
    """The largest |R| for which memory suffices: floor((sum M_j - s_m(L+|V|)) / (s_c(L+|V|)))."""
    slots = problem.model.n_blocks + problem.n_servers
    free = sum(s.memory_bytes for s in problem.servers) - problem.model.block_bytes * slots
    return math.floor(free / (problem.design_cache_bytes * slots))


def single_request_s(problem: Problem) -> float:
    """Time of one request under CG-BPRR designed for one, worst client, initial delay included.

    As in the reference simulator, block caps do not apply to this estimate.
    """
    ranges = tuple(place_conservatively(problem, 1, capped=False))
    room = tuple(s.memory_bytes for s in problem.servers)
    router = WsRr().bind(problem, Placement("cg-bp", ranges, room))
    worst_s = 0.0
    for client in range(len(problem.clients)):
        request = RequestSpec(client, problem.n_input_tokens, problem.n_output_tokens)
        route = router.route(request, SystemState(room), 0.0)
        assert route is not None, "a placement that holds every block has a route"
        worst_s = max(worst_s, service_s(problem, request, route.hops)[1])
    return problem.initial_delay_s + worst_s


def paper_concurrency(problem: Problem) -> int:
    """|R| = min(round(lambda T + sqrt(lambda T)), memory bound). Raises ``InfeasiblePlacement`` below 1."""
    load = problem.request_rate * single_request_s(problem)
    bound = concurrency_bound(problem)
    if bound < 1:
        slots = problem.model.n_blocks + problem.n_servers
        needed = (problem.model.block_bytes + problem.design_cache_bytes) * slots
        total = sum(s.memory_bytes for s in problem.servers)
        raise InfeasiblePlacement(
            f"the servers' memory ({total / 1e9:.1f} GB) does not surely suffice for a single session of "
            f"{problem.model.name}: the paper's bound on |R| is {bound}, {(needed - total) / 1e9:.1f} GB are "
            "missing; add servers or memory, or set policy.design_concurrency yourself"
        )
    # MATLAB's round: halves away from zero.
    return min(max(1, math.floor(load + math.sqrt(load) + 0.5)), bound)

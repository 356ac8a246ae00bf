"""The paper's MILP (24) for one request, through HiGHS: a check on routing by waiting thresholds."""

from __future__ import annotations

import math

from policies.milp_solver import LinearModel
from policies.problem import Hop, Placement, Problem, RequestSpec, Route, hop_times_s, returns_s, service_s
from policies.state import SystemState
from policies.waiting import waiting_s


def route_by_milp(
    problem: Problem, placement: Placement, request: RequestSpec, state: SystemState, now_s: float
) -> Route | None:
    """The chain with the least waiting plus service time; ``None`` if no chain can ever hold the request.

    MILP (24) on the graph of servers: x_ij = 1 if server j follows server i (or the client). One unit
    flows from the client to itself, x_ij only where a_j <= end of i < end of j; the wait W is at least
    t^W_ij x_ij on every link; minimise W + sum x_ij (t^I_cj + (l-1) t_cj + (tau^I_j + (l-1) tau_j) k_ij),
    with the delays of ``hop_times_s`` where servers forward to each other.
    ``wait_s`` is W and ``cost_s`` the minimum.
    """
    n_blocks = problem.model.n_blocks
    cache_bytes = problem.model.cache_bytes(request.n_tokens)
    ends: dict[int | None, int] = {None: 0}
    ends |= {j: held.last for j, held in enumerate(placement.ranges) if held.n_blocks}
    model = LinearModel()
    wait = model.variable(1.0, integer=False)
    links: dict[int, tuple[int | None, Hop, float]] = {}
    for before, position in ends.items():
        for j, (first, last) in enumerate(placement.ranges):
            if not first <= position < last:
                continue
            hop = Hop(j, position, last)
            link_wait_s = waiting_s(state, j, cache_bytes * hop.n_blocks, now_s)
            if link_wait_s < math.inf:
                link = model.variable(_link_s(problem, request, before, hop), 1.0)
                links[link] = (before, hop, link_wait_s)
                model.row({wait: -1.0, link: link_wait_s}, -math.inf, 0.0)
    for node, position in ends.items():
        terms = {x: 1.0 for x, (before, _, _) in links.items() if before == node}
        terms |= {x: -1.0 for x, (_, hop, _) in links.items() if hop.server == node}
        if node is None:
            model.row(terms, 1.0, 1.0)
        elif position < n_blocks:
            model.row(terms, 0.0, 0.0)
    solution = model.solve()
    if solution is None:
        return None
    next_link = {before: (hop, w) for x, (before, hop, w) in links.items() if solution.values[x] > 0.5}
    hops: list[Hop] = []
    wait_s, at = 0.0, None
    while ends[at] < n_blocks:
        hop, link_wait_s = next_link[at]
        hops.append(hop)
        wait_s = max(wait_s, link_wait_s)
        at = hop.server
    return Route(tuple(hops), wait_s, wait_s + service_s(problem, request, hops)[1])


def _link_s(problem: Problem, request: RequestSpec, before: int | None, hop: Hop) -> float:
    """Service time of one hop, the way back to the client included in the last one's."""
    server, n_decoded = problem.servers[hop.server], request.n_output_tokens - 1
    input_s, token_s = hop_times_s(problem, request, before, hop.server)
    compute_s = server.prefill_s(request.n_input_tokens) + n_decoded * server.mean_decode_at_s(
        request.n_input_tokens, n_decoded
    )
    link_s = input_s + n_decoded * token_s + compute_s * hop.n_blocks
    if hop.last == problem.model.n_blocks:
        link_s += returns_s(problem, request, hop.server)
    return link_s

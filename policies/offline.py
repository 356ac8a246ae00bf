"""Offline CG-BPRR: a placement and routes for given requests, with proven bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from policies.cgbp import CgBp, lower_bounds_per_token_s, theorem1_per_token_s
from policies.greedy import plan
from policies.link_costs import LinkCosts, chain_total_s, cheapest_chain, link_costs, with_costs
from policies.positions import PositionGraph
from policies.problem import BlockRange, Hop, PolicyError, Problem, RequestSpec


class CgBprrAnswer(NamedTuple):
    """A placement, one chain per request, and the seconds of all output tokens of each request.

    ``objective_s`` is the sum of ``per_request_s``. By Theorem 1 it is at most ``theorem1_s``, which is the
    bound per token times the number of output tokens of all requests.
    """

    ranges: tuple[BlockRange, ...]
    chains: tuple[tuple[Hop, ...], ...]
    per_request_s: tuple[float, ...]
    objective_s: float
    theorem1_s: float


def cg_bprr(problem: Problem, requests: Sequence[RequestSpec], *, decode_only: bool = False) -> CgBprrAnswer:
    """Places with CG-BP for |R| = the number of requests, without block caps; then routes the requests.

    Every request gets its cheapest chain. CG-BP leaves cache for |R| sessions on all blocks of every server,
    so no request waits. Costs are means over all tokens, or with ``decode_only`` those of decode steps.
    Raises ``InfeasiblePlacement``, and ``PolicyError`` if a request is longer than the problem's design
    lengths.
    """
    for number, request in enumerate(requests):
        if request.n_tokens > problem.n_input_tokens + problem.n_output_tokens:
            raise PolicyError(
                f"request {number} has {request.n_tokens} tokens, more than the "
                f"{problem.n_input_tokens + problem.n_output_tokens} that caches are designed for"
            )
    ranges = CgBp(honour_block_cap=False).place(problem, len(requests)).ranges
    graph = PositionGraph(ranges, problem.model.n_blocks)
    chains, times_s = [], []
    all_costs = [link_costs(problem, request, decode_only=decode_only) for request in requests]
    for request, costs in zip(requests, all_costs, strict=True):
        chain = cheapest_chain(graph, costs)
        assert chain is not None, "CG-BP holds every block"
        chains.append(chain)
        times_s.append(chain_total_s(request, costs, chain))
    bound_s = _theorem1_s(problem, all_costs) * sum(request.n_output_tokens for request in requests)
    return CgBprrAnswer(ranges, tuple(chains), tuple(times_s), sum(times_s), bound_s)


def _theorem1_s(problem: Problem, all_costs: Sequence[LinkCosts]) -> float:
    """Returns Theorem 1's bound per token of any request, with the largest cost of any request on each server.

    The proof needs no property of the costs: the windows up to the K-th server follow each other, and only
    the K-th overlaps blocks that are held already. With ``decode_only`` costs and a request of every client
    it is the paper's bound. Where servers forward to each other, every hop counts as on the slowest way to it.
    """
    greedy = plan(problem, len(all_costs), honour_cap=False)
    slowest = [costs.of_any_way(max) for costs in all_costs]
    worst = LinkCosts(
        tuple(max(column) for column in zip(*(costs.hop_s for costs in slowest), strict=True)),
        tuple(max(column) for column in zip(*(costs.block_s for costs in slowest), strict=True)),
    )
    amortized_s = tuple(
        block_s + hop_s / held.n_blocks if held.n_blocks else math.inf
        for hop_s, block_s, held in zip(worst.hop_s, worst.block_s, greedy.ranges, strict=True)
    )
    costed = replace(
        problem,
        servers=tuple(
            replace(server, decode_s=block_s)
            for server, block_s in zip(problem.servers, worst.block_s, strict=True)
        ),
    )
    bound_s = theorem1_per_token_s(costed, greedy._replace(amortized_s=amortized_s))
    return bound_s + max(costs.returned_s for costs in slowest)


def lower_bound_s(problem: Problem, requests: Sequence[RequestSpec], *, decode_only: bool = False) -> float:
    """Returns T^o: the fractional lower bounds of all tokens of all requests (``lower_bounds_per_token_s``).

    For each request the L cheapest block places count, l_r times, each at t~_j = block cost + hop cost / m_j with m_j =
    min(floor(M_j / (s_m + s_c)), L). A server of which only some places are used counts as that part of a
    hop.
    """
    total_s = 0.0
    for request in requests:
        costs = link_costs(problem, request, decode_only=decode_only).of_any_way(min)
        per_token_s = lower_bounds_per_token_s(with_costs(problem, request, costs))[0] + costs.returned_s
        total_s += request.n_output_tokens * per_token_s
    return total_s


def knapsack_lower_bound_s(
    problem: Problem, requests: Sequence[RequestSpec], *, decode_only: bool = False
) -> float:
    """Returns a tighter lower bound: the sum over requests of the cheapest way to split L blocks on servers.

    min sum_j l_r (hop cost [k_j > 0] + block cost k_j) with integers k_j <= m_j that sum to L, and m_j as in
    ``lower_bound_s``. A server that is used costs its whole hop. It ignores that requests share
    memory and that ranges must follow each other.
    """
    return sum(
        request.n_output_tokens * _cheapest_split_s(problem, request, decode_only) for request in requests
    )


def _cheapest_split_s(problem: Problem, request: RequestSpec, decode_only: bool) -> float:
    costs = link_costs(problem, request, decode_only=decode_only).of_any_way(min)
    n_blocks = problem.model.n_blocks
    cache_bytes = problem.model.cache_bytes(request.n_tokens)
    least_s = [0.0] + [math.inf] * n_blocks
    for j, server in enumerate(problem.servers):
        most = problem.stored(j).best_blocks(server.memory_bytes, cache_bytes)
        least_s = [
            min(
                [least_s[n]]
                + [least_s[n - k] + costs.hop_s[j] + costs.block_s[j] * k for k in range(1, min(most, n) + 1)]
            )
            for n in range(n_blocks + 1)
        ]
    return least_s[-1] + costs.returned_s

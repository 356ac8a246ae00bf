"""The greedy core of CG-BP (Alg. 1, lines 1-9): the number of blocks, the order and the windows of servers.

It is separate from the policy, so that |R| can be estimated with it and ablations can reuse its parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from policies.problem import BlockRange, Problem, RequestSpec, hop_times_s, return_times_s

_DUMMY_EXTRA_S = 1e-3
"""The dummy server, which holds every block at first, is slower than the slowest real one by this much."""

_TICKS_PER_S = 10**15
"""Sums over windows are compared in whole ticks: exact, so equal windows tie in any order of addition."""


def whole(amount: float, each: float) -> int:
    """Returns how often ``each`` fits into ``amount``; a ratio just below a whole number counts as it."""
    return math.floor(amount / each + 1e-9)


class GreedyPlan(NamedTuple):
    """The result of the greedy placement.

    ``ranges[j]`` is ``BlockRange(0, 0)`` for a server that holds nothing. ``order`` contains the servers
    with blocks, the cheapest first. ``amortized_s[j]`` is t~_j, infinite where m_j = 0.
    """

    ranges: tuple[BlockRange, ...]
    order: tuple[int, ...]
    amortized_s: tuple[float, ...]


def block_counts(problem: Problem, design_concurrency: int, *, honour_cap: bool = True) -> list[int]:
    """Returns m_j = min(floor(M_j / (s_m + s_c |R|)), L), and at most ``block_cap`` with ``honour_cap``."""
    cache_bytes = problem.design_cache_bytes * design_concurrency
    counts = []
    for j, server in enumerate(problem.servers):
        count = problem.stored(j).most_blocks(server.memory_bytes, cache_bytes)
        if honour_cap and server.block_cap is not None:
            count = min(count, server.block_cap)
        counts.append(max(count, 0))
    return counts


def amortized_s(problem: Problem, counts: Sequence[int]) -> list[float]:
    """Returns t~_j = tau_j + max_c t_cj / m_j: seconds per block and token if all of its blocks are used.

    Where servers forward to each other, t_cj is what a hop on server j costs on average (``_forwarded_s``).
    """
    clients = range(len(problem.clients))
    times_s = []
    for j, (server, count) in enumerate(zip(problem.servers, counts, strict=True)):
        if not count:
            times_s.append(math.inf)
        elif problem.forwarding:
            times_s.append(
                server.decode_s + max(_forwarded_s(problem, c, j, counts) for c in clients) / count
            )
        else:
            times_s.append(server.decode_s + max(problem.token_rtt_s[c][j] for c in clients) / count)
    return times_s


def _forwarded_s(problem: Problem, client: int, server: int, counts: Sequence[int]) -> float:
    """Returns the mean seconds per token and hop on server j outside of its blocks, with forwarding.

    On a chain of servers like j a share m_j / L of the hops is the first, and as many the last: these have the ways
    from and to the client. The others have the mean way from a server, by blocks. With m_j = L that is t_cj.
    """
    request = RequestSpec(client, problem.n_input_tokens, problem.n_output_tokens)
    there_s = hop_times_s(problem, request, None, server)[1]
    back_s = return_times_s(problem, request, server)[1]
    others = [(i, count) for i, count in enumerate(counts) if count and i != server]
    if not others:
        return there_s + back_s
    across_s = sum(count * hop_times_s(problem, request, i, server)[1] for i, count in others)
    across_s /= sum(count for _, count in others)
    part = counts[server] / problem.model.n_blocks
    return part * (there_s + back_s) + (1 - part) * across_s


def serving_order(times_s: Sequence[float]) -> list[int]:
    """Returns the servers with a finite t~_j, the smallest first; equal ones in list order."""
    return sorted((j for j, t in enumerate(times_s) if t < math.inf), key=times_s.__getitem__)


def plan(problem: Problem, design_concurrency: int, *, honour_cap: bool = True) -> GreedyPlan:
    """Chooses every server's window, cheapest server first. Blocks may stay unheld: callers must check."""
    n_blocks = problem.model.n_blocks
    counts = block_counts(problem, design_concurrency, honour_cap=honour_cap)
    times_s = amortized_s(problem, counts)
    order = serving_order(times_s)
    ranges = [BlockRange(0, 0)] * problem.n_servers
    if order:
        ticks = [round(t * _TICKS_PER_S) if t < math.inf else 0 for t in times_s]
        dummy = ticks[order[-1]] + round(_DUMMY_EXTRA_S * _TICKS_PER_S)
        capacity = [0] * n_blocks
        load = [dummy * design_concurrency] * n_blocks
        for j in order:
            count = counts[j]
            first = _window(capacity, load, count, design_concurrency)
            ranges[j] = BlockRange(first, first + count)
            free_bytes = problem.servers[j].memory_bytes - problem.stored(j).range_bytes(ranges[j])
            sessions = whole(free_bytes, problem.design_cache_bytes * count)
            saved = dummy - ticks[j]
            for b in range(first, first + count):
                load[b] -= saved * min(max(design_concurrency - capacity[b], 0), sessions)
                capacity[b] += sessions
    return GreedyPlan(tuple(ranges), tuple(order), tuple(times_s))


def _window(capacity: list[int], load: list[int], count: int, design_concurrency: int) -> int:
    """Returns the first block of the window for ``count`` blocks.

    While some block has room for fewer than |R| sessions, it is the window with the largest load among those
    with such a block. After that it is the one with the lexicographically smallest sorted capacities. On ties
    it is the lowest one.
    """
    starts = range(len(capacity) - count + 1)
    short = [c < design_concurrency for c in capacity]
    if not any(short):
        return min(starts, key=lambda a: sorted(capacity[a : a + count]))
    best, best_load = -1, -1
    window_load, window_short = sum(load[:count]), sum(short[:count])
    for a in starts:
        if a:
            window_load += load[a + count - 1] - load[a - 1]
            window_short += short[a + count - 1] - short[a - 1]
        if window_short and window_load > best_load:
            best, best_load = a, window_load
    return best

"""CG-BP: conservative greedy block placement (the paper's Algorithm 1, lines 1-9)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.problem import BlockRange, InfeasiblePlacement, Placement, Problem

_EPSILON = 1e-9
_DUMMY_MARGIN_S = 1e-3


def conservative_blocks(problem: Problem, concurrency: int, *, capped: bool = True) -> list[int]:
    """m_j = min(floor(M_j / (s_m + s_c |R|)), L), at most ``block_cap`` where a server has one."""
    per_block = problem.model.block_bytes + problem.design_cache_bytes * concurrency
    counts: list[int] = []
    for server in problem.servers:
        count = min(math.floor(server.memory_bytes / per_block + _EPSILON), problem.model.n_blocks)
        if capped and server.block_cap is not None:
            count = min(count, server.block_cap)
        counts.append(count)
    return counts


def amortized_times(problem: Problem, counts: Sequence[int]) -> list[float]:
    """t~_j = tau_j + max_c t_cj / m_j per block and token; infinite where m_j = 0."""
    times: list[float] = []
    for j, server in enumerate(problem.servers):
        worst = max(row[j] for row in problem.token_rtt_s)
        times.append(server.decode_s + worst / counts[j] if counts[j] else math.inf)
    return times


def concurrent_sessions(problem: Problem, counts: Sequence[int]) -> list[int]:
    """f_j: sessions that server j can serve on all its blocks at once."""
    model, cache = problem.model, problem.design_cache_bytes
    return [
        math.floor((s.memory_bytes - model.block_bytes * m) / (cache * m) + _EPSILON) if m else 0
        for s, m in zip(problem.servers, counts, strict=True)
    ]


def place_conservatively(problem: Problem, concurrency: int, *, capped: bool = True) -> list[BlockRange]:
    """One range per server for |R| = ``concurrency``, placed in the order of t~ (stable).

    While some block lacks capacity for |R| sessions, a server takes the window with the largest
    remaining time that holds such a block; afterwards the one with the lexicographically smallest
    sorted capacities. Raises ``InfeasiblePlacement``.
    """
    n_blocks = problem.model.n_blocks
    counts = conservative_blocks(problem, concurrency, capped=capped)
    times = amortized_times(problem, counts)
    sessions = concurrent_sessions(problem, counts)
    order = sorted((j for j, m in enumerate(counts) if m), key=lambda j: times[j])
    ranges = [BlockRange(0, 0)] * problem.n_servers
    dummy_s = max((times[j] for j in order), default=0.0) + _DUMMY_MARGIN_S
    capacity = [0] * n_blocks
    remaining = [dummy_s * concurrency] * n_blocks
    for j in order:
        m = counts[j]
        first = _choose_window(capacity, remaining, m, concurrency)
        ranges[j] = BlockRange(first, first + m)
        for b in range(first, first + m):
            remaining[b] -= (dummy_s - times[j]) * min(max(concurrency - capacity[b], 0), sessions[j])
            capacity[b] += sessions[j]
    short = [b for b, c in enumerate(capacity) if c < concurrency]
    if short:
        raise InfeasiblePlacement(_explain(problem, counts, short, concurrency))
    return ranges


def _choose_window(capacity: list[int], remaining: list[float], m: int, concurrency: int) -> int:
    starts = range(len(capacity) - m + 1)
    if min(capacity) < concurrency:
        best, best_s = -1, -math.inf
        for first in starts:
            if min(capacity[first : first + m]) < concurrency:
                total = sum(remaining[first : first + m])
                if total > best_s * (1 + 1e-13):
                    best, best_s = first, total
        return best
    return min(starts, key=lambda first: sorted(capacity[first : first + m]))


def _explain(problem: Problem, counts: Sequence[int], short: list[int], concurrency: int) -> str:
    model = problem.model
    per_block = model.block_bytes + problem.design_cache_bytes * concurrency
    missing = len(short) * per_block
    best = max(range(problem.n_servers), key=lambda j: problem.servers[j].memory_bytes)
    extra = -(-len(short) // max(counts[best], 1))
    spans = f"{short[0]}-{short[-1]}" if len(short) > 1 else str(short[0])
    fits = next((r for r in range(concurrency - 1, 0, -1) if _fits(problem, r)), None)
    remedy = f"|R| <= {fits} fits" if fits else "no |R| fits"
    if counts[best]:
        plural = "s" if extra > 1 else ""
        remedy += f"; or add {extra} more {problem.servers[best].hardware} server{plural}"
    else:
        remedy += f"; no server has the {per_block / 1e9:.2f} GB that one block and its caches take"
    return (
        f"the servers cannot hold {model.name} for |R| = {concurrency} concurrent sessions: {len(short)} of "
        f"{model.n_blocks} blocks are short of capacity (within {spans}), about {missing / 1e9:.1f} GB of "
        f"memory is missing; {remedy}"
    )


def _fits(problem: Problem, concurrency: int) -> bool:
    """Whether the servers' blocks could cover the model for this |R| (necessary condition)."""
    return sum(conservative_blocks(problem, concurrency)) >= problem.model.n_blocks


def theorem1_bound_s(problem: Problem, ranges: Sequence[BlockRange]) -> float:
    """Theorem 1: per-token time of CG-BPRR is at most sum_{j<=K} t~_j m_j - tau_K (sum m_j - L).

    K is the number of servers, in the order of t~, after which every block is held.
    """
    counts = [r.n_blocks for r in ranges]
    times = amortized_times(problem, counts)
    held: set[int] = set()
    total_s, n_placed = 0.0, 0
    for j in sorted((j for j, m in enumerate(counts) if m), key=lambda j: times[j]):
        held.update(range(ranges[j].first, ranges[j].last))
        total_s += times[j] * counts[j]
        n_placed += counts[j]
        if len(held) == problem.model.n_blocks:
            return total_s - problem.servers[j].decode_s * (n_placed - problem.model.n_blocks)
    raise InfeasiblePlacement("Theorem 1 needs a placement that holds every block")


def lower_bound_s(problem: Problem, client: int) -> float:
    """T^o_c: no placement serves ``client`` faster per token; L blocks filled from the fastest servers.

    Uses m_j for a single session and t~_{j,c} = tau_j + t_cj / m_j.
    """
    counts = conservative_blocks(problem, 1, capped=False)
    row = problem.token_rtt_s[client]
    rates = sorted(
        (s.decode_s + row[j] / counts[j], counts[j]) for j, s in enumerate(problem.servers) if counts[j]
    )
    left, total_s = problem.model.n_blocks, 0.0
    for per_block_s, count in rates:
        taken = min(count, left)
        total_s += per_block_s * taken
        left -= taken
    return total_s if not left else math.inf


class CgBp:
    """Conservative greedy block placement of the paper; |R| as the paper sets it unless given."""

    name = "cg-bp"

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        from policies.design import paper_concurrency

        concurrency = design_concurrency or paper_concurrency(problem)
        ranges = place_conservatively(problem, concurrency)
        cache = [
            s.memory_bytes - problem.model.block_bytes * r.n_blocks if r.n_blocks else 0.0
            for s, r in zip(problem.servers, ranges, strict=True)
        ]
        lower = [lower_bound_s(problem, c) for c in range(len(problem.clients))]
        bounds = {
            "theorem1_per_token_s": theorem1_bound_s(problem, ranges),
            "lower_bound_per_token_s": sum(lower) / len(lower),
        }
        return Placement(self.name, tuple(ranges), tuple(cache), concurrency, bounds)

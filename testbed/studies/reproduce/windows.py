"""Placements between PETALS and CG-BP, which differ in three steps. Each step can be made alone.

The steps are the order in which servers choose, the number of blocks that each holds (with the cache room
that goes with it), and the rule by which it chooses its window, the range of its blocks. Without any step the
placement is that of PETALS, with order alone it is Optimized Order, with number alone Optimized Number, and
with all three CG-BP.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from policies.greedy import amortized_s, block_counts, serving_order, whole
from policies.petals import choose_ranges, petals_block_counts
from policies.problem import BlockRange, InfeasiblePlacement, Placement, Problem

STEPS = ("order", "number", "windows")

_TICKS_PER_S = 10**15
_DUMMY_EXTRA_S = 1e-3


def place_with(problem: Problem, steps: Collection[str], design_concurrency: int) -> Placement:
    """Returns PETALS' placement with those ``steps`` done as in CG-BP, for |R| = ``design_concurrency``.

    Raises ``InfeasiblePlacement`` if a block has no server.
    """
    of_cgbp = block_counts(problem, design_concurrency)
    counts = of_cgbp if "number" in steps else petals_block_counts(problem)
    if "order" in steps:
        order = serving_order(amortized_s(problem, of_cgbp))
        order += [j for j in range(problem.n_servers) if j not in set(order)]
    else:
        order = list(problem.join_order)
    model = problem.model
    if "number" in steps:
        cache_bytes = problem.room_bytes([BlockRange(0, count) for count in counts])
    else:
        cache_bytes = tuple(count * model.petals_cache_bytes for count in counts)
    if "windows" in steps:
        ranges = _cgbp_ranges(problem, counts, cache_bytes, order, design_concurrency)
    else:
        ranges = choose_ranges(problem, counts, order)
    name = "+".join(step for step in STEPS if step in steps) or "petals"
    placement = Placement(name, ranges, cache_bytes, design_concurrency)
    if placement.uncovered(model.n_blocks):
        raise InfeasiblePlacement(
            f"{name} leaves blocks without a server for {design_concurrency} sessions; give servers more memory"
        )
    return placement


def _cgbp_ranges(
    problem: Problem,
    counts: Sequence[int],
    cache_bytes: Sequence[float],
    order: Sequence[int],
    design_concurrency: int,
) -> tuple[BlockRange, ...]:
    """Returns the ranges that CG-BP's window rule (Alg. 1, lines 4-9) chooses for given counts, cache rooms
    and order.

    While a block has room for fewer than |R| sessions, the rule chooses, of the windows with such a block,
    the one with the largest sum of T_b; of equals the lowest. After that it chooses the window with the
    smallest sorted capacities.
    """
    n_blocks = problem.model.n_blocks
    times_s = amortized_s(problem, counts)
    ticks = [round(t * _TICKS_PER_S) if t < math.inf else 0 for t in times_s]
    dummy = max(ticks) + round(_DUMMY_EXTRA_S * _TICKS_PER_S)
    capacity = [0] * n_blocks
    load = [dummy * design_concurrency] * n_blocks
    ranges = [BlockRange(0, 0)] * problem.n_servers
    for j in order:
        count = counts[j]
        if not count:
            continue
        starts = range(n_blocks - count + 1)
        short = [a for a in starts if min(capacity[a : a + count]) < design_concurrency]
        if short:
            sums = {a: sum(load[a : a + count]) for a in short}
            first = max(short, key=sums.__getitem__)
        else:
            ordered = {a: sorted(capacity[a : a + count]) for a in starts}
            first = min(starts, key=ordered.__getitem__)
        ranges[j] = BlockRange(first, first + count)
        sessions = whole(cache_bytes[j], problem.design_cache_bytes * count)
        for b in range(first, first + count):
            load[b] -= (dummy - ticks[j]) * min(max(design_concurrency - capacity[b], 0), sessions)
            capacity[b] += sessions
    return tuple(ranges)

"""PETALS' placement by block throughput, as in the reference simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.feasibility import petals_infeasible
from policies.interfaces import PlacementPolicy, SessionSetup
from policies.problem import BlockRange, Placement, Problem, ServerSpec


@dataclass
class PetalsPlacement(PlacementPolicy):
    """Servers join one after another, and each chooses the blocks with the least throughput (PETALS).

    ``honour_block_cap`` applies ``ServerSpec.block_cap`` as the reference simulator does.
    """

    honour_block_cap: bool = True
    name: str = "petals"
    session_setup: ClassVar[SessionSetup] = "petals"
    needs_petals_throughput: ClassVar[bool] = True

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places servers in ``problem.join_order``; ``design_concurrency`` has no effect.

        The cache room is m_j times PETALS' own reservation per block. Raises ``InfeasiblePlacement``.
        """
        counts = petals_block_counts(problem, honour_cap=self.honour_block_cap)
        ranges = choose_ranges(problem, counts, problem.join_order)
        cache_bytes = tuple(held.n_blocks * problem.model.petals_cache_bytes for held in ranges)
        placement = Placement(self.name, ranges, cache_bytes)
        missing = placement.uncovered(problem.model.n_blocks)
        if missing:
            raise petals_infeasible(problem, counts, missing)
        return placement


def petals_block_counts(problem: Problem, *, honour_cap: bool = True) -> list[int]:
    """Returns m_j = min(floor((M_j - autograd reserve) / (s_m + PETALS' cache per block)), L, the cap).

    A server without enough memory gets 0 blocks.
    """
    model = problem.model
    counts = []
    for j, server in enumerate(problem.servers):
        usable_bytes = server.memory_bytes - model.petals_autograd_bytes
        count = problem.stored(j).most_blocks(usable_bytes, model.petals_cache_bytes)
        if honour_cap and server.block_cap is not None:
            count = min(count, server.block_cap)
        counts.append(max(count, 0))
    return counts


def choose_ranges(problem: Problem, counts: Sequence[int], order: Sequence[int]) -> tuple[BlockRange, ...]:
    """Returns ranges of ``counts[j]`` blocks for servers that join in ``order``.

    A server chooses the window whose sorted block throughputs are lexicographically smallest, the
    first one on ties. It adds min(forward_rps / ((m + 1) / 2), network_rps) to each of its blocks. The
    sums are float64 in join order, because a tie can depend on their last bit.
    """
    n_blocks = problem.model.n_blocks
    throughput = [0.0] * n_blocks
    ranges = [BlockRange(0, 0)] * problem.n_servers
    for j in order:
        count = counts[j]
        if not count:
            continue
        first = weakest_window(throughput, count)
        ranges[j] = BlockRange(first, first + count)
        rps = window_rps(problem.servers[j], count)
        for b in range(first, first + count):
            throughput[b] += rps
    return tuple(ranges)


def window_rps(server: ServerSpec, count: int) -> float:
    """Returns the throughput (tokens per second) that a server adds to each of its ``count`` blocks."""
    return min(server.petals_forward_rps / ((1 + count) / 2), server.petals_network_rps)


def weakest_window(throughput: list[float], count: int) -> int:
    """Returns the first block of the window whose sorted throughputs are lexicographically smallest.

    On ties it is the lowest one.
    """
    best, best_sorted = 0, sorted(throughput[:count])
    for a in range(1, len(throughput) - count + 1):
        window = throughput[a : a + count]
        if min(window) <= best_sorted[0]:
            window.sort()
            if window < best_sorted:
                best, best_sorted = a, window
    return best

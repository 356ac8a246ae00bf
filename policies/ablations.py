"""PETALS' placement with one part of CG-BP: the order in which servers choose, or their number of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.design import given_or_chosen
from policies.feasibility import cgbp_infeasible, petals_infeasible
from policies.greedy import amortized_s, block_counts, serving_order
from policies.interfaces import PlacementPolicy, SessionSetup
from policies.petals import choose_ranges, petals_block_counts
from policies.problem import Placement, Problem


@dataclass
class OptimizedOrder(PlacementPolicy):
    """PETALS' placement with servers joining in CG-BP's order (the paper's Optimized Order).

    The number of blocks per server and the cache room are PETALS'. Servers that CG-BP would leave out join
    last.
    """

    honour_block_cap: bool = True
    name: str = "petals-optimized-order"
    counts_drafts: ClassVar[bool] = True
    sees_join_order: ClassVar[bool] = False
    session_setup: ClassVar[SessionSetup] = "petals"
    needs_petals_throughput: ClassVar[bool] = True

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Servers join in the order of t~_j, with CG-BP's m_j for |R|. Raises ``InfeasiblePlacement``."""
        concurrency = given_or_chosen(problem, design_concurrency)
        order = _cgbp_order(problem, concurrency, self.honour_block_cap)
        counts = petals_block_counts(problem, honour_cap=self.honour_block_cap)
        ranges = choose_ranges(problem, counts, order)
        cache_bytes = tuple(held.n_blocks * problem.model.petals_cache_bytes for held in ranges)
        placement = Placement(self.name, ranges, cache_bytes, concurrency)
        missing = placement.uncovered(problem.model.n_blocks)
        if missing:
            raise petals_infeasible(problem, counts, missing)
        return placement


@dataclass
class OptimizedNumber(PlacementPolicy):
    """PETALS' choice of windows with CG-BP's number of blocks per server (the paper's Optimized Number).

    Servers join in PETALS' order; the cache room is all memory that the blocks leave, as for CG-BP.
    """

    honour_block_cap: bool = True
    name: str = "petals-optimized-number"
    counts_drafts: ClassVar[bool] = True
    session_setup: ClassVar[SessionSetup] = "petals"
    needs_petals_throughput: ClassVar[bool] = True

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places windows of m_j = floor(M_j / (s_m + s_c |R|)) blocks. Raises ``InfeasiblePlacement``."""
        concurrency = given_or_chosen(problem, design_concurrency)
        counts = block_counts(problem, concurrency, honour_cap=self.honour_block_cap)
        ranges = choose_ranges(problem, counts, problem.join_order)
        placement = Placement(self.name, ranges, problem.room_bytes(ranges), concurrency)
        missing = placement.uncovered(problem.model.n_blocks)
        if missing:
            raise cgbp_infeasible(problem, concurrency, missing, self.honour_block_cap)
        return placement


def _cgbp_order(problem: Problem, concurrency: int, honour_cap: bool) -> list[int]:
    counts = block_counts(problem, concurrency, honour_cap=honour_cap)
    order = serving_order(amortized_s(problem, counts))
    return order + [j for j in range(problem.n_servers) if j not in set(order)]

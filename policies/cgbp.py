"""CG-BP: conservative greedy block placement, and the bounds that the paper proves for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.design import given_or_chosen
from policies.feasibility import cgbp_infeasible
from policies.greedy import GreedyPlan, plan, whole
from policies.interfaces import PlacementPolicy
from policies.problem import Placement, Problem


@dataclass
class CgBp(PlacementPolicy):
    """Fast servers first, each with cache room for the design number of sessions (CG-BP, Alg. 1).

    ``honour_block_cap`` applies ``ServerSpec.block_cap`` as the reference simulator does.
    """

    honour_block_cap: bool = True
    name: str = "cg-bp"
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks for ``design_concurrency`` sessions; ``None`` chooses |R| as the paper does.

        Raises ``InfeasiblePlacement`` if no server holds some block, ``PolicyError`` if |R| < 1.
        """
        design_concurrency = given_or_chosen(problem, design_concurrency)
        greedy = plan(problem, design_concurrency, honour_cap=self.honour_block_cap)
        placement = Placement(
            policy=self.name,
            ranges=greedy.ranges,
            cache_bytes=problem.room_bytes(greedy.ranges),
            design_concurrency=design_concurrency,
        )
        missing = placement.uncovered(problem.model.n_blocks)
        if missing:
            raise cgbp_infeasible(problem, design_concurrency, missing, self.honour_block_cap)
        bounds = {}
        if not problem.forwarding:  # both bounds are proven for hub-spoke
            bounds["theorem1_per_token_s"] = theorem1_per_token_s(problem, greedy)
            bounds["lower_bound_per_token_s"] = min(lower_bounds_per_token_s(problem))
        return Placement(
            placement.policy, placement.ranges, placement.cache_bytes, design_concurrency, bounds
        )


def theorem1_per_token_s(problem: Problem, greedy: GreedyPlan) -> float:
    """Returns Theorem 1's upper bound on any client's seconds per decoded token with up to |R| sessions.

    It is ``sum_{j<=K} t~_j m_j - tau_K (sum_{j<=K} m_j - L)`` over the servers in serving order. K is
    the first server with which all blocks are held. Raises ``ValueError`` if some block is not held.
    """
    missing = set(range(problem.model.n_blocks))
    total_s, n_placed = 0.0, 0
    for j in greedy.order:
        held = greedy.ranges[j]
        missing.difference_update(range(held.first, held.last))
        total_s += greedy.amortized_s[j] * held.n_blocks
        n_placed += held.n_blocks
        if not missing:
            return total_s - problem.servers[j].decode_s * (n_placed - problem.model.n_blocks)
    raise ValueError("theorem 1 needs a placement that holds every block")


def lower_bounds_per_token_s(problem: Problem) -> list[float]:
    """Returns T^o_c for every client c, in seconds: no placement and route decodes a token faster.

    It is the sum of the L cheapest block places, at most m_j of server j, each at t~_jc = tau_j + t_cj / m_j,
    with m_j = min(floor(M_j / (s_m + s_c)), L). Infinite if the servers cannot hold L blocks. Block
    caps do not apply.
    """
    n_blocks = problem.model.n_blocks
    per_block_bytes = problem.model.block_bytes + problem.design_cache_bytes
    counts = [min(whole(s.memory_bytes, per_block_bytes), n_blocks) for s in problem.servers]
    bounds = []
    for rtt_s in problem.token_rtt_s:
        offers = sorted(
            (server.decode_s + rtt_s[j] / counts[j], counts[j])
            for j, server in enumerate(problem.servers)
            if counts[j] > 0
        )
        left, total_s = n_blocks, 0.0
        for time_s, count in offers:
            taken = min(count, left)
            total_s += taken * time_s
            left -= taken
        bounds.append(total_s if left == 0 else float("inf"))
    return bounds

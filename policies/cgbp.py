"""CG-BP: conservative greedy block placement, and the formulas of the paper's bounds (``policies.bounds`` uses them)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from policies.design import given_or_chosen
from policies.feasibility import cgbp_infeasible
from policies.greedy import GreedyPlan, plan
from policies.interfaces import PlacementPolicy
from policies.link_costs import LinkCosts
from policies.problem import Placement, Problem


@dataclass
class CgBp(PlacementPolicy):
    """Fast servers first, each with cache room for the design number of sessions (CG-BP, Alg. 1).

    ``honour_block_cap`` applies ``ServerSpec.block_cap`` as the reference simulator does.
    """

    honour_block_cap: bool = True
    name: str = "cg-bp"
    sees_join_order: ClassVar[bool] = False
    counts_drafts: ClassVar[bool] = True

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks for ``design_concurrency`` sessions; ``None`` chooses |R| as the paper does.

        Raises ``InfeasiblePlacement`` if no server holds some block, ``PolicyError`` if |R| < 1.
        """
        design_concurrency = given_or_chosen(problem, design_concurrency, honour_cap=self.honour_block_cap)
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
        return placement


def theorem1_per_token_s(problem: Problem, greedy: GreedyPlan) -> float:
    """Returns Theorem 1 as it is published: a bound on any client's seconds per decode step, on its best chain for them.

    WS-RR also counts the prefill, so its chain may be another one (``policies.bounds``).
    """
    decode_s = tuple(server.decode_s for server in problem.servers)
    hops_s = tuple(
        (time_s - block_s) * held.n_blocks if held.n_blocks else math.inf
        for time_s, block_s, held in zip(greedy.amortized_s, decode_s, greedy.ranges, strict=True)
    )
    return theorem1_s(LinkCosts(hops_s, decode_s), greedy, problem.model.n_blocks)


def theorem1_s(costs: LinkCosts, greedy: GreedyPlan, n_blocks: int) -> float:
    """Returns Theorem 1's upper bound on the cheapest chain's seconds per token, on CG-BP's placement.

    It is ``sum_{j<=K} (hop_j + block_j m_j) - block_K (sum_{j<=K} m_j - L)`` over the servers in serving order, which is
    the paper's with t~_j m_j written out. K is the first server with which all blocks are held. The proof needs no
    property of ``costs``: the windows up to the K-th server follow each other, and only the K-th overlaps blocks that
    are held already. So it holds for the costs that a routing policy minimises, whichever they are. Raises
    ``ValueError`` if some block is not held.
    """
    servers = theorem1_servers(greedy, n_blocks)
    counts = [greedy.ranges[j].n_blocks for j in servers]
    total_s = sum(costs.hop_s[j] + costs.block_s[j] * count for j, count in zip(servers, counts, strict=True))
    return total_s - costs.block_s[servers[-1]] * (sum(counts) - n_blocks)


def theorem1_servers(greedy: GreedyPlan, n_blocks: int) -> tuple[int, ...]:
    """Returns the servers of the chain that Theorem 1 is about: in serving order, until all blocks are held.

    Raises ``ValueError`` if some block is not held.
    """
    missing = set(range(n_blocks))
    for number, j in enumerate(greedy.order, 1):
        missing.difference_update(range(greedy.ranges[j].first, greedy.ranges[j].last))
        if not missing:
            return greedy.order[:number]
    raise ValueError("theorem 1 needs a placement that holds every block")


def lower_bounds_per_token_s(problem: Problem) -> list[float]:
    """Returns T^o_c for every client c, in seconds: no placement and route decodes a token faster.

    Caches are those of the design lengths. Block caps do not apply.
    """
    decode_s = tuple(
        min(law.decode_at_s(server.decode_context_tokens) for law in (server, *server.others))
        for server in problem.servers
    )
    n_tokens = problem.n_input_tokens + problem.n_output_tokens
    return [lower_bound_s(problem, n_tokens, LinkCosts(hop_s, decode_s)) for hop_s in problem.token_rtt_s]


def lower_bound_s(problem: Problem, n_tokens: int, costs: LinkCosts) -> float:
    """Returns Lemma B.1's bound for a request of ``n_tokens`` in all: no placement and route costs it less.

    It is the sum of the L cheapest block places, at most m_j of server j, each at block_j + hop_j / m_j, with m_j =
    min(floor(M_j / (s_m + s_c)), L). A server of which only some places are used counts as that part of a hop.
    Infinite if the servers cannot hold L blocks.
    """
    n_blocks = problem.model.n_blocks
    cache_bytes = problem.model.cache_bytes(n_tokens)
    offers = []
    for j, (server, hop_s, block_s) in enumerate(
        zip(problem.servers, costs.hop_s, costs.block_s, strict=True)
    ):
        count = problem.stored(j).best_blocks(server.memory_bytes, cache_bytes)
        if count > 0:
            offers.append((block_s + hop_s / count, count))
    left, total_s = n_blocks, 0.0
    for time_s, count in sorted(offers):
        taken = min(count, left)
        total_s += taken * time_s
        left -= taken
    return total_s if left == 0 else math.inf

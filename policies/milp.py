"""The exact offline optimum of placement and routing (BPRR), its LP relaxation, and the rounding of that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from policies.design import given_or_chosen
from policies.feasibility import block_list, gigabytes
from policies.greedy import plan
from policies.interfaces import PlacementPolicy
from policies.link_costs import chain_total_s, cheapest_chain, link_costs
from policies.milp_model import BprrModel
from policies.milp_paper import PaperModel
from policies.milp_solver import LinearModel, Solution
from policies.positions import PositionGraph
from policies.problem import (
    BlockRange,
    Hop,
    InfeasiblePlacement,
    Placement,
    PolicyError,
    Problem,
    RequestSpec,
)
from policies.waiting import ROUNDING_RATIO, fits

MAX_NODES = 500
"""Branches of a search, if not stated otherwise."""


class BprrAnswer(NamedTuple):
    """A placement and one chain per request, without waits.

    ``objective_s`` is the time of all output tokens of all requests, in seconds. No placement and routes have
    less than ``lower_bound_s``; with ``proven_optimal`` none have less than the objective.
    """

    ranges: tuple[BlockRange, ...]
    chains: tuple[tuple[Hop, ...], ...]
    objective_s: float
    lower_bound_s: float
    proven_optimal: bool

    @property
    def gap_ratio(self) -> float:
        """The share of the objective by which the optimum may be less than it; 0 if it is proven."""
        return 1 - self.lower_bound_s / self.objective_s if self.objective_s else 0.0


class Program(Protocol):
    """A program for placement and routes, whose arguments are those of ``BprrModel``."""

    linear: LinearModel

    def __init__(
        self, problem: Problem, requests: Sequence[RequestSpec], *, decode_only: bool, min_blocks: int
    ) -> None: ...
    def ranges(self, solution: Solution) -> tuple[BlockRange, ...]: ...
    def chains(self, solution: Solution) -> tuple[tuple[Hop, ...], ...]: ...
    def values(self, ranges: Sequence[BlockRange], chains: Sequence[Sequence[Hop]]) -> list[float]: ...


def solve_bprr(
    problem: Problem,
    requests: Sequence[RequestSpec],
    *,
    decode_only: bool = False,
    min_blocks: int = 0,
    max_nodes: int = MAX_NODES,
    gap_ratio: float = 0.0,
    program: type[Program] = BprrModel,
) -> BprrAnswer:
    """Places blocks and routes all ``requests`` together, so that the time of all their tokens is minimal.

    Every request counts with its own number of output tokens, and its cache with its own lengths (the paper's
    App. B.2). ``decode_only`` counts every token as a decode step. ``min_blocks`` = 1
    makes every server with room for a block hold one. A solution within ``gap_ratio`` of the bound
    counts as optimal. ``program`` is that of ``policies.milp_model`` or ``policies.milp_paper``. The search begins with the best of
    CG-BP's placements and ends after ``max_nodes`` branches. Raises ``InfeasiblePlacement`` if there
    is no solution, and ``PolicyError`` if the instance is too large or the branches too few to find one.
    """
    _refuse_if_short(problem, requests)
    model = program(problem, requests, decode_only=decode_only, min_blocks=min_blocks)
    start = _greedy_start(problem, requests, decode_only, min_blocks)
    solution = model.linear.solve(
        max_nodes=max_nodes, gap_ratio=gap_ratio, start=None if start is None else model.values(*start)
    )
    if solution is None:
        raise _infeasible(problem, requests)
    chains = model.chains(solution)
    objective_s = _objective_s(problem, requests, chains, decode_only)
    ranges = model.ranges(solution)
    overbooked = _overbooked(problem, requests, ranges, chains)
    assert not overbooked, f"the program's solution overbooks {overbooked}"
    if solution.proven_optimal and gap_ratio == 0:
        bound_s = objective_s
    else:  # the bound of a weak program can be below 0, which no time is
        bound_s = min(max(solution.bound, 0.0), objective_s)
    return BprrAnswer(ranges, chains, objective_s, bound_s, solution.proven_optimal)


def round_bprr(
    problem: Problem,
    requests: Sequence[RequestSpec],
    *,
    decode_only: bool = False,
    min_blocks: int = 0,
) -> BprrAnswer:
    """Solves the LP relaxation, rounds every a_j and m_j to the nearest whole number, and routes on the result.

    Each request in turn gets the cheapest chain on which its caches fit. ``lower_bound_s`` is the
    relaxation's value. After rounding, blocks may be on no server, and memory may be too small. Then it
    raises ``InfeasiblePlacement`` that names the blocks, the overbooked server, or the request without a
    chain. Raises ``PolicyError`` as ``solve_bprr`` does.
    """
    _refuse_if_short(problem, requests)
    model = BprrModel(problem, requests, decode_only=decode_only, min_blocks=min_blocks)
    solution = model.linear.solve(relaxed=True)
    if solution is None:
        raise _infeasible(problem, requests)
    ranges = []
    for mean_first, mean_blocks in model.mean_ranges(solution):
        n_held = round(mean_blocks)
        first = min(round(mean_first), problem.model.n_blocks - n_held)
        ranges.append(BlockRange(first, first + n_held) if n_held else BlockRange(0, 0))
    chains = _route_in_turn(problem, requests, ranges, decode_only)
    objective_s = _objective_s(problem, requests, chains, decode_only)
    return BprrAnswer(tuple(ranges), chains, objective_s, min(solution.bound, objective_s), False)


def relaxation_s(
    problem: Problem,
    requests: Sequence[RequestSpec],
    *,
    decode_only: bool = False,
    min_blocks: int = 0,
    program: type[Program] = BprrModel,
) -> float:
    """Returns the LP relaxation's value in seconds: a lower bound, below 0 if the program is weak.

    Raises as ``solve_bprr`` does.
    """
    _refuse_if_short(problem, requests)
    model = program(problem, requests, decode_only=decode_only, min_blocks=min_blocks)
    solution = model.linear.solve(relaxed=True)
    if solution is None:
        raise _infeasible(problem, requests)
    return solution.bound


@dataclass
class MilpPlacement(PlacementPolicy):
    """The exact optimum (BPRR) for |R| requests at once, by HiGHS: small instances only.

    The requests have the design lengths and come from the clients in turn. Block caps do not apply. The
    result is the best found in ``max_nodes`` branches, and the same on every machine.
    ``bounds["proven_optimal"]`` is 1 if it is the optimum; ``bounds["gap_ratio"]`` is the share by which the
    optimum may be less.
    """

    max_nodes: int = MAX_NODES
    name: str = "milp"
    counts_drafts: ClassVar[bool] = True
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places for ``design_concurrency`` requests; ``None`` chooses |R| as the paper does.

        Raises ``InfeasiblePlacement``, and ``PolicyError`` for a problem that is too large.
        """
        requests = _design_requests(problem, design_concurrency)
        answer = self._solve(problem, requests)
        bounds = {
            **_per_token(answer, requests),
            "proven_optimal": float(answer.proven_optimal),
            "gap_ratio": answer.gap_ratio,
        }
        return _placement(self.name, problem, answer.ranges, len(requests), bounds)

    def _solve(self, problem: Problem, requests: Sequence[RequestSpec]) -> BprrAnswer:
        return solve_bprr(problem, requests, max_nodes=self.max_nodes)


@dataclass
class MilpPaperPlacement(MilpPlacement):
    """The same optimum by the paper's own program (13a-13h), which proves less: a few servers and requests.

    Every server with memory for a block holds one, as in the paper.
    """

    name: str = "milp-paper"

    def _solve(self, problem: Problem, requests: Sequence[RequestSpec]) -> BprrAnswer:
        return solve_bprr(problem, requests, min_blocks=1, max_nodes=self.max_nodes, program=PaperModel)


@dataclass
class LpRounding(PlacementPolicy):
    """The LP relaxation of BPRR for |R| requests, rounded: may be infeasible, small instances only.

    The requests have the design lengths and come from the clients in turn. Block caps do not apply.
    """

    name: str = "lp-rounding"
    counts_drafts: ClassVar[bool] = True
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places for ``design_concurrency`` requests; ``None`` chooses |R| as the paper does.

        Raises ``InfeasiblePlacement``, even if only the rounding makes it infeasible, and ``PolicyError``
        for a problem that is too large.
        """
        requests = _design_requests(problem, design_concurrency)
        answer = round_bprr(problem, requests)
        return _placement(self.name, problem, answer.ranges, len(requests), _per_token(answer, requests))


def _design_requests(problem: Problem, design_concurrency: int | None) -> list[RequestSpec]:
    design_concurrency = given_or_chosen(problem, design_concurrency)
    n_clients = len(problem.clients)
    return [
        RequestSpec(i % n_clients, problem.n_input_tokens, problem.n_output_tokens)
        for i in range(design_concurrency)
    ]


def _per_token(answer: BprrAnswer, requests: Sequence[RequestSpec]) -> dict[str, float]:
    n_tokens = sum(request.n_output_tokens for request in requests)
    return {
        "objective_per_token_s": answer.objective_s / n_tokens,
        "lower_bound_per_token_s": answer.lower_bound_s / n_tokens,
    }


def _placement(
    name: str, problem: Problem, ranges: Sequence[BlockRange], n_requests: int, bounds: dict[str, float]
) -> Placement:
    return Placement(name, tuple(ranges), problem.room_bytes(ranges), n_requests, bounds)


def _objective_s(
    problem: Problem,
    requests: Sequence[RequestSpec],
    chains: Sequence[tuple[Hop, ...]],
    decode_only: bool,
) -> float:
    return sum(
        chain_total_s(request, link_costs(problem, request, decode_only=decode_only), chain)
        for request, chain in zip(requests, chains, strict=True)
    )


def _greedy_start(
    problem: Problem, requests: Sequence[RequestSpec], decode_only: bool, min_blocks: int
) -> tuple[Sequence[BlockRange], Sequence[tuple[Hop, ...]]] | None:
    """Returns the best of CG-BP's placements for 1 to |R| requests that has chains for all, ``None`` without any."""
    best, best_s = None, math.inf
    tried: set[tuple[BlockRange, ...]] = set()
    for design_concurrency in range(1, len(requests) + 1):
        ranges = plan(problem, design_concurrency, honour_cap=False).ranges
        if ranges in tried:
            continue
        tried.add(ranges)
        if min_blocks and any(
            not held.n_blocks and problem.stored(j).best_blocks(problem.servers[j].memory_bytes)
            for j, held in enumerate(ranges)
        ):
            continue
        try:
            chains = _route_in_turn(problem, requests, ranges, decode_only)
        except InfeasiblePlacement:
            continue
        objective_s = _objective_s(problem, requests, chains, decode_only)
        if objective_s < best_s:
            best, best_s = (ranges, chains), objective_s
    return best


def _overbooked(
    problem: Problem,
    requests: Sequence[RequestSpec],
    ranges: Sequence[BlockRange],
    chains: Sequence[tuple[Hop, ...]],
) -> list[str]:
    """Returns the names of servers whose blocks and caches need more than their memory."""
    used_bytes = [problem.stored(j).range_bytes(held) for j, held in enumerate(ranges)]
    for request, chain in zip(requests, chains, strict=True):
        for hop in chain:
            used_bytes[hop.server] += problem.model.cache_bytes(request.n_tokens) * hop.n_blocks
    # Twice the ratio: the program's own rows may use it up, and sums round.
    return [
        server.name
        for server, used in zip(problem.servers, used_bytes, strict=True)
        if used > server.memory_bytes * (1 + 2 * ROUNDING_RATIO)
    ]


def _route_in_turn(
    problem: Problem, requests: Sequence[RequestSpec], ranges: Sequence[BlockRange], decode_only: bool
) -> tuple[tuple[Hop, ...], ...]:
    """Returns the cheapest chain with room for each request in turn.

    Raises ``InfeasiblePlacement`` if the ranges leave blocks out or exceed memory, or a request has no chain.
    """
    model = problem.model
    missing = Placement("", tuple(ranges), ()).uncovered(model.n_blocks)
    if missing:
        raise InfeasiblePlacement(
            f"rounding the LP relaxation leaves block{'s' if len(missing) > 1 else ''} {block_list(missing)} on no "
            f"server ({gigabytes(len(missing) * model.block_bytes)} of memory); use milp or cg-bp"
        )
    free_bytes = []
    for j, (server, held) in enumerate(zip(problem.servers, ranges, strict=True)):
        needed_bytes = problem.stored(j).range_bytes(held)
        if not fits(server.memory_bytes, needed_bytes):
            raise InfeasiblePlacement(
                f"rounding the LP relaxation overbooks {server.name}: {held.n_blocks} blocks need "
                f"{gigabytes(needed_bytes)}, it has {gigabytes(server.memory_bytes)}; use milp or cg-bp"
            )
        free_bytes.append(server.memory_bytes - needed_bytes)
    graph = PositionGraph(ranges, model.n_blocks)
    chains = []
    for number, request in enumerate(requests):
        each_bytes = model.cache_bytes(request.n_tokens)
        room = {
            hop: fits(free_bytes[hop.server], each_bytes * hop.n_blocks) for _, hop in sum(graph.into, ())
        }
        costs = link_costs(problem, request, decode_only=decode_only)
        chain = cheapest_chain(graph, costs, room.__getitem__)
        if chain is None:
            full = sorted(
                {problem.servers[hop.server].name for hop, has_room in room.items() if not has_room}
            )
            raise InfeasiblePlacement(
                f"rounding the LP relaxation leaves request {number} of {len(requests)} without a chain: no cache "
                f"is left on {', '.join(full)} for {gigabytes(each_bytes)} per block; use milp or cg-bp"
            )
        for hop in chain:
            free_bytes[hop.server] -= each_bytes * hop.n_blocks
        chains.append(chain)
    return tuple(chains)


def _refuse_if_short(problem: Problem, requests: Sequence[RequestSpec]) -> None:
    """Raises ``InfeasiblePlacement`` if the servers cannot hold all blocks, each with one session's cache.

    Raises ``PolicyError`` without requests.
    """
    if not requests:
        raise PolicyError("the optimum needs at least one request, but there is none")
    model = problem.model
    cache_bytes = min(model.cache_bytes(r.n_tokens) for r in requests)
    each_bytes = model.block_bytes + cache_bytes
    n_held = sum(
        problem.stored(j).best_blocks(server.memory_bytes, cache_bytes)
        for j, server in enumerate(problem.servers)
    )
    if n_held < model.n_blocks:
        missing = range(n_held, model.n_blocks)
        raise InfeasiblePlacement(
            f"no placement holds block{'s' if len(missing) > 1 else ''} {block_list(missing)}: the servers have room "
            f"for {n_held} of {model.n_blocks} blocks with one session's cache each, because "
            f"{gigabytes(len(missing) * each_bytes)} of memory are missing"
        )


def _infeasible(problem: Problem, requests: Sequence[RequestSpec]) -> InfeasiblePlacement:
    model = problem.model
    needed_bytes = model.n_blocks * (
        model.block_bytes + sum(model.cache_bytes(request.n_tokens) for request in requests)
    )
    have_bytes = sum(server.memory_bytes for server in problem.servers)
    return InfeasiblePlacement(
        f"no placement holds all {model.n_blocks} blocks with caches for {len(requests)} requests at once: one copy "
        f"of the blocks and the caches need {gigabytes(needed_bytes)} in whole blocks, the "
        f"{problem.n_servers} servers have {gigabytes(have_bytes)}; fewer requests at once or more memory would do"
    )

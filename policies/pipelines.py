"""Placements of other systems, which divide servers into stages or pipelines.

They are exo, SWARM, separate pipelines and whole models. Their ranges do not overlap in part, so chains
consist of whole ranges. As in GBP-CR, a server can hold m_j(c) = min(floor(M_j / (s_m + c s_c)), L) blocks
with cache for c sessions at a time. c is the design concurrency; if it is not given, it is the largest one
with a placement. That leaves each server few blocks, so exo, for one, then uses more servers than its authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.design import check_design_concurrency
from policies.feasibility import gigabytes
from policies.greedy import block_counts, whole
from policies.interfaces import PlacementPolicy, RoutingPolicy
from policies.problem import (
    BlockRange,
    Hop,
    InfeasiblePlacement,
    Placement,
    Problem,
    RequestSpec,
    Route,
)
from policies.state import SystemState
from policies.waiting import fits, waited_route

NOTHING = BlockRange(0, 0)
_MOST = 2**20
"""Upper limit of the search for the design concurrency."""
Ranges = list[BlockRange]


def shares(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divides ``total`` in proportion to ``weights`` into whole numbers, each at least 1 and at most ``most``.

    Rounding is by the largest remainder. What the limits add or remove is balanced in the order of the
    remainders. The sum of ``most`` must be at least ``total``.
    """
    exact = [total * weight / sum(weights) for weight in weights]
    given = [min(max(1, math.floor(part)), bound) for part, bound in zip(exact, most, strict=True)]
    order = sorted(range(len(exact)), key=lambda i: (math.floor(exact[i]) - exact[i], i))
    while sum(given) != total:
        step = 1 if sum(given) < total else -1
        for i in order if step > 0 else reversed(order):
            if sum(given) != total and (given[i] < most[i] if step > 0 else given[i] > 1):
                given[i] += step
    return given


def even(total: int, n: int) -> list[int]:
    """Returns the sizes of ``n`` stages of ``total`` blocks; they differ by at most one, the larger first."""
    return [total // n + (i < total % n) for i in range(n)]


def consecutive(sizes: Sequence[int]) -> list[BlockRange]:
    """Returns ranges of these sizes, one after another from block 0 on."""
    ranges, position = [], 0
    for size in sizes:
        ranges.append(BlockRange(position, position + size))
        position += size
    return ranges


def _placement(
    name: str,
    problem: Problem,
    design_concurrency: int | None,
    ranges_for: Callable[[list[int]], Ranges | None],
) -> Placement:
    """Returns the placement with ``ranges_for(m)`` at the design concurrency, or at the largest possible one.

    Raises ``InfeasiblePlacement`` if there is none.
    """

    def at(concurrency: int) -> Ranges | None:
        return ranges_for(block_counts(problem, concurrency))

    check_design_concurrency(design_concurrency)
    if design_concurrency is None:
        low, high = 1, 2
        while high < _MOST and at(high) is not None:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if at(middle) is not None else (low, middle)
        design_concurrency = low
    ranges = at(design_concurrency)
    if ranges is None:
        raise infeasible(name, problem, design_concurrency)
    return placed(name, problem, ranges, design_concurrency)


def most_blocks(problem: Problem, concurrency: int, memory_ratio: float) -> list[int]:
    """Returns how many blocks each server may hold.

    Blocks may use at most ``memory_ratio`` of its memory, and must leave cache for ``concurrency`` sessions.
    If the model does not fit with the first rule, only the second one applies.
    """
    counts = block_counts(problem, concurrency)
    part = [
        min(counts[j], problem.stored(j).most_blocks(server.memory_bytes * memory_ratio))
        for j, server in enumerate(problem.servers)
    ]
    return part if sum(part) >= problem.model.n_blocks else counts


def placed(
    name: str,
    problem: Problem,
    ranges: Sequence[BlockRange],
    design_concurrency: int | None,
    bounds: Mapping[str, float] | None = None,
) -> Placement:
    """Returns the placement with these ranges, in which all memory that the blocks leave is for caches.

    If ``design_concurrency`` is ``None``, it is the number of sessions that fit on every server at a time.
    """
    cache_bytes = problem.room_bytes(ranges)
    if design_concurrency is None:
        design_concurrency = min(
            whole(room, problem.design_cache_bytes * held.n_blocks)
            for room, held in zip(cache_bytes, ranges, strict=True)
            if held.n_blocks
        )
    return Placement(name, tuple(ranges), cache_bytes, design_concurrency, bounds or {})


def infeasible(name: str, problem: Problem, design_concurrency: int) -> InfeasiblePlacement:
    """Returns the error that the servers cannot hold all blocks and the caches of so many sessions."""
    memory = gigabytes(sum(server.memory_bytes for server in problem.servers))
    sessions = f"{design_concurrency} session{'' if design_concurrency == 1 else 's'}"
    return InfeasiblePlacement(
        f"{name} with room for {sessions} cannot place {problem.model.n_blocks} blocks of "
        f"{gigabytes(problem.model.block_bytes)} on these servers ({memory} of memory in all); add servers"
    )


@dataclass
class WholeModel(PlacementPolicy):
    """Every server that can hold all blocks holds them; the others hold none (a pool of whole models)."""

    name: str = "whole-model"
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks. Raises ``InfeasiblePlacement`` if no server can hold the model."""
        n_blocks = problem.model.n_blocks

        def ranges_for(counts: list[int]) -> Ranges | None:
            if max(counts, default=0) < n_blocks:
                return None
            return [BlockRange(0, n_blocks) if count == n_blocks else NOTHING for count in counts]

        try:
            return _placement(self.name, problem, design_concurrency, ranges_for)
        except InfeasiblePlacement:
            largest = gigabytes(max(server.memory_bytes for server in problem.servers))
            raise InfeasiblePlacement(
                f"{self.name} needs a server that holds all {n_blocks} blocks, {gigabytes(n_blocks * problem.model.block_bytes)}, "
                f"and has cache for |R| = {design_concurrency or 1}; the largest has {largest}: add a larger one"
            ) from None


@dataclass
class Exo(PlacementPolicy):
    """One pipeline of as few servers as can hold the model, blocks in proportion to their memory (exo).

    It consists of the servers with the most memory. exo looks for cycles in its own topology. Here every
    server reaches every other one, and a pipeline passes them in list order. Blocks beyond what a server can
    hold go to the others of the pipeline; exo has no result then.
    """

    name: str = "exo"
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks. Raises ``InfeasiblePlacement``."""
        n_blocks = problem.model.n_blocks
        memory = [server.memory_bytes for server in problem.servers]

        def ranges_for(counts: list[int]) -> Ranges | None:
            able = sorted((j for j, count in enumerate(counts) if count), key=lambda j: -memory[j])
            for n in range(1, min(len(able), n_blocks) + 1):
                ring = sorted(able[:n])
                most = [counts[j] for j in ring]
                if sum(most) >= n_blocks:
                    sizes = shares(n_blocks, [memory[j] for j in ring], most)
                    held = dict(zip(ring, consecutive(sizes), strict=True))
                    return [held.get(j, NOTHING) for j in range(len(counts))]
            return None

        return _placement(self.name, problem, design_concurrency, ranges_for)


@dataclass
class SeparatePipelines(PlacementPolicy):
    """Servers of one kind make pipelines of equal stages, as many as possible of each kind (Helix' baseline).

    Servers of a kind may differ in memory. The smallest server that is used determines how many stages a
    pipeline has. It is chosen so that there are the most pipelines, then the fewest stages. Unused servers
    hold nothing. Helix sends each kind a load of its own; with ``rr`` every pipeline gets equally many requests.
    """

    name: str = "separate-pipelines"
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks. Raises ``InfeasiblePlacement`` if no kind of server can hold the model."""
        n_blocks = problem.model.n_blocks
        kinds: dict[str, list[int]] = {}
        for j, server in enumerate(problem.servers):
            kinds.setdefault(server.hardware, []).append(j)

        def ranges_for(counts: list[int]) -> Ranges | None:
            ranges = [NOTHING] * len(counts)
            for servers in kinds.values():
                options = []
                for weakest in {counts[j] for j in servers if counts[j]}:
                    n_stages = -(-n_blocks // weakest)
                    n_pipelines = sum(counts[j] >= weakest for j in servers) // n_stages
                    options.append((n_pipelines, -n_stages, weakest))
                n_pipelines, less_stages, weakest = max(options, default=(0, 0, 0))
                if n_pipelines:
                    stages = consecutive(even(n_blocks, -less_stages))
                    able = [j for j in servers if counts[j] >= weakest][: n_pipelines * len(stages)]
                    for at, j in enumerate(able):
                        ranges[j] = stages[at % len(stages)]
            return ranges if any(held.n_blocks for held in ranges) else None

        return _placement(self.name, problem, design_concurrency, ranges_for)


@dataclass
class Swarm(PlacementPolicy):
    """Equal stages; the fastest servers first join the stage with the least throughput (SWARM).

    The smallest server that can hold a block determines how few stages there are. If that gives more stages
    than servers, the smallest servers are left out step by step until every stage can have one. A server's
    throughput is 1 / tau_j, because all stages are equally large. Of equally fast servers the first listed
    joins first. In Helix' code it is the last one, throughputs are measured and limited by the server's
    network, and stages that would differ by a block are refused.
    """

    name: str = "swarm"
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks. Raises ``InfeasiblePlacement``."""
        n_blocks = problem.model.n_blocks
        decode_s = [server.decode_s for server in problem.servers]

        def ranges_for(counts: list[int]) -> Ranges | None:
            for weakest in sorted({count for count in counts if count}):
                able = [j for j, count in enumerate(counts) if count >= weakest]
                n_stages = -(-n_blocks // weakest)
                if len(able) >= n_stages:
                    break
            else:
                return None
            stages, ranges = consecutive(even(n_blocks, n_stages)), [NOTHING] * len(counts)
            throughput = [0.0] * n_stages
            for j in sorted(able, key=lambda j: decode_s[j]):
                stage = min(range(n_stages), key=lambda i: throughput[i])
                ranges[j] = stages[stage]
                throughput[stage] += 1 / decode_s[j]
            return ranges

        return _placement(self.name, problem, design_concurrency, ranges_for)


class RoundRobin(RoutingPolicy):
    """Disjoint pipelines take turns, whether they have room now or not (after Parallax' default).

    Parallax skips a pipeline with a server that has its maximum number of requests. Where ranges can be
    joined in several ways, it joins those with the least latency; here it is the servers listed first.
    """

    name = "rr"

    def bind(self, problem: Problem, placement: Placement) -> RoundRobinRouter:
        return RoundRobinRouter(problem, placement)


class RoundRobinRouter:
    """Chooses the next pipeline that can hold the request when its servers are idle."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._placement = placement
        self.pipelines = disjoint_pipelines(placement.ranges, problem.model.n_blocks)
        self._turn = 0

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the next pipeline; ``wait_s`` is its longest wait, ``cost_s`` that plus the service time."""
        token_bytes = self._problem.model.cache_bytes(request.cache_tokens)
        for _ in self.pipelines:
            hops = self.pipelines[self._turn % len(self.pipelines)]
            self._turn += 1
            needs = [(hop.server, hop.n_blocks * token_bytes) for hop in hops]
            if all(fits(self._placement.cache_bytes[server], need) for server, need in needs):
                return waited_route(self._problem, request, hops, state, now_s)
        return None


def disjoint_pipelines(ranges: Sequence[BlockRange], n_blocks: int) -> list[tuple[Hop, ...]]:
    """Returns chains that share no server, each of the unused servers that are listed first.

    First come chains of whole ranges. Then come those in which a hop may be only the last part of a server's
    range.
    """
    left = [j for j, held in enumerate(ranges) if held.n_blocks]
    pipelines = []

    def chain_from(position: int, dead: set[int], whole_ranges: bool) -> list[int] | None:
        """Returns the servers of a chain from ``position`` to the end, or ``None``.

        ``dead`` collects the positions from which no chain leads to the end.
        """
        if position == n_blocks:
            return []
        for j in left:
            first, last = ranges[j]
            if last not in dead and (first == position if whole_ranges else first <= position < last):
                rest = chain_from(last, dead, whole_ranges)
                if rest is not None:
                    return [j, *rest]
        dead.add(position)
        return None

    for whole_ranges in (True, False):
        while (chain := chain_from(0, set(), whole_ranges)) is not None:
            left = [j for j in left if j not in chain]
            firsts = [0, *(ranges[j].last for j in chain[:-1])]
            pipelines.append(
                tuple(Hop(j, first, ranges[j].last) for j, first in zip(chain, firsts, strict=True))
            )
    return pipelines

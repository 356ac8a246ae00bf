"""Parallax: pipelines by dynamic programming, and routing over the shortest chain.

After github.com/GradientHQ/parallax, ``src/scheduling``.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from policies.design import given_or_one
from policies.interfaces import PlacementPolicy, RoutingPolicy
from policies.pipelines import NOTHING, Ranges, consecutive, infeasible, most_blocks, placed, shares
from policies.problem import Hop, Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import fits, waited_route

_MEMORY_RATIO = 0.65
"""Blocks use at most this share of a server's memory: Parallax' default."""
_LOADED_S = 0.05e-3
"""How much a server with no room left costs more than an idle one: Parallax' ``load_compensator``."""
_MOST_STATES = 2_000
"""At most this many states are kept after each server. Some tens of servers of a few kinds have fewer."""
_Residuals = tuple[int, ...]
"""A state: the numbers of blocks that unfinished pipelines still need, ascending."""


@dataclass
class Parallax(PlacementPolicy):
    """Disjoint pipelines: many pipelines of few servers each, with blocks in proportion to speed (Parallax).

    s*(k) is the smallest number of servers that make k pipelines which can hold the model. k maximises k² /
    s*(k); of equal ones it is the smallest. Within a pipeline, servers are ordered by the number of blocks
    that they can hold, the largest first. They get blocks in proportion to 1 / tau, but none more than it can
    hold (water-filling), rounded by the largest remainder. Servers in no pipeline hold nothing. Blocks use at
    most 0.65 of a server's memory, and leave cache for ``design_concurrency`` sessions (for one if it is not
    given). If the model does not fit with 0.65, only the second rule applies.

    Parallax' program also decides for every server whether to skip it. A larger server can replace any
    smaller one, so the s*(k) largest servers are always enough. Here they are used in this order and none is
    skipped, which finds the same s*(k), but may divide servers otherwise where several divisions have it. Of
    more than 2,000 states only those with the least waste are kept, so s*(k) may then be larger than
    necessary. Parallax' docstring has an exponent and a round-trip term that its code does not use. Parallax
    measures compute in TFLOPS, and reserves memory for embeddings on the first and last server of a pipeline;
    here the clients hold these. With its router dp it also places the servers in no pipeline.
    """

    name: str = "parallax"
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks. Raises ``InfeasiblePlacement``."""
        n_blocks = problem.model.n_blocks
        at_least = given_or_one(design_concurrency)
        most = most_blocks(problem, at_least, _MEMORY_RATIO)
        pipelines = _pipelines(most, n_blocks)
        if not pipelines:
            raise infeasible(self.name, problem, at_least)
        ranges: Ranges = [NOTHING] * problem.n_servers
        for servers in pipelines:
            speed = [1 / max(problem.servers[j].decode_s, 1e-12) for j in servers]
            sizes = water_filled(n_blocks, speed, [most[j] for j in servers])
            for j, held in zip(servers, consecutive(sizes), strict=True):
                ranges[j] = held
        return placed(self.name, problem, ranges, design_concurrency)


def water_filled(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divides ``total`` in proportion to ``weights`` into whole numbers, each at most ``most``.

    What exceeds a limit is divided among the others in proportion to their weights. Rounding as in
    ``shares``.
    """
    full: set[int] = set()
    while True:
        free = [i for i in range(len(weights)) if i not in full]
        level = (total - sum(most[i] for i in full)) / sum(weights[i] for i in free) if free else 0.0
        over = {i for i in free if level * weights[i] > most[i]}
        if not over:
            break
        full |= over
    parts = [float(most[i]) if i in full else level * weights[i] for i in range(len(weights))]
    return shares(total, parts, most)


def _pipelines(most: Sequence[int], n_blocks: int) -> list[list[int]]:
    """Returns the servers of each pipeline, in their order; no pipelines if the model does not fit."""
    order = sorted((j for j, count in enumerate(most) if count), key=lambda j: -most[j])
    held = list(accumulate(most[j] for j in order))
    best: list[list[int]] = []
    best_score = 0.0
    for k in range(sum(most) // n_blocks, 0, -1):
        n_least = bisect_left(held, k * n_blocks) + 1  # fewer cannot hold k models
        if k * k / n_least < best_score:
            continue
        found = _fewest(order, most, n_blocks, k)
        n_servers = sum(map(len, found))
        if found and k * k / n_servers >= best_score:
            best, best_score = found, k * k / n_servers
    return best


def _fewest(order: Sequence[int], most: Sequence[int], n_blocks: int, k: int) -> list[list[int]]:
    """Returns the first servers of ``order`` that make k pipelines, by pipeline; empty if all cannot."""
    left = sum(most[j] for j in order)
    states = [(k * n_blocks, (n_blocks,) * k)]
    """The states that are tried further: (their sum, the blocks that each unfinished pipeline needs, ascending)."""
    steps: list[dict[_Residuals, tuple[_Residuals, int]]] = []
    for j in order:
        left -= most[j]
        came: dict[_Residuals, tuple[_Residuals, int]] = {}
        sums: dict[_Residuals, int] = {}
        for total, state in states:
            for need in dict.fromkeys(state):
                after_total = total - min(need, most[j])
                if after_total > left:
                    continue
                after = list(state)
                after.remove(need)
                if need > most[j]:
                    insort(after, need - most[j])
                key = tuple(after)
                if key not in came:
                    came[key], sums[key] = (state, need), after_total
        steps.append(came)
        if () in came:
            return _traced(order, steps, most, n_blocks)
        states = sorted(zip(sums.values(), sums, strict=True))[:_MOST_STATES]
    return []


def _traced(
    order: Sequence[int],
    steps: Sequence[dict[_Residuals, tuple[_Residuals, int]]],
    most: Sequence[int],
    n_blocks: int,
) -> list[list[int]]:
    """Returns the pipelines, traced back through ``steps`` from the state in which all are finished."""
    needs: list[int] = []
    state: _Residuals = ()
    for came in reversed(steps):
        state, need = came[state]
        needs.append(need)
    pipelines: list[list[int]] = []
    unfinished: list[tuple[int, list[int]]] = []
    for j, need in zip(order, reversed(needs), strict=False):
        servers = next((servers for open_need, servers in unfinished if open_need == need), None)
        if servers is None:
            servers = []
            pipelines.append(servers)
        else:
            unfinished.remove((need, servers))
        servers.append(j)
        if need > most[j]:
            unfinished.append((need - most[j], servers))
    return pipelines


@dataclass
class ShortestByLayer(RoutingPolicy):
    """The shortest chain by time per block and round trips between servers (Parallax' dp).

    A chain consists of whole ranges, each of which begins where the one before ends. A server costs its time
    per block, tau, which is *not* multiplied by its blocks, as in Parallax' code, plus 0.05 ms times the used
    share of its room (in Parallax: of its maximum number of requests). A hop from server to server costs
    their round trip, even if hidden states go through the client. Hops from and to the client cost nothing.
    Servers without room for the request's cache now are left out, unless every chain has one. (Parallax
    leaves out servers that have their maximum number of requests.) If whole ranges make no chain, a hop may
    be only the last part of a server's range; Parallax then finds no chain.
    """

    name: str = "dp"

    def bind(self, problem: Problem, placement: Placement) -> ShortestByLayerRouter:
        return ShortestByLayerRouter(problem, placement)


class ShortestByLayerRouter:
    """The router of ``ShortestByLayer``. Of equal costs the server listed first wins."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._placement = placement
        ranges = placement.ranges
        holding = [j for j, held in enumerate(ranges) if held.n_blocks]
        self._order = sorted(holding, key=lambda j: (ranges[j].last, j))
        self._before: dict[bool, dict[int, list[int]]] = {
            True: {j: [i for i in holding if ranges[i].last == ranges[j].first] for j in holding},
            False: {
                j: [i for i in holding if ranges[j].first <= ranges[i].last < ranges[j].last] for j in holding
            },
        }

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the chain; ``Route.wait_s`` is its longest wait, ``cost_s`` that plus the service time."""
        for whole_ranges in (True, False):
            for room in ([state.free_bytes(j) for j in range(self._problem.n_servers)], state.cache_bytes):
                hops = self._shortest(request, state, room, whole_ranges)
                if hops:
                    return waited_route(self._problem, request, hops, state, now_s)
        return None

    def _shortest(
        self, request: RequestSpec, state: SystemState, room: Sequence[float], whole_ranges: bool
    ) -> list[Hop]:
        """Returns the chain over servers whose ``room`` bytes suffice for the request; empty without one."""
        problem, ranges = self._problem, self._placement.ranges
        token_bytes = problem.model.cache_bytes(request.cache_tokens)
        cost_s: dict[int, float] = {}
        entered: dict[int, Hop] = {}
        previous: dict[int, int | None] = {}
        for j in self._order:
            first, last = ranges[j]
            best_s = math.inf
            ways: list[tuple[float, int, int | None]] = [(0.0, 0, None)] if first == 0 else []
            ways += [
                (cost_s[i] + problem.server_rtt_s[i][j], ranges[i].last, i)
                for i in self._before[whole_ranges][j]
                if i in cost_s
            ]
            for way_s, position, i in ways:
                if way_s < best_s and fits(room[j], (last - position) * token_bytes):
                    best_s = way_s
                    used_ratio = 1 - state.free_bytes(j) / state.cache_bytes[j]
                    cost_s[j] = way_s + problem.servers[j].decode_s + _LOADED_S * used_ratio
                    entered[j], previous[j] = Hop(j, position, last), i
        ends = [j for j in cost_s if ranges[j].last == problem.model.n_blocks]
        at = min(ends, key=lambda j: (cost_s[j], j), default=None)
        hops: list[Hop] = []
        while at is not None:
            hops.append(entered[at])
            at = previous[at]
        return hops[::-1]

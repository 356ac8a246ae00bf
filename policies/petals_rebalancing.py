"""PETALS' own rebalancing: servers move to where the throughput is weakest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from heapq import heapify, heappush, heapreplace
from random import Random
from typing import ClassVar

from policies.online import OnlinePolicy, SystemView
from policies.petals import weakest_window, window_rps
from policies.problem import BlockRange, Placement, PolicyError, Problem

_MAX_ROUNDS = 1000
"""Limit of the rounds of choosing again. PETALS has none, but rounding errors could cause a cycle."""


@dataclass
class PetalsRebalancing(OnlinePolicy):
    """Each server checks at times whether moving would raise the weakest block's throughput (PETALS).

    The time between a server's checks is uniform in [0, 2 ``period_s``]. It compares the smallest block
    throughput now with the one after it has moved and all others have chosen again. It moves if the ratio of
    the two is below ``balance_quality`` - ``eps``, but never if a block would be left without server. A move
    keeps the number of blocks. Sessions on a server that moves are cut, and it loads all its blocks again.
    Servers that are away do not count. One that joins checks like the others from then on.
    """

    balance_quality: float = 0.75
    eps: float = 1e-3
    period_s: float = 60.0
    seed: int = 0
    drains: bool = False
    at_once: int = 1
    name: str = "petals-rebalancing"
    needs_petals_throughput: ClassVar[bool] = True

    def bind(self, problem: Problem, placement: Placement) -> PetalsRebalancingController:
        """Returns the controller. Raises ``PolicyError`` if ``period_s`` is not positive."""
        if not self.period_s > 0:
            raise PolicyError(f"{self.name} needs a period_s above 0, not {self.period_s}")
        return PetalsRebalancingController(problem, placement, self)


class PetalsRebalancingController:
    """Every ``check`` is that of one server. All times and orders are drawn from one random stream."""

    def __init__(self, problem: Problem, placement: Placement, policy: PetalsRebalancing) -> None:
        self._problem = problem
        self._policy = policy
        self._random = Random(f"petals-rebalancing {policy.seed}")
        holders = [j for j, held in enumerate(placement.ranges) if held.n_blocks]
        self._checks = [(self._pause_s(), j) for j in holders]
        self._known = set(holders)
        heapify(self._checks)
        self.next_check_at_s = self._checks[0][0] if self._checks else math.inf

    def check(self, now_s: float, view: SystemView) -> Placement | None:
        """Returns the placement with the checking server moved, or ``None``. Loading servers count, too."""
        _, server = self._checks[0]
        heapreplace(self._checks, (now_s + self._pause_s(), server))
        ranges, alive = view.placement.ranges, view.alive
        if alive is not None:
            for j in sorted(alive - self._known):
                if ranges[j].n_blocks:
                    self._known.add(j)
                    heappush(self._checks, (now_s + self._pause_s(), j))
        self.next_check_at_s = self._checks[0][0]
        if server in view.moving or (alive is not None and server not in alive):
            return None
        there = ranges
        if alive is not None:
            there = tuple(held if j in alive else BlockRange(0, 0) for j, held in enumerate(ranges))
        moved = rebalanced(self._problem, there, server, self._policy, self._random)
        if moved is None:
            return None
        return replace(
            view.placement, ranges=tuple(moved if j == server else held for j, held in enumerate(ranges))
        )

    def _pause_s(self) -> float:
        # Always above 0, so that time moves on.
        return (1.0 - self._random.random()) * 2 * self._policy.period_s


def rebalanced(
    problem: Problem, ranges: tuple[BlockRange, ...], server: int, policy: PetalsRebalancing, random: Random
) -> BlockRange | None:
    """Returns the range to which ``server`` moves, or ``None`` if it stays.

    A block's throughput is the sum over the servers that hold it. Removing a server subtracts
    (1 + eps) times its throughput, so that rounding never leaves a positive rest.
    """
    eps = policy.eps
    spans = {j: held for j, held in enumerate(ranges) if held.n_blocks}
    rps = {j: window_rps(problem.servers[j], held.n_blocks) for j, held in spans.items()}
    throughput = [0.0] * problem.model.n_blocks
    for j, held in spans.items():
        _add(throughput, held, rps[j])
    before = min(throughput)
    own = spans[server]
    _add(throughput, own, -rps[server] * (1 + eps))
    if before > eps and min(throughput) <= 0:
        return None  # a block has no other server
    first = weakest_window(throughput, own.n_blocks)
    if first == own.first:
        return None
    target = spans[server] = BlockRange(first, first + own.n_blocks)
    _add(throughput, own, rps[server] * eps)
    _add(throughput, target, rps[server])
    for _ in range(_MAX_ROUNDS):
        order = list(spans)
        random.shuffle(order)
        if not sum(_rechoose(throughput, spans, j, rps[j], eps) for j in order):
            break
    after = min(throughput)
    if after < before or after < eps:
        return None
    return target if before / after < policy.balance_quality - eps else None


def _rechoose(throughput: list[float], spans: dict[int, BlockRange], j: int, rps: float, eps: float) -> bool:
    """Moves server ``j`` to its best window. Returns whether that is another one."""
    held = spans[j]
    _add(throughput, held, -rps * (1 + eps))
    first = weakest_window(throughput, held.n_blocks)
    _add(throughput, held, rps * eps)
    spans[j] = BlockRange(first, first + held.n_blocks)
    _add(throughput, spans[j], rps)
    return first != held.first


def _add(throughput: list[float], held: BlockRange, rps: float) -> None:
    for b in range(held.first, held.last):
        throughput[b] += rps

"""Online policies that only move: at every check one server more goes one block on, as long as no block is left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.online import SystemView, can_spare, kept
from policies.problem import BlockRange, Placement, Problem


@dataclass
class Draining:
    """Servers wait for the sessions on blocks that they give up."""

    period_s: float = 1.0
    drains: bool = True
    at_once: int = 1
    name: str = "draining"

    def bind(self, problem: Problem, placement: Placement) -> Wanderer:
        return Wanderer(problem, self.period_s, self.drains)


@dataclass
class Cutting(Draining):
    """Servers cut their sessions, and keep nothing while they load."""

    drains: bool = False
    name: str = "cutting"


class Wanderer:
    def __init__(self, problem: Problem, period_s: float, keeps: bool) -> None:
        self._n_blocks = problem.model.n_blocks
        self._period_s = period_s
        self._keeps = keeps
        self._turn = 0
        self.next_check_at_s = period_s

    def check(self, now_s: float, view: SystemView) -> Placement | None:
        self.next_check_at_s = now_s + self._period_s
        if view.moving:
            return None
        ranges = view.placement.ranges
        for _ in ranges:
            server = self._turn % len(ranges)
            self._turn += 1
            held = ranges[server]
            n_places = self._n_blocks - held.n_blocks + 1
            first = (held.first + 1) % n_places
            new = BlockRange(first, first + held.n_blocks)
            stays = kept(held, new) if self._keeps else BlockRange(0, 0)
            if n_places > 1 and can_spare(ranges, server, stays, view.alive):
                changed = tuple(new if j == server else old for j, old in enumerate(ranges))
                return replace(view.placement, ranges=changed)
        return None

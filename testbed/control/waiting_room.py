"""The coordinator's queue: requests without room wait in one place and are woken, in place of asking again and again."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from policies.problem import PolicyError, Route
from policies.workload import QueueRules

Answer = Callable[[Route | PolicyError | None], None]
"""Takes the chain; ``None``: there is none."""
CallAt = Callable[[float, Callable[[], None]], object]
"""Have something called at an instant (scenario seconds)."""

_MOST_LOOKED_AT = 1000
"""Requests that may be passed over in one look through the queue."""


class Wait(Enum):
    """There is no room now."""

    NO_ROOM = "no room"


@dataclass(eq=False)
class _Waiting:
    """One who asks. A request that was let go, refused and asks again is another one."""

    arrived_at_s: float
    index: int
    since_s: float
    answer: Answer


class WaitingRoom:
    """Requests in the order of their arrival.

    ``let_in`` is what a request is told now, if there is room for it or no chain at all; ``send`` what it is told anyway.
    """

    def __init__(
        self,
        rules: QueueRules,
        let_in: Callable[[int], Route | Wait | None],
        send: Callable[[int], Route | None],
        now_s: Callable[[], float],
        call_at: CallAt,
    ) -> None:
        self._rules = rules
        self._let_in = let_in
        self._send = send
        self._now_s = now_s
        self._call_at = call_at
        self._waiting: list[_Waiting] = []
        self._is_looking = False
        self._is_planned = False

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, index: int, arrived_at_s: float, since_s: float, answer: Answer) -> None:
        """Answer request ``index`` once there is room for it; it has been without ``since_s``."""
        waiting = _Waiting(arrived_at_s, index, since_s, answer)
        insort(self._waiting, waiting, key=lambda one: (one.arrived_at_s, one.index))
        now_s, give_up_s = self._now_s(), self._rules.give_up_s
        overdue_at_s = since_s + give_up_s if give_up_s else math.inf
        if now_s < overdue_at_s < math.inf:
            self._call_at(overdue_at_s, lambda: self._overdue(waiting))
        self.look()
        if overdue_at_s <= now_s:
            self._overdue(waiting)

    def drop(self, index: int) -> None:
        """Nobody waits for that one any more; if it is there, it is told that there is no chain."""
        for waiting in [waiting for waiting in self._waiting if waiting.index == index]:
            self._waiting.remove(waiting)
            waiting.answer(None)

    def look(self) -> None:
        """Let go whom there is room for; to be called when there may be more."""
        if self._is_looking:  # whoever was let go has changed something
            return
        self._is_looking = True
        try:
            self._look()
        finally:
            self._is_looking = False
        if self._waiting and not self._is_planned:
            self._is_planned = True
            self._call_at(self._now_s() + self._rules.look_again_s, self._look_again)

    def _look(self) -> None:
        now_s, passed = self._now_s(), 0
        while passed < min(len(self._waiting), _MOST_LOOKED_AT):
            waiting = self._waiting[passed]
            found: Route | Wait | PolicyError | None
            try:
                found = self._let_in(waiting.index)
            except PolicyError as error:
                found = error
            if isinstance(found, Wait):
                has_aged = now_s - waiting.since_s >= self._rules.age_s
                if self._rules.kind == "fifo" or has_aged:
                    return
                passed += 1
                continue
            del self._waiting[passed]
            waiting.answer(found)

    def _look_again(self) -> None:
        self._is_planned = False
        self.look()

    def _overdue(self, waiting: _Waiting) -> None:
        """It goes wherever it stands: as one that waits, so that servers refuse it and its client gives up."""
        if waiting not in self._waiting:
            return
        self._waiting.remove(waiting)
        try:
            waiting.answer(self._send(waiting.index))
        except PolicyError as error:
            waiting.answer(error)
        self.look()

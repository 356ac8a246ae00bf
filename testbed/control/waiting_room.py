"""The coordinator's queue: requests wait here for room, so that clients need not ask again and again."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from policies.problem import PolicyError, Route
from policies.workload import QueueRules

Answer = Callable[[Route | PolicyError | None], None]
"""Called with the chain, with ``None`` if there is none, or with the policy's error."""
CallAt = Callable[[float, Callable[[], None]], object]
"""Calls a function at an instant (scenario seconds)."""

_MOST_LOOKED_AT = 1000
"""Most requests that are passed over in one look through the queue."""


class Wait(Enum):
    """Why a request must wait."""

    NO_ROOM = "no room"


@dataclass(eq=False)
class _Waiting:
    """One who asks. A request that was let go, refused and asks again is another one."""

    arrived_at_s: float
    index: int
    since_s: float
    answer: Answer


class WaitingRoom:
    """Requests that wait for room, in the order of their arrival.

    ``let_in(index)`` returns a request's chain if there is room for it now, ``None`` if there is no chain at
    all, else a ``Wait``. ``send(index)`` returns its chain even without room.
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
        """Add request ``index``, which has waited since ``since_s``.

        ``answer`` is called once there is room.
        """
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
        """Remove request ``index``, if it is here; calls its ``answer`` with ``None``."""
        for waiting in [waiting for waiting in self._waiting if waiting.index == index]:
            self._waiting.remove(waiting)
            waiting.answer(None)

    def look(self) -> None:
        """Let all requests go for which there is room. Call this when there may be more room."""
        if self._is_looking:  # a request that was let go has changed something
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
        """Let an overdue request go without room: servers refuse it, and its client gives up."""
        if waiting not in self._waiting:
            return
        self._waiting.remove(waiting)
        try:
            waiting.answer(self._send(waiting.index))
        except PolicyError as error:
            waiting.answer(error)
        self.look()

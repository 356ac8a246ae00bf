"""The coordinator's queue: one pot of room, requests of different sizes, and a clock that the test moves."""

from __future__ import annotations

from heapq import heappop, heappush

from policies import Hop, PolicyError, Route
from policies.workload import QueueRules
from testbed.control.waiting_room import Wait, WaitingRoom


class Pot:
    """``room`` units; request i needs ``needs[i]`` of them, 0 for one that no chain can serve."""

    def __init__(
        self, kind: str, needs: list[int], room: int, age_s: float = 100.0, give_up_s: float = 0.0
    ) -> None:
        self.now_s, self.left, self.needs = 0.0, room, needs
        self.told: list[tuple[float, int, str]] = []
        self._calls: list[tuple[float, int, object]] = []
        rules = QueueRules(kind, age_s, give_up_s, 60.0)  # type: ignore[arg-type]
        self.room = WaitingRoom(rules, self._let_in, self._send, lambda: self.now_s, self._call_at)

    def _let_in(self, index: int) -> Route | Wait | None:
        need = self.needs[index]
        if need == 0:
            return None
        if need < 0:
            raise PolicyError("no")
        if need > self.left:
            return Wait.NO_ROOM
        self.left -= need
        return Route((Hop(0, 0, 1),), 0.0, 1.0)

    def _send(self, index: int) -> Route | None:
        return Route((Hop(0, 0, 1),), 5.0, 1.0)

    def _call_at(self, at_s: float, what: object) -> None:
        heappush(self._calls, (at_s, len(self._calls) + len(self.told), what))

    def until(self, at_s: float) -> None:
        while self._calls and self._calls[0][0] <= at_s:
            self.now_s, _, what = heappop(self._calls)
            what()  # type: ignore[operator]
        self.now_s = at_s

    def ask(self, index: int) -> None:
        def answer(found: Route | PolicyError | None) -> None:
            what = "none" if found is None else "failed" if isinstance(found, PolicyError) else "waits"
            if isinstance(found, Route) and found.wait_s == 0:
                what = "in"
            self.told.append((self.now_s, index, what))

        self.room.add(index, self.now_s, self.now_s, answer)

    def free(self, n: int) -> None:
        self.left += n
        self.room.look()


def test_a_request_that_has_room_goes_at_once() -> None:
    pot = Pot("fifo", [2, 1], room=3)
    pot.ask(0)
    pot.ask(1)
    assert pot.told == [(0.0, 0, "in"), (0.0, 1, "in")]
    assert len(pot.room) == 0


def test_fifo_lets_nobody_pass() -> None:
    pot = Pot("fifo", [3, 2, 1], room=1)
    for index in range(3):
        pot.ask(index)
    pot.until(7.0)
    pot.free(1)
    assert pot.told == []  # two units are free, the first needs three
    pot.free(2)
    assert pot.told == [(7.0, 0, "in")]  # one is left, which would do for 2, but not for 1
    pot.free(2)
    assert [index for _, index, _ in pot.told] == [0, 1, 2]


def test_backfill_lets_pass_until_the_first_has_aged() -> None:
    pot = Pot("backfill", [3, 2, 1, 1], room=1, age_s=10.0)
    pot.ask(0)
    pot.ask(1)
    pot.ask(2)
    assert pot.told == [(0.0, 2, "in")]
    pot.until(10.0)
    pot.ask(3)
    pot.free(2)  # two units would do for 1 and for 3, but 0 has waited 10 s
    assert [index for _, index, _ in pot.told] == [2]
    pot.free(1)
    assert [index for _, index, _ in pot.told] == [2, 0]
    pot.free(3)
    assert [index for _, index, _ in pot.told] == [2, 0, 1, 3]


def test_the_waiting_room_tries_again_though_nothing_wakes_it() -> None:
    pot = Pot("fifo", [1, 1], room=0)
    pot.until(5.0)
    pot.ask(0)
    pot.ask(1)
    pot.left = 1
    pot.until(64.9)
    assert pot.told == []
    pot.until(65.0)
    assert pot.told == [(65.0, 0, "in")]
    pot.left = 1
    pot.until(200.0)
    assert pot.told[1] == (125.0, 1, "in")


def test_an_overdue_request_is_sent_on_its_way_and_the_next_is_first() -> None:
    pot = Pot("fifo", [3, 1], room=1, give_up_s=20.0)
    pot.ask(0)
    pot.until(4.0)
    pot.ask(1)
    pot.until(30.0)
    assert pot.told == [(20.0, 0, "waits"), (20.0, 1, "in")]


def test_a_request_without_a_chain_is_notified_and_holds_no_other_up() -> None:
    pot = Pot("fifo", [0, -1, 1], room=1)
    for index in range(3):
        pot.ask(index)
    assert pot.told == [(0.0, 0, "none"), (0.0, 1, "failed"), (0.0, 2, "in")]


def test_a_request_that_nobody_waits_for_any_more_is_dropped() -> None:
    pot = Pot("fifo", [3, 1], room=1)
    pot.ask(0)
    pot.ask(1)
    pot.room.drop(0)
    pot.room.look()
    assert pot.told == [(0.0, 0, "none"), (0.0, 1, "in")]
    pot.room.drop(7)  # not there: nothing happens
    assert len(pot.told) == 2


def test_a_request_that_was_let_in_and_asks_again_gets_an_answer_again() -> None:
    """At the instant at which the first time would have been overdue, too."""
    pot = Pot("fifo", [1], room=1, give_up_s=5.0)
    pot.ask(0)
    pot.until(2.0)
    assert pot.told == [(0.0, 0, "in")]
    pot.left = 0
    told: list[object] = []
    pot.room.add(0, 0.0, 0.0, told.append)  # it was refused where it was sent
    pot.until(5.0)
    assert len(told) == 1 and len(pot.room) == 0


def test_a_request_that_asks_when_its_time_is_over_fails_at_once() -> None:
    pot = Pot("fifo", [1], room=0, give_up_s=5.0)
    pot.until(5.0)
    told: list[object] = []
    pot.room.add(0, 0.0, 0.0, told.append)
    assert len(told) == 1 and len(pot.room) == 0

"""What TCP makes of lost segments where time is virtual: when they arrive, and how its window shrinks and grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from netem.flows import Flow, Tcp
from netem.forwarder_links import Losses, Pipe
from netem.spec import TcpSpec
from policies.links import Link, repair_s
from testbed.fast.events import EventQueue

MSS = 1448
RTT_S = 0.08


def losing(*rounds: Sequence[int]) -> Callable[[int], Sequence[int]]:
    """Returns draws of lost segments, one round after another."""
    coming = iter([*rounds, ()])
    return lambda n_segments: next(coming)


def test_what_is_lost_arrives_a_round_trip_later_if_something_after_it_shows_the_loss() -> None:
    assert repair_s(RTT_S, 20, losing(())) == (0.0, 0)
    assert repair_s(RTT_S, 20, losing((3, 18))) == (RTT_S, 2)
    assert repair_s(RTT_S, 20, losing((16,))) == (RTT_S, 1)
    assert repair_s(RTT_S, 20, losing((19,)), more_follows=True) == (RTT_S, 1)


@pytest.mark.parametrize("lost", [(17,), (18,), (16, 17), (15, 16, 17)])
def test_fewer_than_three_after_a_loss_show_it_a_quarter_of_a_round_trip_later(lost: tuple[int, ...]) -> None:
    assert repair_s(RTT_S, 20, losing(lost)) == (1.25 * RTT_S, len(lost))
    assert repair_s(RTT_S, 20, losing(lost), more_follows=True) == (RTT_S, len(lost))


@pytest.mark.parametrize(("n", "lost"), [(20, (19,)), (20, (3, 19)), (1, (0,))])
def test_the_timer_alone_shows_that_the_last_segment_is_lost(n: int, lost: tuple[int, ...]) -> None:
    assert repair_s(RTT_S, n, losing(lost)) == (pytest.approx(RTT_S + 0.2), len(lost))


def test_what_is_lost_again_waits_for_the_timer_each_time() -> None:
    asked: list[int] = []
    draws = losing((3, 5), (1,), (0,))

    def lost_of(n_segments: int) -> Sequence[int]:
        asked.append(n_segments)
        return draws(n_segments)

    assert repair_s(RTT_S, 20, lost_of) == (pytest.approx(RTT_S + 2 * (RTT_S + 0.2)), 2)
    assert asked == [20, 2, 1, 1], "only what was lost is sent again"


class Sender:
    """Sends over a link of ``RTT_S`` there and back, and notes when messages arrive."""

    def __init__(self, loss_ratio: float, seed: int = 0) -> None:
        self.queue = EventQueue()
        there = Link(RTT_S / 2, 1e10, loss_ratio=loss_ratio)
        self.pipe = Pipe(f"{seed}", -1, there, repairs=True)
        back = Pipe(f"{seed} back", -1, Link(RTT_S / 2, 1e10), repairs=True)
        self.arrived: list[tuple[Any, float]] = []
        self.n_bytes = 0
        self.flow = Flow(self.queue, self.queue, self.pipe, back, Tcp.of(TcpSpec(), 1500), self.deliver)

    def deliver(self, n_bytes: int, item: Any) -> None:
        self.n_bytes += n_bytes
        if item is not None:
            self.arrived.append((item, self.queue.now_s))

    def goes_on_for(self, s: float) -> None:
        self.queue.at(self.queue.now_s + s, self.queue.stop)
        self.queue.run()

    @property
    def n_segments(self) -> float:
        """The congestion window, with the acknowledgements that have arrived."""
        self.flow.room_bytes()
        return self.flow.window_bytes / MSS


class FixedLosses(Losses):
    """Loses the segments of ``rounds``, one list after another, and then none."""

    def __init__(self, *rounds: list[int]) -> None:
        self.rounds = list(rounds)

    def lost_of(self, n_segments: int) -> list[int]:
        return self.rounds.pop(0) if self.rounds else []


def test_what_has_arrived_behind_a_loss_is_acknowledged_at_once_and_passed_on_in_order() -> None:
    sender = Sender(0.1)
    sender.flow.window_bytes = 200 * MSS
    sender.pipe._losses = FixedLosses([3, 5], [])
    for item in (1, 2):
        sender.flow.put(20 * MSS, item)
    sender.goes_on_for(1.1 * RTT_S)
    assert (sender.n_segments, sender.flow.flight_bytes) == (100, 2 * MSS)
    assert not sender.arrived
    sender.goes_on_for(1.0)
    assert [item for item, _ in sender.arrived] == [1, 2]
    assert [at_s for _, at_s in sender.arrived] == pytest.approx([1.5 * RTT_S] * 2, abs=1e-4)
    assert (sender.n_segments, sender.flow.flight_bytes) == (100, 0)


def test_what_waited_for_a_cut_link_and_is_lost_then_halves_the_window_too() -> None:
    sender = Sender(0.5)
    sender.flow.window_bytes = 200 * MSS
    lossy = Link(RTT_S / 2, 1e10, loss_ratio=0.5)
    sender.pipe.change(replace(lossy, loss_ratio=1.0))
    for _ in range(3):
        sender.flow.put(20 * MSS)
    sender.pipe.change(lossy)
    sender.pipe.release()
    sender.goes_on_for(60.0)
    assert (sender.n_bytes, sender.n_segments) == (60 * MSS, 100)


def test_what_waited_for_a_cut_link_shows_that_what_waited_before_it_is_lost() -> None:
    sender = Sender(0.0)
    sender.flow.window_bytes = 200 * MSS
    sender.pipe.change(Link(RTT_S / 2, 1e10, loss_ratio=1.0))
    for item in (1, 2):
        sender.flow.put(MSS, item)
    sender.pipe.change(Link(RTT_S / 2, 1e10, loss_ratio=0.5))
    sender.pipe._losses = FixedLosses([0], [], [])
    sender.pipe.release()
    sender.goes_on_for(60.0)
    assert [at_s for _, at_s in sender.arrived] == pytest.approx([1.5 * RTT_S] * 2, abs=1e-4)


def test_a_loss_halves_the_window_once_for_all_that_was_in_flight() -> None:
    sender = Sender(0.5)
    sender.flow.window_bytes = 200 * MSS
    for _ in range(3):
        sender.flow.put(20 * MSS)
    assert sender.pipe.n_lost > 0
    sender.goes_on_for(60.0)
    assert sender.n_segments == 100
    sender.flow.put(20 * MSS)
    sender.goes_on_for(60.0)
    assert sender.n_segments == 50


def test_a_window_is_not_halved_below_two_segments() -> None:
    sender = Sender(0.5)
    for _ in range(40):
        sender.flow.put(10 * MSS)
        sender.goes_on_for(60.0)
    assert sender.n_segments <= 4
    assert sender.flow.window_bytes >= 2 * MSS


def test_a_halved_window_grows_by_a_segment_for_each_that_is_used_up_and_not_otherwise() -> None:
    sender = Sender(0.0)
    flow = sender.flow
    flow.window_bytes, flow._slow_start_bytes = 10 * MSS, 10 * MSS
    flow.put(10 * MSS)
    sender.goes_on_for(1.0)
    assert sender.n_segments == 10, "nothing waited for the window"
    flow.put(21 * MSS)  # 10 segments, and 11 after a round trip
    sender.goes_on_for(1.0)
    assert sender.n_segments == pytest.approx(11, abs=1)
    before = sender.n_segments
    flow.put(1000 * MSS)
    sender.goes_on_for(10.5 * RTT_S)
    assert 6 <= sender.n_segments - before <= 11


def test_without_losses_a_window_grows_as_before() -> None:
    sender = Sender(0.0)
    sender.flow.window_bytes = 10 * MSS
    sender.flow.put(5000 * MSS)
    sender.goes_on_for(4.5 * RTT_S)
    assert 140 <= sender.n_segments <= 160, "twice per round trip, where whole bursts have room"


@pytest.mark.parametrize("loss_ratio", [0.001, 0.004, 0.01])
def test_a_long_transfer_is_as_fast_as_the_square_root_law_has_it(loss_ratio: float) -> None:
    """Mathis, Semke, Mahdavi and Ott, 1997: segments per round trip are sqrt(3 / 2 p), where no timer is waited for."""
    sender = Sender(loss_ratio)
    sender.flow.put(10**9)
    sender.goes_on_for(60.0)
    begun = sender.n_bytes
    sender.goes_on_for(600.0)
    per_round_trip = (sender.n_bytes - begun) / MSS * RTT_S / 600.0
    assert per_round_trip == pytest.approx(math.sqrt(1.5 / loss_ratio), rel=0.1)

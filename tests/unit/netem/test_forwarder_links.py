"""When packets arrive: rate, delay, jitter, loss, changes, shared links. No clock runs."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.forwarder_links import MAX_BACKLOG_S, Losses, Pipe, SharedLink, Transit
from netem.forwarder_packets import segments
from policies.links import MIN_RETRANSMISSION_S, Link
from tests.support.packets import tcp_packet

_PACKET = tcp_packet(b"x" * 1198)  # 1250 bytes on the wire: 10 ms at 1 Mbit/s
_SIZE = 1250


def _arrival(pipe: Pipe, at_s: float, packet: bytes = _PACKET, size: int = _SIZE) -> float:
    """Return when a single packet arrives after all its links."""
    entered = pipe.enter(at_s, size, *segments(packet))
    while entered is not None and entered[1] is not None:
        entered = entered[1].enter(entered[0])
    assert entered is not None, "the packet found no room"
    return entered[0]


def test_a_packet_arrives_after_its_transmission_and_the_delay() -> None:
    pipe = Pipe("a to b", 1, Link(0.1, 1e6))
    assert _arrival(pipe, 5.0) == pytest.approx(5.11)


def test_packets_of_a_pair_wait_for_each_other_at_the_rate_of_the_link() -> None:
    pipe = Pipe("a to b", 1, Link(0.1, 1e6))
    assert [_arrival(pipe, 5.0) for _ in range(3)] == pytest.approx([5.11, 5.12, 5.13])


def test_a_packet_that_would_wait_for_too_long_finds_no_room() -> None:
    pipe = Pipe("a to b", 1, Link(0.0, 1e6))
    n_fit = 0
    while pipe.enter(0.0, _SIZE, *segments(_PACKET)) is not None:
        n_fit += 1
    assert n_fit == pytest.approx(MAX_BACKLOG_S / 0.01, abs=1)


_PROFILES = st.builds(
    lambda delay_s, share, rate_bps: Link(delay_s, rate_bps, jitter_s=share * delay_s),
    st.floats(0, 0.2),
    st.floats(0, 1),
    st.floats(1e5, 1e9),
)


@given(steps=st.lists(st.tuples(st.floats(0, 0.05), st.none() | _PROFILES), min_size=2, max_size=40))
def test_no_packet_arrives_before_one_sent_earlier_whatever_changes_and_jitters(
    steps: list[tuple[float, Link | None]],
) -> None:
    pipe = Pipe("a to b", 1, Link(0.1, 1e6, jitter_s=0.1))
    now_s, arrivals = 0.0, []
    for wait_s, profile in steps:
        now_s += wait_s
        if profile is not None:
            pipe.change(profile)
        arrivals.append(_arrival(pipe, now_s))
    assert arrivals == sorted(arrivals)


def test_a_change_leaves_packets_on_their_way_alone_and_holds_from_the_next_on() -> None:
    pipe = Pipe("a to b", 1, Link(0.1, 1e6))
    first = _arrival(pipe, 0.0)
    pipe.change(Link(0.3, 2e6))
    assert first == pytest.approx(0.11)
    assert _arrival(pipe, 1.0) == pytest.approx(1.305)


def test_jitter_is_spread_evenly_around_the_delay() -> None:
    pipe = Pipe("a to b", 1, Link(0.1, 1e9, jitter_s=0.02))
    delays = [_arrival(pipe, float(second)) - second for second in range(2000)]
    assert min(delays) >= 0.08 and max(delays) <= 0.12 + 2e-5
    assert sum(delays) / len(delays) == pytest.approx(0.1, abs=0.001)
    assert sum(delay < 0.09 for delay in delays) / len(delays) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("ratio", [0.001, 0.05, 0.5])
@pytest.mark.parametrize("n_segments", [1, 44])
def test_the_stated_share_of_segments_is_lost_also_out_of_super_packets(
    ratio: float, n_segments: int
) -> None:
    losses = Losses(Random("a pair"), ratio)
    n_total = 400_000
    lost = sum(len(losses.lost_of(n_segments)) for _ in range(n_total // n_segments))
    assert lost / n_total == pytest.approx(ratio, rel=0.15)


def test_a_pair_loses_the_same_packets_in_every_run_and_other_pairs_others() -> None:
    def fates(name: str) -> list[int]:
        pipe = Pipe(name, 1, Link(0.1, 1e9, loss_ratio=0.3))
        return [pipe.survivors(_PACKET)[1] for _ in range(50)]

    assert fates("a to b") == fates("a to b")
    assert fates("a to b") != fates("b to a")


def test_a_cut_link_loses_all_until_it_is_mended() -> None:
    pipe = Pipe("a to b", 1, Link(0.1, 1e9, loss_ratio=1.0))
    assert pipe.loses
    assert pipe.survivors(tcp_packet(b"x" * 2800, segment_bytes=1400)) == ([], 2)
    pipe.change(Link(0.1, 1e9))
    assert not pipe.loses


def test_a_lossy_pair_cuts_single_segments_out_of_a_super_packet() -> None:
    packet = tcp_packet(b"x" * 14_000, segment_bytes=1400)
    pipe = Pipe("a to b", 1, Link(0.1, 1e9, loss_ratio=0.1))
    n_lost = n_bytes = 0
    for _ in range(300):
        parts, lost = pipe.survivors(packet)
        n_lost += lost
        n_bytes += sum(len(part) - 62 for part in parts)
    assert 0 < n_lost < 3000
    assert n_bytes == (3000 - n_lost) * 1400


def test_two_pairs_over_one_shared_link_share_its_rate() -> None:
    shared = SharedLink(1e6)
    pipes = [Pipe(name, 1, Link(0.1, 1e9), route=(shared,)) for name in ("a to c", "b to c")]
    by_pair = _drain(pipes, n_each=10)
    arrivals = sorted(at_s for each in by_pair.values() for at_s in each)
    assert arrivals[-1] == pytest.approx(0.1 + 20 * 0.01, rel=0.01)
    assert [b - a for a, b in pairwise(arrivals)] == pytest.approx([0.01] * 19, rel=0.01)
    assert max(by_pair["a to c"]) == pytest.approx(max(by_pair["b to c"]), rel=0.05)


def test_pairs_without_a_link_in_common_do_not_touch_each_other() -> None:
    one, other = SharedLink(1e6), SharedLink(1e6)
    alone = _arrival(Pipe("a to c", 1, Link(0.1, 1e6), route=(one,)), 0.0)
    busy = Pipe("b to d", 1, Link(0.1, 1e6), route=(other,))
    _drain([busy], n_each=10)
    assert _arrival(Pipe("a to c", 1, Link(0.1, 1e6), route=(SharedLink(1e6),)), 0.0) == alone


@pytest.mark.parametrize(("own_bps", "n_links"), [(1e6, 3), (2e6, 3.5), (0.5e6, 5)])
def test_a_super_packet_alone_is_delayed_by_one_segment_per_further_link_not_by_itself(
    own_bps: float, n_links: float
) -> None:
    packet = tcp_packet(b"x" * 11_980, segment_bytes=1198)  # 10 segments of 1250 bytes: 10 ms each
    route = tuple(SharedLink(1e6) for _ in range(3))
    pipe = Pipe("a to b", 1, Link(0.1, own_bps), route=route)
    slowest_s = 0.01 if own_bps >= 1e6 else 0.02
    assert _arrival(pipe, 0.0, packet, 12_500) == pytest.approx(0.1 + 9 * slowest_s + n_links * 0.01)


def test_a_pair_whose_rate_is_that_of_a_shared_link_transmits_once_and_no_faster() -> None:
    shared = SharedLink(1e6)
    pipe = Pipe("a to b", 1, Link(0.1, 1e6), route=(shared,))
    assert _drain([pipe], n_each=3)["a to b"] == pytest.approx([0.11, 0.12, 0.13])
    pipe.change(Link(0.1, 0.5e6), 1.0)  # slower for a while: a link of its own
    assert _arrival(pipe, 1.0) == pytest.approx(1.1 + 0.02 + 0.01)
    pipe.change(Link(0.1, 1e6), 2.0)
    assert _arrival(pipe, 2.0) == pytest.approx(2.1 + 0.01)


def test_a_shared_link_is_not_held_for_a_packet_that_still_waits_elsewhere() -> None:
    slow, common = SharedLink(1e5), SharedLink(1e6)
    pipes = [
        Pipe("a to c", 1, Link(0.0, 1e9), route=(slow, common)),
        Pipe("b to c", 1, Link(0.0, 1e9), route=(common,)),
    ]
    arrivals = _drain(pipes, n_each=1)
    assert arrivals["b to c"] == pytest.approx([0.01], rel=0.01)  # at once, though a's packet was sent first
    assert arrivals["a to c"] == pytest.approx([0.11], rel=0.01)


def _drain(pipes: list[Pipe], n_each: int) -> dict[str, list[float]]:
    """Send ``n_each`` packets per pipe at instant 0, in turns; return their arrivals by pair."""
    events: list[tuple[float, Transit | None, Pipe]] = []
    for _ in range(n_each):
        for pipe in pipes:
            entered = pipe.enter(0.0, _SIZE, *segments(_PACKET))
            assert entered is not None
            events.append((*entered, pipe))
    arrivals: dict[str, list[float]] = {}
    while events:
        events.sort(key=lambda event: event[0])
        at_s, transit, pipe = events.pop(0)
        if transit is None:
            arrivals.setdefault(pipe.name, []).append(at_s)
        else:
            entered = transit.enter(at_s)
            assert entered is not None
            events.append((*entered, pipe))
    return arrivals


def test_a_pipe_that_repairs_drops_nothing_however_long_its_link_is_busy() -> None:
    pipe = Pipe("a to b", -1, Link(0.0, 1e6), repairs=True)
    arrivals = [pipe.enter(0.0, _SIZE) for _ in range(2 * int(MAX_BACKLOG_S / 0.01))]
    assert all(entered is not None for entered in arrivals)


def test_a_pipe_that_repairs_brings_lost_segments_late_and_in_order() -> None:
    profile = Link(0.1, 1e9, loss_ratio=0.3)
    pipe = Pipe("a to b", -1, profile, repairs=True)
    assert pipe.counts and not pipe.loses
    sent_s = [i * 10.0 for i in range(200)]
    late_s = []
    for at_s in sent_s:
        entered = pipe.enter(at_s, _SIZE, 1, _SIZE)
        assert entered is not None
        late_s.append(entered[0] - at_s - 0.1)
    rounds = [
        late / (0.2 + MIN_RETRANSMISSION_S) for late in late_s
    ]  # each segment is the last of its message
    assert all(abs(n - round(n)) < 1e-3 for n in rounds)
    assert {round(n) for n in rounds} >= {0, 1, 2}
    assert sum(round(n) > 0 for n in rounds) == pytest.approx(0.3 * 200, abs=25)


def test_a_cut_pipe_that_repairs_holds_packets_until_the_link_is_up() -> None:
    pipe, sent = Pipe("a to b", -1, Link(0.1, 1e9, loss_ratio=1.0), repairs=True), []
    assert pipe.holds and not pipe.loses
    for number in range(3):
        pipe.held.append(lambda number=number: sent.append(number))
    pipe.release()
    assert sent == []
    pipe.change(Link(0.1, 1e9))
    pipe.release()
    assert (sent, pipe.held, pipe.holds) == ([0, 1, 2], [], False)


def _with_course(*changes: tuple[float, float], origin_s: float = 100.0) -> Pipe:
    """Return the pipe of a link of 1 Mbit/s without delay, after the first change of its course at ``origin_s``."""
    instants, rates_bps = zip(*changes, strict=True)
    pipe = Pipe("a to b", 1, Link(0.0, 1e6), repairs=True, course=(instants, rates_bps))
    pipe.change(Link(0.0, rates_bps[0]), origin_s + instants[0])
    return pipe


def test_what_is_queued_when_a_planned_change_comes_is_transmitted_at_the_new_rate() -> None:
    pipe = _with_course((0.0, 1e6), (0.02, 4e6), (0.03, 0.0), (0.05, 1e6))
    # 2 packets at 1 Mbit/s, 4 at 4 Mbit/s until the cut, then none for 20 ms, and one at 1 Mbit/s
    expected = [0.01, 0.02, 0.0225, 0.025, 0.0275, 0.03, 0.06]
    assert [_arrival(pipe, 100.0) - 100 for _ in expected] == pytest.approx(expected)
    late = Pipe("a to b", 1, Link(0.0, 1e6), repairs=True, course=((0.0, 0.02), (1e6, 4e6)))
    late.change(Link(0.0, 1e6), 100.0)
    assert _arrival(late, 100.0, size=3750) - 100 == pytest.approx(0.0225)  # a packet is transmitted at both


def test_a_course_takes_a_late_change_as_its_own_and_ends_with_one_by_hand() -> None:
    pipe = _with_course((0.0, 1e6), (0.02, 4e6), (1.0, 1e6))
    pipe.change(Link(0.0, 4e6), 100.025)  # 5 ms late: so will be the next
    assert _arrival(pipe, 101.003, size=2500) == pytest.approx(101.005 + (2500 - 1000) * 8e-6)
    pipe = _with_course((0.0, 1e6), (0.02, 4e6))
    pipe.change(Link(0.2, 1e6), 100.001)  # only the delay, by hand
    assert _arrival(pipe, 100.01, size=2500) == pytest.approx(100.2 + 0.02 + (2500 - 1250) * 2e-6)
    pipe.change(Link(0.0, 2e6), 100.011)  # the rate, by hand: what was planned is known no more
    assert _arrival(pipe, 200.0, size=2500) == pytest.approx(200.01)


def test_a_course_holds_on_the_way_to_shared_links_too() -> None:
    pipe = Pipe(
        "a to b", 1, Link(0.0, 1e6), route=(SharedLink(1e9),), repairs=True, course=((0.0, 0.005), (1e6, 1e7))
    )
    pipe.change(Link(0.0, 1e6), 7.0)
    assert _arrival(pipe, 7.0) == pytest.approx(7.0055 + 1e-5, abs=1e-6)


@given(
    rates=st.lists(st.sampled_from([0.0, 1e5, 1e6, 1e7]), min_size=1, max_size=8),
    sizes=st.lists(st.integers(1, 20_000), min_size=1, max_size=20),
)
def test_a_link_transmits_as_much_as_its_course_lets_through(rates: list[float], sizes: list[int]) -> None:
    rates = [1e6, *rates, 1e6]
    pipe = _with_course(*((0.01 * n, rate) for n, rate in enumerate(rates)), origin_s=0.0)
    for size in sizes:
        arrived_s = _arrival(pipe, 0.0, size=size)
    spans = [(rate, min(max(arrived_s - 0.01 * n, 0.0), 0.01)) for n, rate in enumerate(rates[:-1])]
    bits = sum(rate * span_s for rate, span_s in spans) + rates[-1] * max(arrived_s - 0.01 * len(spans), 0.0)
    assert bits == pytest.approx(8 * sum(sizes))

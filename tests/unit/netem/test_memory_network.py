"""Streams of the memory network: when bytes arrive, and how connections end. Virtual time, exact."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import pytest

from netem.memory import MemoryNetwork
from netem.spec import NetworkError, NetworkSpec, TcpSpec
from policies.links import HEADER_BYTES, Link
from testbed.runtime.virtual.loop import MemoryLoop

T = TypeVar("T")
PORT = 7000
DELAY_S, RATE_BPS = 0.05, 1e8
LINK = Link(DELAY_S, RATE_BPS)


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        return runner.run(main())


def spec(link: Link = LINK, back: Link = LINK, **more: Any) -> NetworkSpec:
    return NetworkSpec(
        "test",
        ("a", "b", "c"),
        {("a", "b"): link, ("b", "a"): back, ("c", "b"): link, ("b", "c"): back},
        **more,
    )


def sent_s(n_bytes: int, rate_bps: float = RATE_BPS) -> float:
    return Link(0, rate_bps).transmission_s(n_bytes)


class End(asyncio.Protocol):
    """Records what it receives, and when."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.arrivals: list[tuple[float, int]] = []
        self.data = b""
        self.lost: list[tuple[float, Exception | None]] = []
        self.connected_at_s = -1.0
        self.is_paused = False

    def connection_made(self, transport: Any) -> None:
        self.transport, self.connected_at_s = transport, now_s()

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((now_s(), len(data)))
        self.data += data

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append((now_s(), error))

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def connected(network: MemoryNetwork, source: str = "a") -> tuple[End, End]:
    """Open a connection from ``source`` to b; both ends are connected."""
    there: list[End] = []

    def accept() -> End:
        there.append(End())
        return there[-1]

    network.listen(network.addresses["b"], PORT, accept)
    here = await network.connect(network.addresses[source], network.addresses["b"], PORT, End)
    await asyncio.sleep(1)
    assert isinstance(here, End)
    return here, there[0]


def test_a_connection_stands_after_a_round_trip_and_at_the_server_half_a_trip_later() -> None:
    async def main() -> tuple[float, float]:
        here, there = await connected(MemoryNetwork(spec()))
        return here.connected_at_s, there.connected_at_s

    here_s, there_s = run(main)
    assert here_s == pytest.approx(2 * (DELAY_S + sent_s(8)), abs=1e-8)
    assert there_s == pytest.approx(here_s + DELAY_S + HEADER_BYTES * 8 / RATE_BPS, abs=1e-8)


@pytest.mark.parametrize("n_bytes", [1, 1448, 28_672, 573_440])
def test_data_arrive_when_their_last_byte_is_through_the_link_and_its_delay(n_bytes: int) -> None:
    async def main() -> tuple[float, bytes]:
        here, there = await connected(MemoryNetwork(spec()))
        began_s = now_s()
        here.transport.write(bytes(range(256)) * (n_bytes // 256) + bytes(n_bytes % 256))
        await asyncio.sleep(10)
        return there.arrivals[-1][0] - began_s, there.data

    took_s, data = run(main)
    assert took_s == pytest.approx(sent_s(n_bytes) + DELAY_S, abs=1e-7)
    assert data == bytes(range(256)) * (n_bytes // 256) + bytes(n_bytes % 256)


def test_more_than_the_window_waits_for_acknowledgements_as_tcp_does() -> None:
    """A warm connection sends 868,800 bytes without waiting; at 100 Mbit/s their transmission takes 72 ms."""

    async def main(warm: bool) -> list[float]:
        here, there = await connected(MemoryNetwork(spec(tcp=TcpSpec(warm=warm))))
        began_s = now_s()
        here.transport.write(bytes(1_000_000))
        await asyncio.sleep(10)
        assert len(there.data) == 1_000_000
        return [at_s - began_s for at_s, _ in there.arrivals]

    warm, cold = run(lambda: main(True)), run(lambda: main(False))
    assert warm[-1] == pytest.approx(
        DELAY_S + sent_s(1_000_000) + 0.033, abs=2e-3
    )  # 105 ms until the first is known
    assert cold[-1] > 5 * 2 * DELAY_S  # ten segments, then twice as many in every round trip


def test_a_burst_is_at_most_half_of_the_window_so_that_its_acknowledgement_comes_while_another_is_on_the_link() -> (
    None
):
    """Ten segments at first, as five and five. What the first five let go is on the link when the others are through."""

    async def main() -> tuple[float, list[tuple[float, int]]]:
        near = Link(0.001, 1e6)
        here, there = await connected(MemoryNetwork(spec(near, near, tcp=TcpSpec(warm=False))))
        began_s = now_s()
        here.transport.write(bytes(25 * 1448))
        await asyncio.sleep(10)
        return began_s, there.arrivals

    began_s, arrivals = run(main)
    assert [n_bytes for _, n_bytes in arrivals[:2]] == [5 * 1448, 5 * 1448]
    assert arrivals[-1][0] - began_s == pytest.approx(0.001 + 25 * 1500 * 8 / 1e6, abs=1e-6), (
        "the link is never idle"
    )


def test_a_window_that_was_used_has_grown_for_the_next_message() -> None:
    async def main() -> list[float]:
        here, there = await connected(MemoryNetwork(spec()))
        took_s = []
        for _ in range(2):
            began_s = now_s()
            here.transport.write(bytes(1_500_000))
            await asyncio.sleep(10)
            took_s.append(there.arrivals[-1][0] - began_s)
        return took_s

    first_s, second_s = run(main)
    assert second_s == pytest.approx(sent_s(1_500_000) + DELAY_S, abs=1e-6)
    assert second_s < first_s


def test_two_connections_of_a_pair_wait_for_each_other_and_those_of_other_pairs_do_not() -> None:
    async def main() -> list[float]:
        network = MemoryNetwork(spec())
        ends = [await connected(network, source) for source in ("a", "a", "c")]
        began_s = now_s()
        for here, _ in ends:
            here.transport.write(bytes(28_672))
        await asyncio.sleep(10)
        return [there.arrivals[-1][0] - began_s for _, there in ends]

    one_s = sent_s(28_672)
    assert run(main) == pytest.approx([one_s + DELAY_S, 2 * one_s + DELAY_S, one_s + DELAY_S], abs=1e-7)


def test_pairs_that_share_a_link_wait_for_each_other_there() -> None:
    async def main() -> list[float]:
        paths = {("a", "b"): ("core",), ("c", "b"): ("core",)}
        network = MemoryNetwork(spec(Link(DELAY_S, 1e9), shared={"core": RATE_BPS}, paths=paths))
        ends = [await connected(network, source) for source in ("a", "c")]
        began_s = now_s()
        for here, _ in ends:
            here.transport.write(bytes(28_672))
        await asyncio.sleep(10)
        return [there.arrivals[-1][0] - began_s for _, there in ends]

    first_s, second_s = run(main)
    assert second_s - first_s == pytest.approx(sent_s(28_672), abs=1e-6)


def test_a_change_of_a_link_holds_for_what_is_sent_from_then_on() -> None:
    async def main() -> list[float]:
        network = MemoryNetwork(spec())
        here, there = await connected(network)
        began_s = now_s()
        here.transport.write(b"before")
        network.update({("a", "b"): Link(0.2, RATE_BPS)})
        await asyncio.sleep(1)
        here.transport.write(b"after")
        await asyncio.sleep(1)
        return [at_s - began_s for at_s, _ in there.arrivals]

    before_s, after_s = run(main)
    assert (before_s, after_s) == pytest.approx((DELAY_S, 1.2), abs=1e-4)


def test_what_meets_a_cut_link_goes_out_in_order_when_it_is_up_again() -> None:
    async def main() -> tuple[list[tuple[float, int]], bytes]:
        network = MemoryNetwork(spec())
        here, there = await connected(network)
        began_s = now_s()
        network.update({("a", "b"): Link(DELAY_S, RATE_BPS, loss_ratio=1.0)})
        here.transport.write(b"one")
        await asyncio.sleep(5)
        here.transport.write(b"two")
        await asyncio.sleep(5)
        network.update({("a", "b"): LINK})
        await asyncio.sleep(5)
        return [(at_s - began_s, n) for at_s, n in there.arrivals], there.data

    arrivals, data = run(main)
    assert data == b"onetwo"
    assert [at_s for at_s, _ in arrivals] == pytest.approx([10 + DELAY_S] * 2, abs=1e-4)


def test_lost_segments_arrive_late_and_nothing_overtakes_them() -> None:
    async def main() -> tuple[list[float], bytes]:
        network = MemoryNetwork(spec(Link(DELAY_S, RATE_BPS, loss_ratio=0.2)))
        here, there = await connected(network)
        await asyncio.sleep(100)
        began_s, late_s = now_s(), []
        for number in range(200):
            here.transport.write(bytes([number]))
            await asyncio.sleep(0.01)
        await asyncio.sleep(100)
        late_s = [at_s - began_s - 0.01 * i for i, (at_s, _) in enumerate(there.arrivals)]
        return late_s, there.data

    late_s, data = run(main)
    assert data == bytes(range(200))
    assert max(late_s) > 0.2  # sent again after 0.2 s at least
    assert DELAY_S < min(late_s) < 0.2


def test_jitter_moves_arrivals_within_its_bounds_and_is_the_same_in_every_run_with_a_seed() -> None:
    async def main(seed: int = 0) -> list[float]:
        network = MemoryNetwork(spec(Link(DELAY_S, RATE_BPS, jitter_s=0.01), seed=seed))
        here, there = await connected(network)
        took_s = []
        for _ in range(100):
            began_s = now_s()
            here.transport.write(b"x")
            await asyncio.sleep(1)
            took_s.append(there.arrivals[-1][0] - began_s)
        return took_s

    took_s = run(main)
    assert DELAY_S - 0.0101 < min(took_s) < DELAY_S - 0.005
    assert DELAY_S + 0.005 < max(took_s) < DELAY_S + 0.0101
    assert took_s == run(main) != run(partial(main, 1))


def test_who_closes_is_done_at_once_and_the_other_end_when_the_data_and_the_end_have_arrived() -> None:
    async def main() -> tuple[End, End, float]:
        here, there = await connected(MemoryNetwork(spec()))
        began_s = now_s()
        here.transport.write(b"bye")
        here.transport.close()
        here.transport.write(b"never")
        await asyncio.sleep(1)
        return here, there, began_s

    here, there, began_s = run(main)
    assert here.lost == [(began_s, None)]
    assert there.data == b"bye"
    [(lost_at_s, error)] = there.lost
    assert error is None and lost_at_s - began_s == pytest.approx(DELAY_S, abs=1e-4)


def test_an_abort_resets_the_other_end() -> None:
    async def main() -> list[tuple[float, Exception | None]]:
        here, there = await connected(MemoryNetwork(spec()))
        here.transport.abort()
        await asyncio.sleep(1)
        return there.lost

    [(_, error)] = run(main)
    assert isinstance(error, ConnectionResetError)


def test_of_a_killed_node_nothing_is_called_again_and_its_peers_hear_of_the_end() -> None:
    async def main() -> tuple[End, End, int]:
        network = MemoryNetwork(spec())
        here, there = await connected(network)
        there.transport.write(b"last words")
        here.transport.write(b"too late")
        network.kill(network.addresses["b"])
        assert network.n_streams(network.addresses["b"]) == 0
        await asyncio.sleep(1)
        with pytest.raises(ConnectionRefusedError):
            await network.connect(network.addresses["a"], network.addresses["b"], PORT, End)
        return here, there, network.n_streams(network.addresses["a"])

    here, there, n_left = run(main)
    assert here.data == b"last words"
    assert [error for _, error in here.lost] == [None]
    assert there.lost == [] and there.data == b""
    assert n_left == 0


def test_a_connection_to_a_port_without_listener_is_refused_after_a_round_trip() -> None:
    async def main() -> float:
        network = MemoryNetwork(spec())
        with pytest.raises(ConnectionRefusedError, match="nobody listens"):
            await network.connect(network.addresses["a"], network.addresses["b"], PORT, End)
        return now_s()

    assert run(main) == pytest.approx(2 * DELAY_S, abs=1e-4)


def test_a_reader_that_pauses_gets_all_of_it_later_and_stops_the_writer_meanwhile() -> None:
    async def main() -> tuple[bool, bool, int]:
        here, there = await connected(MemoryNetwork(spec()))
        there.transport.pause_reading()
        here.transport.write(bytes(20_000_000))
        await asyncio.sleep(60)
        assert there.data == b""
        was_paused = here.is_paused
        there.transport.resume_reading()
        await asyncio.sleep(60)
        return was_paused, here.is_paused, len(there.data)

    assert run(main) == (True, False, 20_000_000)


def test_only_links_of_the_network_can_change() -> None:
    async def main() -> None:
        MemoryNetwork(spec()).update({("a", "c"): LINK})

    with pytest.raises(NetworkError, match="no link from a to c"):
        run(main)

"""Packets cut into datagrams and reassembled. Datagrams of other runs, or changed ones, are refused."""

from __future__ import annotations

import os
from random import Random

import pytest

from netem.forwarder_datagrams import (
    MAX_INCOMPLETE,
    MAX_PACKET_BYTES,
    MIN_PIECE_BYTES,
    PIECE_AT,
    WINDOW,
    Assembly,
    Numbers,
    Piece,
    Seal,
    Times,
    split,
)

_KEY = bytes(range(32))
_ME, _OTHER = 0, 1


def datagrams(
    packet: bytes, number: int = 0, piece_bytes: int = 1402, key: bytes = _KEY, to: int = _ME
) -> list[bytes]:
    parts = Seal(key).cut(_OTHER, to, number, (3, 4), 12.5, packet, piece_bytes)
    return [b"".join(each) for each in parts]


def assembled(assembly: Assembly, seal: Seal, sent: list[bytes]) -> list[bytes]:
    """Return the packets that are reassembled from these datagrams."""
    packets = []
    for datagram in sent:
        piece = seal.read(datagram, _ME)
        if isinstance(piece, Piece):
            packet = assembly.take(piece)
            if packet is not None:
                packets.append(packet)
    return packets


@pytest.mark.parametrize("n_bytes", [1, 20, 1402, 1403, 2804, 9000, MAX_PACKET_BYTES])
@pytest.mark.parametrize("in_order", [True, False])
def test_a_packet_comes_back_whole_whatever_its_size_and_the_order_of_its_pieces(
    n_bytes: int, in_order: bool
) -> None:
    packet = Random(n_bytes).randbytes(n_bytes)
    sent = datagrams(packet)
    if not in_order:
        Random(1).shuffle(sent)
    seal = Seal(_KEY)
    assembly = Assembly(seal)
    assert assembled(assembly, seal, sent) == [packet]
    assert (assembly.n_lost, assembly.n_broken, assembly.n_refused, assembly.n_incomplete) == (0, 0, 0, 0)
    piece = seal.read(sent[0], _ME)
    assert isinstance(piece, Piece)
    assert (piece.head.source, piece.head.target, piece.head.at_s) == (3, 4, 12.5)


def test_datagrams_are_of_one_size_but_for_the_last_so_the_kernel_can_cut_them() -> None:
    sizes = [len(datagram) for datagram in datagrams(bytes(5000), piece_bytes=1402)]
    assert sizes == [1402 + PIECE_AT] * 3 + [5000 - 3 * 1402 + PIECE_AT]
    together = b"".join(datagrams(bytes(5000)))
    assert list(split(together, sizes[0])) == datagrams(bytes(5000))


def test_a_missing_piece_loses_its_packet_and_no_other() -> None:
    seal = Seal(_KEY)
    assembly = Assembly(seal)
    first, second = datagrams(bytes(4000)), datagrams(b"x" * 4000, number=3)
    assert assembled(assembly, seal, first[:1] + first[2:] + second) == [b"x" * 4000]
    assert assembly.n_lost == 1


def test_losses_at_the_end_count_once_the_sender_says_what_it_has_sent() -> None:
    seal = Seal(_KEY)
    assembly = Assembly(seal)
    assembled(assembly, seal, datagrams(b"one"))
    assert assembly.n_lost == 0
    times = seal.read(Seal(_KEY).times(Times(False, _OTHER, _ME, 5, 1.0)), _ME)
    assert isinstance(times, Times)
    assembly.learn(times)
    assert assembly.n_lost == 4


def test_a_question_is_as_long_as_asked_and_read_unless_a_byte_of_it_was_changed() -> None:
    times = Times(False, _OTHER, _ME, 5, 1.0)
    long = Seal(_KEY).times(times, 1472)
    assert len(long) == 1472
    assert Seal(_KEY).read(long, _ME) == times
    for changed in (long[:-1], long + b"\0", long[:1000] + b"x" + long[1001:], long[:50]):
        assert Seal(_KEY).read(changed, _ME) is None


def test_a_datagram_that_arrives_twice_is_refused() -> None:
    seal = Seal(_KEY)
    assembly = Assembly(seal)
    assert assembled(assembly, seal, datagrams(b"one") * 2) == [b"one"]
    assert assembled(assembly, seal, datagrams(bytes(4000), number=1) * 2) == [bytes(4000)]
    assert assembly.n_refused == 1 + 3
    assert assembly.n_lost == 0


def test_numbers_know_what_came_within_their_window_and_refuse_what_is_older() -> None:
    numbers = Numbers()
    assert [numbers.take(number) for number in (0, 2, 1, 2, 0)] == [True, True, True, False, False]
    assert numbers.take(2 + 10 * WINDOW)
    assert not numbers.take(2 + 9 * WINDOW)
    assert numbers.take(3 + 9 * WINDOW)
    assert not numbers.take(3 + 9 * WINDOW)
    assert numbers.n_lost == 10 * WINDOW - 2


def test_packets_that_are_never_complete_take_bounded_room() -> None:
    seal = Seal(_KEY)
    assembly = Assembly(seal)
    for number in range(0, 1000 * 47, 47):
        assembled(assembly, seal, datagrams(bytes(65_000), number)[:1])
    assert assembly.n_incomplete == MAX_INCOMPLETE
    assert assembly.n_broken == 1000 - MAX_INCOMPLETE


@pytest.mark.parametrize("packet", [b"short", bytes(4000)])
def test_no_datagram_of_another_run_or_for_another_machine_is_read(packet: bytes) -> None:
    for datagram in (*datagrams(packet, key=bytes(32)), *datagrams(packet, to=2)):
        assert Seal(_KEY).read(datagram, _ME) is None
    assert Seal(_KEY).read(Seal(bytes(32)).times(Times(False, _OTHER, _ME, 5, 1.0)), _ME) is None
    assert Seal(_KEY).read(Seal(_KEY).times(Times(False, _OTHER, 2, 5, 1.0)), _ME) is None


def test_a_piece_that_was_changed_spoils_its_packet_which_is_counted() -> None:
    seal = Seal(_KEY)
    assembly = Assembly(seal)
    sent = datagrams(bytes(4000))
    sent[1] = sent[1][:-1] + b"\1"
    assert assembled(assembly, seal, sent) == []
    assert assembly.n_broken == 1


@pytest.mark.parametrize("seed", range(20))
def test_hostile_datagrams_are_refused_and_no_packet_is_made_of_them(seed: int) -> None:
    random = Random(seed)
    seal = Seal(_KEY)
    assembly = Assembly(seal)
    packets = [random.randbytes(random.choice([16, 50, 1402, 5000, 20_000])) for _ in range(20)]
    sent, number = [], 0
    for packet in packets:
        cut = datagrams(packet, number, random.choice([MIN_PIECE_BYTES, 1402, 8000]))
        number += len(cut)
        sent += cut
    hostile = [_hostile(random, random.choice(sent)) for _ in range(1000)]
    everything = [*sent, *hostile, *(random.choice(sent) for _ in range(200))]
    random.shuffle(everything)
    arrived = assembled(assembly, seal, everything)
    # A changed piece can replace the right one. That loses packets, but never forges or changes any.
    assert len(arrived) == len(set(arrived))
    assert set(arrived) <= set(packets)
    assert assembly.n_incomplete <= MAX_INCOMPLETE
    for _ in range(1000):
        assert seal.read(os.urandom(random.randrange(0, 3000)), _ME) is None


def _hostile(random: Random, datagram: bytes) -> bytes:
    """Draw a datagram that differs a little from ``datagram``."""
    kind = random.randrange(5)
    at = random.randrange(len(datagram))
    if kind == 0:  # a bit
        return datagram[:at] + bytes([datagram[at] ^ 1 << random.randrange(8)]) + datagram[at + 1 :]
    if kind == 1:  # cut off, at any place
        return datagram[:at]
    if kind == 2:
        return datagram + random.randbytes(random.randrange(1, 100))
    if kind == 3:  # another number of the piece
        return datagram[: PIECE_AT - 2] + random.randbytes(2) + datagram[PIECE_AT:]
    return random.randbytes(len(datagram))

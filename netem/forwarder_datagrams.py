"""What forwarders on several machines send each other: datagrams of one run, and packets put together from them.

A packet is cut into pieces of the same size (the last one may be shorter), each a datagram of its own:

    head: kind, version, sender, receiver, number, source, target, instant of arrival, bytes, bytes of a piece,
          tag of the packet | tag of the head | number of the piece | piece

Both tags are keyed BLAKE2b of 128 bits, with the run's key: the head's over the head (which names the packet's tag), the
packet's over all of its bytes. So nothing is kept for a head that is not of this run, and no packet leaves here that is
not as it was sent. A piece by itself is not covered: whoever can see datagrams and send some can spoil packets, not make any.

Datagrams are numbered from 0 per sender and receiver: what is missing was lost, what comes twice (or is older than the
last ``WINDOW``) is refused. A question (``Ping``) says which number comes next, so that losses at the end count too.

Pure: no socket, no clock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from netem.tun import VNET_HEADER_BYTES

_VERSION = 1
_PACKET, _PING, _PONG = 1, 2, 3
_TAG_BYTES = 16
_HEAD = struct.Struct(f"<BBHHQIIdIH{_TAG_BYTES}s")
_TIMES = struct.Struct("<BBHHQddd")
_START_BYTES = _HEAD.size + _TAG_BYTES
_TIMES_BYTES = _TIMES.size + _TAG_BYTES
_INDEX = struct.Struct("<H")
PIECE_AT = _START_BYTES + _INDEX.size
"""Where in a datagram the piece begins."""
MIN_PIECE_BYTES = 256
MAX_PACKET_BYTES = VNET_HEADER_BYTES + 65535
MAX_INCOMPLETE = 64
"""Packets of one sender that wait for pieces; the oldest one makes room for another."""
WINDOW = 1024
_WINDOW_MASK = (1 << WINDOW) - 1
_INDEXES = [_INDEX.pack(i) for i in range(-(-MAX_PACKET_BYTES // MIN_PIECE_BYTES))]
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, blake2b.MAX_KEY_SIZE


class Head(NamedTuple):
    """Of a packet on its way: machines by number, nodes by number, its instant of arrival on the sender's clock."""

    sender: int
    receiver: int
    number: int
    """Of its first datagram; the next ones follow."""
    source: int
    target: int
    at_s: float
    n_bytes: int
    piece_bytes: int
    tag: bytes

    @property
    def n_pieces(self) -> int:
        return -(-self.n_bytes // self.piece_bytes)


class Times(NamedTuple):
    """A question, sent at ``t0_s``, or its answer: the question came at ``t1_s`` and was answered ``held_s`` later."""

    is_answer: bool
    sender: int
    receiver: int
    next_number: int
    """Of the sender's next datagram to this receiver."""
    t0_s: float
    t1_s: float = 0.0
    held_s: float = 0.0


class Piece(NamedTuple):
    start: bytes
    """The head and its tag as they came: the same for all pieces of a packet."""
    head: Head
    number: int
    """Among the pieces of its packet."""
    data: bytes


class Seal:
    """Writes and reads datagrams of the run with this key (``MIN_KEY_BYTES`` to ``MAX_KEY_BYTES``)."""

    def __init__(self, key: bytes) -> None:
        self._heads = blake2b(key=key, digest_size=_TAG_BYTES, person=b"head")
        self._packets = blake2b(key=key, digest_size=_TAG_BYTES, person=b"packet")
        self._last: tuple[bytes, Head] = b"", Head(0, 0, 0, 0, 0, 0.0, 0, 1, b"")

    def _head_tag(self, head: bytes) -> bytes:
        tag = self._heads.copy()
        tag.update(head)
        return tag.digest()

    def _packet_tag(self, packet: bytes) -> bytes:
        tag = self._packets.copy()
        tag.update(packet)
        return tag.digest()

    def cut(
        self,
        sender: int,
        receiver: int,
        number: int,
        pair: tuple[int, int],
        at_s: float,
        packet: bytes,
        piece_bytes: int,
    ) -> list[tuple[bytes, bytes]]:
        """The packet's datagrams, each in two parts: what stands before the piece, and the piece."""
        head = _HEAD.pack(
            _PACKET,
            _VERSION,
            sender,
            receiver,
            number,
            *pair,
            at_s,
            len(packet),
            piece_bytes,
            self._packet_tag(packet),
        )
        start = head + self._head_tag(head)
        if len(packet) <= piece_bytes:
            return [(start + _INDEXES[0], packet)]
        n_pieces = -(-len(packet) // piece_bytes)
        return [
            (start + _INDEXES[i], packet[i * piece_bytes : (i + 1) * piece_bytes]) for i in range(n_pieces)
        ]

    def times(self, times: Times) -> bytes:
        """The datagram of a question or an answer."""
        is_answer, *values = times
        head = _TIMES.pack(_PONG if is_answer else _PING, _VERSION, *values)
        return head + self._head_tag(head)

    def read(self, datagram: bytes, receiver: int) -> Piece | Times | None:
        """What a datagram holds; ``None`` for all that this run did not send to this receiver."""
        if len(datagram) == _TIMES_BYTES:
            return self._read_times(datagram, receiver)
        if len(datagram) <= PIECE_AT:
            return None
        start = datagram[:_START_BYTES]
        if start == self._last[0]:  # checked with the piece before
            head = self._last[1]
        else:
            kind, version, *values = _HEAD.unpack_from(start)
            if kind != _PACKET or version != _VERSION:
                return None
            head = Head(*values)
            if head.receiver != receiver or not compare_digest(
                self._head_tag(start[: _HEAD.size]), start[_HEAD.size :]
            ):
                return None
            if not (0 < head.n_bytes <= MAX_PACKET_BYTES and head.piece_bytes >= MIN_PIECE_BYTES):
                return None
            self._last = start, head
        (index,) = _INDEX.unpack_from(datagram, _START_BYTES)
        left = head.n_bytes - index * head.piece_bytes
        if left <= 0 or len(datagram) - PIECE_AT != min(left, head.piece_bytes):
            return None
        return Piece(start, head, index, datagram[PIECE_AT:])

    def _read_times(self, datagram: bytes, receiver: int) -> Times | None:
        kind, version, *values = _TIMES.unpack_from(datagram)
        times = Times(kind == _PONG, *values)
        if kind not in (_PING, _PONG) or version != _VERSION or times.receiver != receiver:
            return None
        if not compare_digest(self._head_tag(datagram[: _TIMES.size]), datagram[_TIMES.size :]):
            return None
        return times

    def is_intact(self, head: Head, packet: bytes) -> bool:
        return compare_digest(self._packet_tag(packet), head.tag)


class Numbers:
    """Which datagrams of one sender have come."""

    def __init__(self) -> None:
        self._next = 0
        self._n_came = 0
        self._came = 0
        """Bit i: datagram ``_next - 1 - i`` has come."""

    @property
    def n_lost(self) -> int:
        """Datagrams before the newest one that have not come (yet)."""
        return self._next - self._n_came

    def skip_to(self, next_number: int) -> None:
        """All below ``next_number`` have been sent."""
        if next_number > self._next:
            ahead = next_number - self._next
            self._came = (self._came << ahead) & _WINDOW_MASK if ahead < WINDOW else 0
            self._next = next_number

    def take(self, number: int) -> bool:
        """Whether this one is new."""
        self.skip_to(number + 1)
        behind = self._next - 1 - number
        if behind >= WINDOW or self._came >> behind & 1:
            return False
        self._came |= 1 << behind
        self._n_came += 1
        return True


class _Incomplete:
    __slots__ = ("head", "n_missing", "pieces", "start")

    def __init__(self, piece: Piece) -> None:
        self.start, self.head = piece.start, piece.head
        self.n_missing = piece.head.n_pieces
        self.pieces = [b""] * self.n_missing


class Assembly:
    """Puts the packets of one sender together."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._numbers = Numbers()
        self._incomplete: dict[int, _Incomplete] = {}
        self.n_broken = 0
        """Packets that will not come, though a piece of them did."""
        self.n_refused = 0

    @property
    def n_lost(self) -> int:
        return self._numbers.n_lost

    @property
    def n_incomplete(self) -> int:
        return len(self._incomplete)

    def learn(self, times: Times) -> None:
        """Losses before ``times.next_number`` count now."""
        self._numbers.skip_to(times.next_number)

    def take(self, piece: Piece) -> bytes | None:
        """The packet, if this was its last piece."""
        head = piece.head
        if not self._numbers.take(head.number + piece.number):
            self.n_refused += 1
            return None
        if head.n_bytes <= head.piece_bytes:
            return self._checked(head, piece.data)
        incomplete = self._incomplete.get(head.number)
        if incomplete is None:
            if len(self._incomplete) >= MAX_INCOMPLETE:
                del self._incomplete[next(iter(self._incomplete))]
                self.n_broken += 1
            incomplete = self._incomplete[head.number] = _Incomplete(piece)
        elif incomplete.start != piece.start:
            self.n_refused += 1
            return None
        incomplete.pieces[piece.number] = piece.data
        incomplete.n_missing -= 1
        if incomplete.n_missing:
            return None
        del self._incomplete[head.number]
        return self._checked(head, b"".join(incomplete.pieces))

    def _checked(self, head: Head, packet: bytes) -> bytes | None:
        if self._seal.is_intact(head, packet):
            return packet
        self.n_broken += 1
        return None


def split(buffer: bytes | memoryview, datagram_bytes: int) -> Iterator[bytes]:
    """The datagrams that the kernel handed over as one (UDP_GRO)."""
    for at in range(0, len(buffer), datagram_bytes):
        yield bytes(buffer[at : at + datagram_bytes])

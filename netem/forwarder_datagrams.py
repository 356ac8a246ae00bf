"""The datagrams that forwarders on several machines exchange, and the reassembly of packets from them.

A packet is cut into pieces of the same size (the last one may be shorter). Each is sent as a datagram:

    head: kind, version, sender, receiver, number, source, target, instant of arrival, bytes, bytes of a piece,
          tag of the packet | tag of the head | number of the piece | piece

Both tags are BLAKE2b of 128 bits with the run's key: the head's over the head (which includes the packet's
tag), the packet's over all its bytes. So a head of another run is refused before anything is stored for it,
and only packets that arrived unchanged are returned. A single piece has no tag: who can read and send
datagrams on the underlay can spoil packets, but cannot forge any.

Datagrams are numbered from 0 per sender and receiver. A missing number was lost. One that comes twice, or is
older than the last ``WINDOW`` numbers, is refused. Questions and answers (``Times``) contain the next number,
so losses at the end are counted, too. They may be as long as pieces are, to find out whether such get there.

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
TIMES_BYTES = _TIMES.size + _TAG_BYTES
"""The size of a question or an answer that is not filled up."""
_INDEX = struct.Struct("<H")
PIECE_AT = _START_BYTES + _INDEX.size
"""The offset of the piece in its datagram, in bytes."""
MIN_PIECE_BYTES = 256
MAX_PACKET_BYTES = VNET_HEADER_BYTES + 65535
MAX_INCOMPLETE = 64
"""How many packets of one sender may wait for pieces; beyond it the oldest one is discarded."""
WINDOW = 1024
_WINDOW_MASK = (1 << WINDOW) - 1
_INDEXES = [_INDEX.pack(i) for i in range(-(-MAX_PACKET_BYTES // MIN_PIECE_BYTES))]
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, blake2b.MAX_KEY_SIZE


class Head(NamedTuple):
    """The head of a packet on its way.

    ``sender`` and ``receiver`` are numbers of machines, ``source`` and ``target`` numbers of nodes.
    """

    sender: int
    receiver: int
    number: int
    """The number of the packet's first datagram; the others have the numbers that follow."""
    source: int
    target: int
    at_s: float
    """The instant of arrival, on the sender's clock."""
    n_bytes: int
    piece_bytes: int
    tag: bytes

    @property
    def n_pieces(self) -> int:
        return -(-self.n_bytes // self.piece_bytes)


class Times(NamedTuple):
    """A question for the other machine's time, or the answer to one."""

    is_answer: bool
    sender: int
    receiver: int
    next_number: int
    """The number of the sender's next datagram to this receiver."""
    t0_s: float
    """When the question was sent, on the clock of the machine that asked."""
    t1_s: float = 0.0
    """In an answer: when the question arrived, on the clock of the machine that answers."""
    held_s: float = 0.0
    """In an answer: how long after ``t1_s`` it was sent."""


class Piece(NamedTuple):
    """One piece of a packet, as read from a datagram."""

    start: bytes
    """The encoded head and its tag: the same for all pieces of a packet."""
    head: Head
    number: int
    """The piece's number within its packet, from 0."""
    data: bytes


class Seal:
    """Encodes and decodes a run's datagrams, with its key of ``MIN_KEY_BYTES`` to ``MAX_KEY_BYTES``."""

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
        """Returns the packet's datagrams, each in two parts: the bytes before the piece, and the piece.

        ``number`` is that of the first datagram, ``pair`` the numbers of the sending and the receiving node.
        For the others see ``Head``.
        """
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

    def times(self, times: Times, n_bytes: int = 0) -> bytes:
        """Returns the datagram of a question or an answer, filled up with zeros to ``n_bytes`` if it has fewer."""
        is_answer, *values = times
        head = _TIMES.pack(_PONG if is_answer else _PING, _VERSION, *values).ljust(
            n_bytes - _TAG_BYTES, b"\0"
        )
        return head + self._head_tag(head)

    def read(self, datagram: bytes, receiver: int) -> Piece | Times | None:
        """Decodes a datagram; returns ``None`` if it is malformed, of another run, or for another receiver."""
        if len(datagram) >= TIMES_BYTES and datagram[0] in (_PING, _PONG):
            return self._read_times(datagram, receiver)
        if len(datagram) <= PIECE_AT:
            return None
        start = datagram[:_START_BYTES]
        if start == self._last[0]:  # the same head as the previous piece's, which was checked
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
        if version != _VERSION or times.receiver != receiver:
            return None
        if not compare_digest(self._head_tag(datagram[:-_TAG_BYTES]), datagram[-_TAG_BYTES:]):
            return None
        return times

    def is_intact(self, head: Head, packet: bytes) -> bool:
        """Whether the packet is unchanged since it was sent with this head."""
        return compare_digest(self._packet_tag(packet), head.tag)


class Numbers:
    """Records which datagrams of one sender have arrived."""

    def __init__(self) -> None:
        self._next = 0
        self._n_came = 0
        self._came = 0
        """Bit i is set if datagram ``_next - 1 - i`` has arrived."""

    @property
    def n_lost(self) -> int:
        """The number of datagrams that are known to have been sent and have not arrived (yet)."""
        return self._next - self._n_came

    def skip_to(self, next_number: int) -> None:
        """Notes that all datagrams below ``next_number`` have been sent."""
        if next_number > self._next:
            ahead = next_number - self._next
            self._came = (self._came << ahead) & _WINDOW_MASK if ahead < WINDOW else 0
            self._next = next_number

    def take(self, number: int) -> bool:
        """Records a datagram's number. Returns False if it has arrived before or is too old to know."""
        self.skip_to(number + 1)
        behind = self._next - 1 - number
        if behind >= WINDOW or self._came >> behind & 1:
            return False
        self._came |= 1 << behind
        self._n_came += 1
        return True


class _Incomplete:
    """A packet of which some pieces are missing."""

    __slots__ = ("head", "n_missing", "pieces", "start")

    def __init__(self, piece: Piece) -> None:
        self.start, self.head = piece.start, piece.head
        self.n_missing = piece.head.n_pieces
        self.pieces = [b""] * self.n_missing


class Assembly:
    """Reassembles the packets of one sender from their pieces."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._numbers = Numbers()
        self._incomplete: dict[int, _Incomplete] = {}
        self.n_broken = 0
        """Packets that were discarded though at least one of their pieces arrived."""
        self.n_refused = 0
        """Pieces that arrived twice, were too old, or contradict earlier pieces of their packet."""

    @property
    def n_lost(self) -> int:
        return self._numbers.n_lost

    @property
    def n_incomplete(self) -> int:
        return len(self._incomplete)

    def learn(self, times: Times) -> None:
        """Counts datagrams below ``times.next_number`` that have not arrived as lost."""
        self._numbers.skip_to(times.next_number)

    def take(self, piece: Piece) -> bytes | None:
        """Adds a piece. Returns its packet if that is now complete and unchanged, else ``None``."""
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
    """Yields the datagrams that the kernel merged into one buffer (UDP_GRO), each of ``datagram_bytes``."""
    for at in range(0, len(buffer), datagram_bytes):
        yield bytes(buffer[at : at + datagram_bytes])

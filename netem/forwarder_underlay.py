"""A forwarder's end of the underlay: one UDP socket, the other machines and their clocks."""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping
from statistics import median
from typing import NamedTuple

from netem.forwarder_datagrams import (
    MAX_KEY_BYTES,
    MIN_KEY_BYTES,
    MIN_PIECE_BYTES,
    PIECE_AT,
    TIMES_BYTES,
    Assembly,
    Head,
    Piece,
    Seal,
    Times,
    split,
)
from netem.forwarder_stats import MachineStats
from netem.hostclock import MAX_SAMPLES, HostClock
from netem.spec import Endpoint, NetworkError

_IP_MTU = 14
_SOL_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104
_SO_RCVBUFFORCE, _SO_SNDBUFFORCE, _SO_TIMESTAMPNS = 33, 32, 35
_NANOSECONDS = struct.Struct("qq")
_READING_S = 5e-6
"""Two clock readings that took longer do not count as simultaneous: the largest error of ``_came_at``."""
_BUFFER_BYTES = 32 * 1024**2
_UDP_HEADER_BYTES = 28
"""IPv4 (20) and UDP (8)."""
_READ_BYTES = 65536
_GSO_SEGMENTS = 64
_GSO_BYTES = 65_000
"""The kernel sends at most this many datagrams, with this many bytes in total, in one call."""
_GSO_REFUSED = (errno.EINVAL, errno.EIO, errno.EOPNOTSUPP, errno.EMSGSIZE, errno.ENOPROTOOPT)
_READS_PER_TURN = 16
_OPTION_BYTES = 128
SETTLED_SAMPLES = 40
"""A clock's uncertainty counts only after this many samples, the last of them of datagrams as long as pieces are."""
_FAST_PING_S, _PING_S = 0.02, 0.25
_OPEN_QUESTIONS = 64


def bind_socket(address: str, port: int) -> socket.socket:
    """Returns a UDP socket bound there, with buffers as large as allowed. Raises ``NetworkError``."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        raise NetworkError(
            f"the forwarder cannot use {address} port {port}: {error.strerror}; name an IPv4 address of this machine"
        ) from error
    for forced, plain in ((_SO_RCVBUFFORCE, socket.SO_RCVBUF), (_SO_SNDBUFFORCE, socket.SO_SNDBUF)):
        try:
            sock.setsockopt(socket.SOL_SOCKET, forced, _BUFFER_BYTES)
        except PermissionError:  # rootless: the kernel limits it to net.core.rmem_max or wmem_max
            sock.setsockopt(socket.SOL_SOCKET, plain, _BUFFER_BYTES)
    return sock


def piece_bytes_to(probe: socket.socket, endpoint: Endpoint) -> int:
    """Returns how many bytes of a packet fit into one datagram to ``endpoint``.

    ``probe`` is a UDP socket in the machine's own network that nothing else uses. Raises ``NetworkError`` if
    the kernel has no route to ``endpoint``.
    """
    try:
        probe.connect(endpoint)
        mtu = probe.getsockopt(socket.IPPROTO_IP, _IP_MTU)
    except OSError as error:
        raise NetworkError(f"cannot reach the forwarder at {endpoint[0]}: {error.strerror}") from error
    return max(MIN_PIECE_BYTES, min(mtu, 65535) - _UDP_HEADER_BYTES - PIECE_AT)


class Arrived(NamedTuple):
    """A packet from another machine. ``due_s``: when it has to be delivered, on this machine's clock."""

    head: Head
    due_s: float
    packet: bytes


class _Machine:
    """Another machine: its endpoint, its clock, and what has arrived from it."""

    def __init__(self, endpoint: Endpoint, piece_bytes: int, seal: Seal) -> None:
        self.endpoint = endpoint
        self.piece_bytes = piece_bytes
        self.next_number = 0
        self.clock = HostClock()
        self.passes_long = False
        """Whether a question as long as a piece was answered as such. Something on the way may drop what is long."""
        self.assembly = Assembly(seal)
        self.stats = MachineStats()
        self.open_questions: dict[float, None] = {}
        """The instants at which still unanswered questions were sent, in order."""
        self.ping_at_s = 0.0
        self.rtts_s: deque[float] = deque(maxlen=MAX_SAMPLES)
        """The RTTs of recent answers, the forwarders' own processing included."""


class Underlay:
    """This machine's end of the underlay.

    ``me`` is its number, ``others`` maps the other machines' numbers to their endpoints, and ``piece_bytes``
    maps them to the results of ``piece_bytes_to``. Raises ``NetworkError`` for a key of a wrong length.
    """

    def __init__(
        self,
        sock: socket.socket,
        me: int,
        others: Mapping[int, Endpoint],
        piece_bytes: Mapping[int, int],
        key: bytes,
    ) -> None:
        if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise NetworkError(
                f"a run's key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, this one {len(key)}"
            )
        self._socket = sock
        self._me = me
        self._seal = Seal(key)
        self._machines = {
            number: _Machine(endpoint, piece_bytes[number], self._seal) for number, endpoint in others.items()
        }
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._sends_batches = True
        try:
            sock.setsockopt(_SOL_UDP, _UDP_GRO, 1)
        except OSError:  # Linux before 5.0 handles one datagram per call only
            self._sends_batches = False
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.n_refused = 0
        """Datagrams that are malformed or not of this run; the machines' ``Assembly`` counts further ones."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, machine: int, pair: tuple[int, int], at_s: float, packet: bytes) -> bool:
        """Sends a packet to ``machine``. Returns False if the kernel did not accept all of it.

        ``pair``: the numbers of the sending and the receiving node. ``at_s``: when the packet has to arrive,
        on this machine's clock.
        """
        other = self._machines[machine]
        parts = self._seal.cut(self._me, machine, other.next_number, pair, at_s, packet, other.piece_bytes)
        other.next_number += len(parts)
        if len(parts) == 1:
            return self._send(parts[0], other.endpoint)
        if self._sends_batches:
            size = PIECE_AT + other.piece_bytes
            per_call = max(1, min(_GSO_SEGMENTS, _GSO_BYTES // size))
            option = [(_SOL_UDP, _UDP_SEGMENT, struct.pack("H", size))]
            for first in range(0, len(parts), per_call):
                batch = [part for pair_ in parts[first : first + per_call] for part in pair_]
                try:
                    self._socket.sendmsg(batch, option, 0, other.endpoint)
                except OSError as error:
                    if error.errno not in _GSO_REFUSED:
                        return False
                    self._sends_batches = False
                    parts = parts[first:]
                    break
            else:
                return True
        return all(self._send(part, other.endpoint) for part in parts)

    def _send(self, parts: tuple[bytes, ...], endpoint: Endpoint) -> bool:
        try:
            self._socket.sendmsg(parts, (), 0, endpoint)
        except OSError:  # no room in the socket, or no route: the packet is lost
            return False
        return True

    def receive(self) -> Iterator[Arrived]:
        """Reads at most ``_READS_PER_TURN`` times; yields packets that are complete, and answers questions."""
        for _ in range(_READS_PER_TURN):
            try:
                n_bytes, options, _, _ = self._socket.recvmsg_into((self._buffer,), _OPTION_BYTES)
            except BlockingIOError:
                return
            except OSError:  # an error that an earlier datagram caused on its way
                continue
            if not n_bytes:
                self.n_refused += 1
                continue
            size, stamp = n_bytes, b""
            for level, kind, data in options:
                if (level, kind) == (_SOL_UDP, _UDP_GRO):
                    size = struct.unpack_from("i", data)[0] or n_bytes
                elif (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                    stamp = data
            for datagram in split(self._view[:n_bytes], size):
                arrived = self._take(datagram, stamp)
                if arrived is not None:
                    yield arrived

    def _take(self, datagram: bytes, stamp: bytes) -> Arrived | None:
        read = self._seal.read(datagram, self._me)
        sender = (read.head.sender if isinstance(read, Piece) else read.sender) if read is not None else -1
        other = self._machines.get(sender)
        if read is None or other is None:
            self.n_refused += 1
            return None
        if isinstance(read, Times):
            self._take_times(read, other, stamp, len(datagram))
            return None
        packet = other.assembly.take(read)
        if packet is None:
            return None
        now = time.monotonic()
        due_s = other.clock.to_local(read.head.at_s) if other.clock.n_samples else now
        stats = other.stats
        stats.packets += 1
        stats.heard_at_s = now
        if due_s < now:
            stats.late += 1
            stats.late_max_s = max(stats.late_max_s, now - due_s)
        return Arrived(read.head, due_s, packet)

    def _take_times(self, times: Times, other: _Machine, stamp: bytes, n_bytes: int) -> None:
        came_s = _came_at(stamp)
        other.stats.heard_at_s = came_s
        other.assembly.learn(times)
        if not times.is_answer:
            held_s = time.monotonic() - came_s
            answer = Times(True, self._me, times.sender, other.next_number, times.t0_s, came_s, held_s)
            self._send((self._seal.times(answer, n_bytes),), other.endpoint)
        elif times.t0_s in other.open_questions:
            del other.open_questions[times.t0_s]
            other.passes_long |= n_bytes > TIMES_BYTES
            other.rtts_s.append(time.monotonic() - times.t0_s)
            # Subtract the time that the answer was held: as if it had been sent at once.
            received_s = max(times.t0_s, came_s - times.held_s)
            other.clock.add(times.t0_s - _READING_S, times.t1_s, received_s + _READING_S)
            if other.clock.n_samples >= SETTLED_SAMPLES:
                other.stats.uncertainty_max_s = max(other.stats.uncertainty_max_s, other.clock.uncertainty_s)

    def ask(self) -> float:
        """Asks machines for their time, each at its interval. Returns the seconds until the next call."""
        now = time.monotonic()
        wait_s = _PING_S
        for number, other in self._machines.items():
            if now >= other.ping_at_s:
                while len(other.open_questions) >= _OPEN_QUESTIONS:
                    del other.open_questions[next(iter(other.open_questions))]
                t0_s = time.monotonic()
                other.open_questions[t0_s] = None
                question = Times(False, self._me, number, other.next_number, t0_s)
                is_long = not other.passes_long and other.clock.n_samples >= SETTLED_SAMPLES - 1
                n_bytes = PIECE_AT + other.piece_bytes if is_long else 0
                self._send((self._seal.times(question, n_bytes),), other.endpoint)
                is_settled = other.clock.n_samples >= SETTLED_SAMPLES
                other.ping_at_s = now + (_PING_S if is_settled else _FAST_PING_S)
            wait_s = min(wait_s, other.ping_at_s - now)
        return wait_s

    def broke(self, machine: int) -> None:
        """Counts a packet of that machine that arrived too late to be delivered in order."""
        self._machines[machine].assembly.n_broken += 1

    def report(self) -> Iterator[tuple[int, MachineStats]]:
        """Yields every other machine's number and updated statistics."""
        for number, other in self._machines.items():
            stats, clock, assembly = other.stats, other.clock, other.assembly
            most = clock.n_samples if other.passes_long else SETTLED_SAMPLES - 1
            stats.n_samples, stats.n_forgotten = min(clock.n_samples, most), clock.n_forgotten
            stats.lost, stats.broken = assembly.n_lost, assembly.n_broken
            if clock.n_samples:
                stats.rtt_s, stats.rtt_min_s = median(other.rtts_s), clock.rtt_min_s
                stats.offset_s, stats.drift = clock.offset_s, clock.drift
                stats.uncertainty_s = clock.uncertainty_s
            yield number, stats

    @property
    def n_all_refused(self) -> int:
        """All datagrams that were refused: malformed, not of this run, or received twice."""
        return self.n_refused + sum(other.assembly.n_refused for other in self._machines.values())


def _came_at(stamp: bytes) -> float:
    """Returns when a datagram reached this machine, as ``time.monotonic``.

    It is derived from the kernel's ``stamp``, which is wall time. Without a usable stamp it is now.
    """
    before_s, wall_ns, now_s = time.monotonic(), time.time_ns(), time.monotonic()
    if len(stamp) < _NANOSECONDS.size or now_s - before_s > _READING_S:
        return now_s
    seconds, nanoseconds = _NANOSECONDS.unpack_from(stamp)
    age_s = (wall_ns - seconds * 1_000_000_000 - nanoseconds) / 1e9
    return before_s - age_s if 0 <= age_s < 1 else now_s  # otherwise the wall clock was set meanwhile

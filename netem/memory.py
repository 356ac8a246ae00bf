"""The ``memory`` network: streams between nodes in one process, over links modelled as in ``fabric``.

Only for virtual time. A stream behaves like a TCP connection whose links lose nothing. Its data are sent as
the congestion window allows, in bursts of segments, and arrive in order when their last byte has passed the
link. Every burst is acknowledged at once. TCP's timers are not modelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from netem.forwarder_links import Pipe, SharedLink, Transit
from netem.networks import NETWORKS
from netem.spec import NO_COURSE, NetworkError, NetworkSpec
from netem.tcp import COLD_FLIGHT_SEGMENTS, WARM_FLIGHT_BYTES
from policies.links import HEADER_BYTES, MIN_RETRANSMISSION_S, Link

_HANDSHAKE_BYTES = 8
"""TCP options of a SYN packet, beyond those of every packet."""
_BURST_BYTES = 65_160
"""The largest burst that TCP sends at once."""
_SEND_BUFFER_BYTES = 4 * 1024**2
_RECEIVE_WINDOW_BYTES = 12 * 1024**2
"""The kernel's receive window on a connection that has carried as much: 3/4 of the largest buffer
(``netem.tcp``), as measured on Linux 6.18; half of it before Linux 6.6."""
_HIGH_WATER_BYTES, _LOW_WATER_BYTES = 64 * 1024, 16 * 1024
"""Limits for data beyond the send buffer: writing pauses above the first, and resumes at the second. They are
asyncio's defaults."""
_FIRST_PORT = 40_000

Accept = Callable[[], asyncio.BaseProtocol]


class MemoryNetwork:
    """All links and streams of a run. Belongs to the event loop that runs when it is made."""

    network = NETWORKS["memory"]

    def __init__(self, spec: NetworkSpec) -> None:
        self._loop = asyncio.get_running_loop()
        self.mss = spec.mtu - HEADER_BYTES
        self.first_flight_bytes = WARM_FLIGHT_BYTES if spec.tcp.warm else COLD_FLIGHT_SEGMENTS * self.mss
        self.restarts_after_idle = spec.tcp.slow_start_after_idle
        self.addresses = {node: str(spec.subnet[1 + number]) for number, node in enumerate(spec.nodes)}
        shared = {name: SharedLink(rate_bps) for name, rate_bps in spec.shared.items()}
        self._pipes: dict[tuple[str, str], Pipe] = {}
        for (source, target), profile in spec.links.items():
            route = tuple(shared[name] for name in spec.paths.get((source, target), ()))
            course = spec.courses.get((source, target), NO_COURSE)
            pipe = Pipe(f"{source} to {target}", -1, profile, route=route, repairs=True, course=course)
            self._pipes[self.addresses[source], self.addresses[target]] = pipe
        self._listeners: dict[tuple[str, int], tuple[Accept, contextvars.Context]] = {}
        self._streams: dict[str, set[Stream]] = {address: set() for address in self.addresses.values()}
        self._last_port = _FIRST_PORT
        self._ended: list[tuple[Callable[[], object], contextvars.Context]] = []
        """Ends of connections that have arrived at this instant."""

    @classmethod
    def missing(cls) -> None:
        """Returns ``None``: it works everywhere."""

    def update(self, links: Mapping[tuple[str, str], Link]) -> None:
        """Changes links as ``netem.backend.Backend.update``; raises ``NetworkError`` for an unknown link."""
        for (source, target), profile in links.items():
            pipe = self._pipes.get((self.addresses[source], self.addresses[target]))
            if pipe is None:
                raise NetworkError(f"the network has no link from {source} to {target} that could change")
            pipe.change(profile, self._loop.time())
            pipe.release()

    def listen(self, address: str, port: int, accept: Accept) -> None:
        """Accepts connections to ``address`` and ``port``: each gets a new protocol from ``accept``.

        Its protocol runs in a copy of the context of this call.
        """
        self._listeners[address, port] = accept, contextvars.copy_context()

    def stop_listening(self, address: str, port: int, accept: Accept) -> None:
        """Undoes ``listen`` with this ``accept``; does nothing if another process listens there by now."""
        if self._listeners.get((address, port), (None, None))[0] is accept:
            del self._listeners[address, port]

    async def connect(self, source: str, target: str, port: int, make: Accept) -> asyncio.BaseProtocol:
        """Connects, and returns the protocol that ``make`` made, which is connected by then.

        ``source`` and ``target`` are addresses. Raises ``ConnectionRefusedError`` if nobody listens there.
        """
        up, down = self._pipes[source, target], self._pipes[target, source]
        await self._cross(up)
        listener = self._listeners.get((target, port))
        await self._cross(down)
        if listener is None or self._listeners.get((target, port)) is not listener:  # it stopped meanwhile
            raise ConnectionRefusedError(111, f"nobody listens at {target}:{port}")
        accept, context = listener
        self._last_port += 1
        here, there = (source, self._last_port), (target, port)
        ours, theirs = make(), context.copy().run(accept)
        near = Stream(self._loop, ours, contextvars.copy_context(), self, up, here, there)
        far = Stream(self._loop, theirs, context.copy(), self, down, there, here)
        near.peer, far.peer = far, near
        self._streams[source].add(near)
        self._streams[target].add(far)
        self.carry(up, 0, far.begin, context=far.context)
        near.begin()
        return ours

    async def _cross(self, pipe: Pipe) -> None:
        """Waits until one packet of a handshake has crossed the link."""
        arrived: asyncio.Future[None] = self._loop.create_future()
        self.carry(pipe, _HANDSHAKE_BYTES, _resolve, arrived)
        await arrived

    def n_streams(self, address: str) -> int:
        """Returns how many connections the node at ``address`` has open."""
        return len(self._streams[address])

    def forget(self, stream: Stream) -> None:
        """Removes a closed stream."""
        self._streams[stream.here[0]].discard(stream)

    def kill(self, address: str) -> None:
        """Ends the process at ``address``: none of its protocols is called again, and its connections end."""
        for key in [key for key in self._listeners if key[0] == address]:
            del self._listeners[key]
        for stream in sorted(self._streams[address], key=lambda stream: (stream.here, stream.there)):
            stream.die()
        self._streams[address].clear()

    def carry(
        self,
        pipe: Pipe,
        n_bytes: int,
        deliver: Callable[..., object],
        *args: object,
        context: contextvars.Context | None = None,
    ) -> None:
        """Sends ``n_bytes`` over the link; ``deliver(*args)`` is called when the last of them arrives."""
        if pipe.holds:
            pipe.held.append(lambda: self.carry(pipe, n_bytes, deliver, *args, context=context))
            return
        n_segments = -(-n_bytes // self.mss)
        size = n_bytes + max(n_segments, 1) * HEADER_BYTES
        segment_bytes = min(n_bytes, self.mss) + HEADER_BYTES
        entered = pipe.enter(self._loop.time(), size, n_segments, segment_bytes)
        assert entered is not None, "a pipe that repairs drops nothing"
        self._schedule(entered, deliver, args, context)

    def carry_end(self, pipe: Pipe, deliver: Callable[[], object], context: contextvars.Context) -> None:
        """Has ``deliver`` called when the end of a connection arrives.

        Ends that arrive at one instant are known together: the kernel has them all when it is asked.
        """
        self.carry(pipe, 0, self._arrive_end, deliver, context, context=_OUTSIDE)

    def _arrive_end(self, deliver: Callable[[], object], context: contextvars.Context) -> None:
        if not self._ended:  # others that are due now come before this timer
            self._loop.call_at(self._loop.time(), self._end_all, context=_OUTSIDE)
        self._ended.append((deliver, context))

    def _end_all(self) -> None:
        ended, self._ended = self._ended, []
        for deliver, context in ended:
            self._loop.call_soon(deliver, context=context)

    def _schedule(
        self,
        entered: tuple[float, Transit | None],
        deliver: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> None:
        at_s, transit = entered
        at_s = round(at_s, 9)  # virtual time is whole nanoseconds
        if transit is None:
            self._loop.call_at(at_s, deliver, *args, context=context)
        else:
            self._loop.call_at(at_s, self._onward, transit, deliver, args, context, context=_OUTSIDE)

    def _onward(
        self,
        transit: Transit,
        deliver: Callable[..., object],
        args: tuple[object, ...],
        context: contextvars.Context | None,
    ) -> None:
        entered = transit.enter(self._loop.time())
        assert entered is not None, "a pipe that repairs drops nothing"
        self._schedule(entered, deliver, args, context)


_OUTSIDE = contextvars.Context()
"""The context for the kernel's part, which goes on even if the node's process is stopped or gone."""


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Stream(asyncio.Transport):
    """One end of a connection: does the work of asyncio's transport and of the kernel's TCP.

    ``peer`` is the other end. This end's protocol is only called in ``context``.
    """

    peer: Stream

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.BaseProtocol,
        context: contextvars.Context,
        network: MemoryNetwork,
        pipe: Pipe,
        here: tuple[str, int],
        there: tuple[str, int],
    ) -> None:
        super().__init__({"sockname": here, "peername": there})
        self.here, self.there = here, there
        self.context = context
        self._loop = loop
        self._protocol: Any = protocol
        self._network = network
        self._pipe = pipe
        self._is_closing = self._is_lost = False
        """Nothing more may be written; the protocol has been notified that the connection is lost."""
        self._reads, self._held_bytes = True, 0
        self._held: deque[bytes | None] = deque()
        """Received data that the protocol has not read yet; ``None`` marks the end of the stream."""
        self._unsent: deque[bytes | None] = deque()
        self._unsent_bytes = 0
        self._acknowledged: deque[tuple[float, int]] = deque()
        """Acknowledgements: (when the sender receives it, how many bytes it acknowledges)."""
        self._flight_bytes, self._window_bytes = 0, network.first_flight_bytes
        self._peak_bytes = 0
        """The most bytes in flight since the last time that none were."""
        self._sent_at_s, self._pushes_at_s = 0.0, math.inf
        self._is_paused = False

    def begin(self) -> None:
        """Notifies the protocol that it is connected. Call it in ``context``, or in one of the same process."""
        if not self._is_lost:
            self._protocol.connection_made(self)

    # Called by the protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self._protocol
        return protocol

    def is_closing(self) -> bool:
        return self._is_closing

    def is_reading(self) -> bool:
        return self._reads and not self._is_closing

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        if self._reads:
            return
        self._reads = True
        if self._held:
            self._loop.call_soon(self._read_held, context=self.context)

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Does nothing: the limits are fixed."""

    def get_write_buffer_size(self) -> int:
        return max(0, self._unsent_bytes + self._flight_bytes - _SEND_BUFFER_BYTES) if self._unsent else 0

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        piece = bytes(data)
        n_bytes = len(piece)
        if not self._unsent and n_bytes <= _BURST_BYTES and n_bytes <= self._room_bytes():
            self._send(piece)
            return
        for begin in range(0, n_bytes, _BURST_BYTES):
            self._unsent.append(piece[begin : begin + _BURST_BYTES])
        self._unsent_bytes += n_bytes
        self._push()
        if self.get_write_buffer_size() > _HIGH_WATER_BYTES and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._unsent.append(None)
        self._push()
        self._loop.call_soon(self._lose, None, context=self.context)

    def abort(self) -> None:
        if self._is_lost:
            return
        self._is_closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        self._network.carry_end(self._pipe, self.peer.reset, self.peer.context)
        self._loop.call_soon(self._lose, None, context=self.context)

    # Called by the network

    def die(self) -> None:
        """Ends this side after its process died. Data already written are still sent."""
        if not self._is_closing:
            self._unsent.append(None)
            self._push()
        self._is_closing = self._is_lost = True

    def reset(self) -> None:
        """Handles a reset by the other end."""
        self._is_closing = True
        self._lose(ConnectionResetError(104, "connection reset by peer"))

    def receive(self, data: bytes | None) -> None:
        """Acknowledges arrived data and passes them to the protocol; ``None``: the other end has closed."""
        if data is not None:
            self._acknowledge(len(data))
        if self._is_lost or (self._is_closing and data is not None):
            return
        if not self._reads or self._held:
            self._held.append(data)
            self._held_bytes += len(data or b"")
        elif data is not None:
            self._protocol.data_received(data)
        else:
            self._end()

    def finish(self) -> None:
        """The other end's end arrives."""
        self.receive(None)

    def _read_held(self) -> None:
        while self._held and self._reads and not self._is_lost:
            data = self._held.popleft()
            if data is None:
                self._end()
                return
            self._held_bytes -= len(data)
            self._protocol.data_received(data)
        if not self._held_bytes and self.peer._unsent:
            self._network.carry(self._pipe, 0, self.peer._push, context=_OUTSIDE)

    def _end(self) -> None:
        if not self._protocol.eof_received():
            self.close()

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._network.forget(self)
        self._protocol.connection_lost(error)

    # The kernel's part

    def _room_bytes(self) -> int:
        """Processes acknowledgements that have arrived; returns how many bytes may be sent now."""
        now_s, acknowledged = self._loop.time(), self._acknowledged
        while acknowledged and acknowledged[0][0] <= now_s:
            n_bytes = acknowledged.popleft()[1]
            # Slow start as in Linux: the window grows only if more than half of it was used.
            if self._window_bytes < 2 * self._peak_bytes:
                self._window_bytes += n_bytes
            self._flight_bytes -= n_bytes
            if not self._flight_bytes:
                self._peak_bytes = 0
        # Linux restarts slow start after one retransmission timeout without traffic: a round trip and 0.2 s.
        timeout_s = self._pipe.delay_s + self.peer._pipe.delay_s + MIN_RETRANSMISSION_S
        is_idle = not self._flight_bytes and self._sent_at_s + timeout_s < now_s
        if is_idle and self._network.restarts_after_idle:
            self._window_bytes = min(self._window_bytes, self._network.first_flight_bytes)
        window_bytes = min(self._window_bytes, _RECEIVE_WINDOW_BYTES - self.peer._held_bytes)
        return window_bytes - self._flight_bytes

    def _send(self, piece: bytes) -> None:
        self._flight_bytes += len(piece)
        self._peak_bytes = max(self._peak_bytes, self._flight_bytes)
        self._sent_at_s = self._loop.time()
        self._network.carry(self._pipe, len(piece), self.peer.receive, piece, context=self.peer.context)

    def _acknowledge(self, n_bytes: int) -> None:
        """Acknowledges ``n_bytes`` more to the other end."""
        pipe = self._pipe
        if pipe.holds or pipe.route:
            self._network.carry(pipe, 0, self.peer.acknowledged_now, n_bytes, context=_OUTSIDE)
            return
        entered = pipe.enter(self._loop.time(), HEADER_BYTES, 0)
        assert entered is not None, "a pipe that repairs drops nothing"
        self.peer.acknowledged(n_bytes, entered[0])

    def acknowledged_now(self, n_bytes: int) -> None:
        self.acknowledged(n_bytes, self._loop.time())

    def acknowledged(self, n_bytes: int, at_s: float) -> None:
        """Notes that an acknowledgement of ``n_bytes`` more arrives here at ``at_s``."""
        self._acknowledged.append((at_s, n_bytes))
        if self._unsent:
            self._push_at(at_s)

    def _push_at(self, at_s: float) -> None:
        if at_s < self._pushes_at_s:
            self._pushes_at_s = at_s
            self._loop.call_at(at_s, self._push_again, context=_OUTSIDE)

    def _push_again(self) -> None:
        self._pushes_at_s = math.inf
        self._push()

    def _push(self) -> None:
        """Sends what the window allows. The rest is sent when acknowledgements arrive."""
        unsent, mss = self._unsent, self._network.mss
        while unsent:
            piece = unsent.popleft()
            if piece is None:
                self._network.carry_end(self._pipe, self.peer.finish, self.peer.context)
                continue
            room_bytes = self._room_bytes()
            if len(piece) > room_bytes:  # whole segments only
                fits = max(room_bytes // mss, 0) * mss
                unsent.appendleft(piece[fits:])
                piece = piece[:fits]
            if not piece:
                if self._acknowledged:
                    self._push_at(self._acknowledged[0][0])
                break
            self._unsent_bytes -= len(piece)
            self._send(piece)
        if self._is_paused and self.get_write_buffer_size() <= _LOW_WATER_BYTES:
            self._is_paused = False
            self._loop.call_soon(self._resume_writing, context=self.context)

    def _resume_writing(self) -> None:
        if not self._is_lost and not self._is_paused:
            self._protocol.resume_writing()

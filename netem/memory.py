"""The ``memory`` network: streams between nodes in one process, over links modelled as in ``fabric``.

Only for virtual time. A stream behaves like a TCP connection whose links lose nothing (``netem.flows``).
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from netem.flows import SYN_BYTES, Flow, Tcp, carry
from netem.forwarder_links import Pipe, SharedLink
from netem.networks import NETWORKS
from netem.spec import NO_COURSE, NetworkError, NetworkSpec, Windows, draws_name
from policies.links import Link

_FIRST_PORT = 40_000

Accept = Callable[[], asyncio.BaseProtocol]


_OUTSIDE = contextvars.Context()
"""The context for the kernel's part, which goes on even if the node's process is stopped or gone."""


class _Plans:
    """A ``netem.flows.Schedule``: plans calls in ``context``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: contextvars.Context) -> None:
        self._loop = loop
        self._context = context

    @property
    def now_s(self) -> float:
        return self._loop.time()

    def at(self, at_s: float, call: Callable[..., object], *args: Any) -> None:
        self._loop.call_at(round(at_s, 9), call, *args, context=self._context)


class MemoryNetwork:
    """All links and streams of a run. Belongs to the event loop that runs when it is made."""

    network = NETWORKS["memory"]

    def __init__(self, spec: NetworkSpec) -> None:
        self._loop = asyncio.get_running_loop()
        self.kernel = _Plans(self._loop, _OUTSIDE)
        self.tcp = Tcp.of(spec.tcp, spec.mtu)
        self.addresses = {node: str(spec.subnet[1 + number]) for number, node in enumerate(spec.nodes)}
        shared = {name: SharedLink(rate_bps) for name, rate_bps in spec.shared.items()}
        self._pipes: dict[tuple[str, str], Pipe] = {}
        for (source, target), profile in spec.links.items():
            route = tuple(shared[name] for name in spec.paths.get((source, target), ()))
            course = spec.courses.get((source, target), NO_COURSE)
            name = draws_name(spec.seed, (source, target))
            pipe = Pipe(name, -1, profile, route=route, repairs=True, course=course)
            self._pipes[self.addresses[source], self.addresses[target]] = pipe
        self._listeners: dict[tuple[str, int], tuple[Accept, contextvars.Context]] = {}
        self._streams: dict[str, set[Stream]] = {address: set() for address in self.addresses.values()}
        self._last_port = _FIRST_PORT
        self._windows: Mapping[tuple[str, str], tuple[int, int]] = {}
        """Congestion windows with which connections begin, by addresses (from, to): there, and back."""
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
        near = Stream(self._loop, ours, contextvars.copy_context(), self, here, there)
        far = Stream(self._loop, theirs, context.copy(), self, there, here)
        near.join(far, up, down)
        far.join(near, down, up)
        if (source, target) in self._windows:
            near.flow.window_bytes, far.flow.window_bytes = self._windows[source, target]
        self._streams[source].add(near)
        self._streams[target].add(far)
        carry(self.kernel, far.plans, up, self.tcp, 0, far.begin)
        near.begin()
        return ours

    async def _cross(self, pipe: Pipe) -> None:
        """Waits until one packet of a handshake has crossed the link."""
        arrived: asyncio.Future[None] = self._loop.create_future()
        carry(
            self.kernel,
            _Plans(self._loop, contextvars.copy_context()),
            pipe,
            self.tcp,
            SYN_BYTES,
            _resolve,
            arrived,
        )
        await arrived

    def begin_with(self, windows: Windows) -> None:
        """See ``netem.backend.Backend.begin_with``."""
        address = self.addresses
        self._windows = {(address[pair[0]], address[pair[1]]): sizes for pair, sizes in windows.items()}

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

    def carry_end(self, pipe: Pipe, deliver: Callable[[], object], context: contextvars.Context) -> None:
        """Has ``deliver`` called when the end of a connection arrives.

        Ends that arrive at one instant are known together: the kernel has them all when it is asked.
        """
        carry(self.kernel, self.kernel, pipe, self.tcp, 0, self._arrive_end, deliver, context)

    def _arrive_end(self, deliver: Callable[[], object], context: contextvars.Context) -> None:
        if not self._ended:  # others that are due now come before this timer
            self._loop.call_at(self._loop.time(), self._end_all, context=_OUTSIDE)
        self._ended.append((deliver, context))

    def _end_all(self) -> None:
        ended, self._ended = self._ended, []
        for deliver, context in ended:
            self._loop.call_soon(deliver, context=context)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Stream(asyncio.Transport):
    """One end of a connection: does the work of asyncio's transport, with a ``Flow`` for the kernel's part.

    ``peer`` is the other end. This end's protocol is only called in ``context``.
    """

    peer: Stream
    flow: Flow
    """What this end sends."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        protocol: asyncio.BaseProtocol,
        context: contextvars.Context,
        network: MemoryNetwork,
        here: tuple[str, int],
        there: tuple[str, int],
    ) -> None:
        super().__init__({"sockname": here, "peername": there})
        self.here, self.there = here, there
        self.context = context
        self.plans = _Plans(loop, context)
        self._loop = loop
        self._protocol: Any = protocol
        self._network = network
        self._is_closing = self._is_lost = False
        """Nothing more may be written; the protocol has been notified that the connection is lost."""
        self._reads = True
        self._held: deque[bytes | None] = deque()
        """Received data that the protocol has not read yet; ``None`` marks the end of the stream."""
        self._written: deque[memoryview] = deque()
        """What was written and has not arrived."""
        self._ends = False
        """Whether the end of the stream follows what was written."""
        self._is_paused = False

    def join(self, peer: Stream, pipe: Pipe, back: Pipe) -> None:
        """Connects this end with the other one, to which ``pipe`` leads, and ``back`` from there."""
        network = self._network
        self.peer, self._pipe = peer, pipe
        self.flow = Flow(network.kernel, peer.plans, pipe, back, network.tcp, peer.receive, self._sent)

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
        return self.flow.waiting_bytes

    def write(self, data: Any) -> None:
        if self._is_closing or not data:
            return
        piece = memoryview(bytes(data))
        self._written.append(piece)
        self.flow.put(len(piece))
        if self.flow.is_paused and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._finish_sending()
        self._loop.call_soon(self._lose, None, context=self.context)

    def abort(self) -> None:
        if self._is_lost:
            return
        self._is_closing = True
        self.flow.clear()
        self._ends = False
        self._network.carry_end(self._pipe, self.peer.reset, self.peer.context)
        self._loop.call_soon(self._lose, None, context=self.context)

    # Called by the network

    def die(self) -> None:
        """Ends this side after its process died. Data already written are still sent."""
        if not self._is_closing:
            self._finish_sending()
        self._is_closing = self._is_lost = True

    def reset(self) -> None:
        """Handles a reset by the other end."""
        self._is_closing = True
        self._lose(ConnectionResetError(104, "connection reset by peer"))

    def receive(self, n_bytes: int, _: None) -> None:
        """Passes data that the other end has sent and that have arrived to the protocol."""
        self._receive(self.peer.taken(n_bytes))

    def taken(self, n_bytes: int) -> bytes:
        """Returns the next ``n_bytes`` of what was written, which must be of one piece, and removes them."""
        piece = self._written.popleft()
        if len(piece) > n_bytes:
            self._written.appendleft(piece[n_bytes:])
        return bytes(piece[:n_bytes])

    def finish(self) -> None:
        """The other end's end arrives."""
        self._receive(None)

    def _receive(self, data: bytes | None) -> None:
        """Passes data to the protocol; ``None``: the other end has closed."""
        if self._is_lost or (self._is_closing and data is not None):
            return
        if not self._reads or self._held:
            self._held.append(data)
            self.peer.flow.held_bytes += len(data or b"")
        elif data is not None:
            self._protocol.data_received(data)
        else:
            self._end()

    def _read_held(self) -> None:
        sender = self.peer.flow
        while self._held and self._reads and not self._is_lost:
            data = self._held.popleft()
            if data is None:
                self._end()
                return
            sender.held_bytes -= len(data)
            self._protocol.data_received(data)
        if not sender.held_bytes and sender.unsent_bytes:
            network = self._network
            carry(network.kernel, network.kernel, self._pipe, network.tcp, 0, sender.push)

    def _end(self) -> None:
        if not self._protocol.eof_received():
            self.close()

    def _lose(self, error: Exception | None) -> None:
        if self._is_lost:
            return
        self._is_lost = True
        self._network.forget(self)
        self._protocol.connection_lost(error)

    def _finish_sending(self) -> None:
        """Sends the end of the stream behind all that was written."""
        self._ends = True
        self._sent()

    def _sent(self) -> None:
        """The window has let through some of what was written."""
        if self._ends and not self.flow.unsent_bytes and not self.flow.waiting_bytes:
            self._ends = False
            self._network.carry_end(self._pipe, self.peer.finish, self.peer.context)
        if self._is_paused and not self.flow.is_paused:
            self._is_paused = False
            self._loop.call_soon(self._resume_writing, context=self.context)

    def _resume_writing(self) -> None:
        if not self._is_lost and not self._is_paused:
            self._protocol.resume_writing()

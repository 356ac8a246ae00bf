"""The connections of a simulated run over the links of its scenario: messages wait for those before them.

The links and TCP are those of the network ``memory`` (``netem.flows``), and so are the connections: one of each client
with each server, and one of each server with each other one that it pushes to.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from netem.flows import BURST_BYTES, RECEIVE_WINDOW_BYTES, Flow, Tcp
from netem.forwarder_links import Pipe, SharedLink
from netem.spec import NO_COURSE
from nodes import framesizes, wire
from nodes.clock import on_tick
from nodes.framesizes import FrameSize
from nodes.outbox import Outbox
from policies.links import HEADER_BYTES, UNLIMITED_BPS, Link
from policies.problem import Hop
from policies.workload import longest_prompt
from testbed.experiments.courses import courses
from testbed.experiments.experiment import Experiment
from testbed.fast.events import EventQueue
from testbed.fast.lazy import LazyFlow, LazyPipe, MessageSize
from testbed.records.summary import LinkRow, LinkWait

_LONG_S = 1e6
"""Longer than a connection is warmed."""


_GOT_BYTES = framesizes.GOT.last_bytes + HEADER_BYTES
_ENDS = ("asks", "answers")
"""Whether the source of a line has opened the connection, or the target."""
_PART = object()
"""The item of a message that carries a part of a frame, not the last one."""


class _Waiting:
    """A frame that waits in an outbox (``nodes.outbox.Waiting``). ``item``: see ``Line``."""

    __slots__ = ("item", "kind", "n_parts", "size")

    def __init__(self, size: FrameSize, item: Any) -> None:
        self.kind = size.kind
        self.size = size
        self.n_parts = size.n_parts
        """Parts that have not been sent, but for the last."""
        self.item = item


class _Known(NamedTuple):
    """A frame on a line: its seconds on idle links, its bytes with headers, and its last message."""

    idle_s: float
    n_wire_bytes: int
    last: MessageSize


class Line(LazyFlow):
    """One direction of a connection. Frames go in the order of ``nodes.outbox``, as ``nodes.parts`` and aiohttp send them.

    ``is_confirmed``: the receiver confirms every part of a frame, as servers do. ``waits_s``: how much later than on
    idle links each frame arrived. ``n_line_bytes``: with all headers.
    """

    __slots__ = (
        "_is_confirmed", "_is_writing", "_known", "_link", "_outbox", "_queue", "_slower", "_written_bytes", "n_line_bytes", "pair",
        "waits_s",
    )  # fmt: skip

    def __init__(
        self,
        queue: EventQueue,
        pair: tuple[str, str],
        pipes: tuple[LazyPipe, LazyPipe],
        link: Link,
        tcp: Tcp,
        window_bytes: int,
        is_confirmed: bool,
    ) -> None:
        super().__init__(queue, *pipes, tcp, self._arrived, self._flow_sent)
        self.window_bytes = window_bytes
        self._queue = queue
        self._is_confirmed = is_confirmed and not any(pipe.route for pipe in pipes)
        self._link = link
        self._slower = max((shared.s_per_byte for shared in pipes[0].route), default=0.0)
        self._outbox: Outbox[Any] = Outbox()
        self._is_writing = False
        """Whether a message waits until the process may write on."""
        self._written_bytes = 0
        self._known: dict[FrameSize, _Known] = {}
        self.pair = pair
        self.waits_s = array("d")
        self.n_line_bytes = 0

    def send(self, size: FrameSize, call: Callable[..., None], *args: Any) -> None:
        """Sends a frame; ``call(*args)`` is called when its last byte has arrived."""
        at_s = self.pass_frame(size)
        if at_s is None:
            self.put_frame(size, call, *args)
        else:
            self._queue.on_tick(at_s, call, *args)

    def pass_frame(self, size: FrameSize) -> float | None:
        """Sends a frame that waits for nothing but its link; returns the instant of its arrival.

        ``None``: it must be ``put_frame``, and nothing was done.
        """
        if self._is_writing:
            return None
        known = self._known.get(size) or self._learn(size)
        at_s = self.pass_on(known.last)
        if at_s is not None:
            self.n_line_bytes += known.n_wire_bytes
            self.waits_s.append(at_s - (self._queue.now_s + known.idle_s))
            self._written_bytes += size.last_bytes
            if self._written_bytes > framesizes.WRITTEN_BYTES:
                self._written_bytes = 0
        return at_s

    def put_frame(self, size: FrameSize, call: Callable[..., None], *args: Any) -> None:
        """As ``send``, of a frame that may have to wait behind others."""
        known = self._known.get(size) or self._learn(size)
        self.n_line_bytes += known.n_wire_bytes
        item = self._queue.now_s + known.idle_s, call, args
        if self._is_writing:
            self._outbox.put(_Waiting(size, item))
        elif size.n_parts:
            self._outbox.put(_Waiting(size, item))
            self._write_on()
        else:
            self._write(size.last_bytes, item)

    def _write(self, n_bytes: int, item: Any) -> None:
        self.put(n_bytes, item)
        self._written_bytes += n_bytes
        if self._written_bytes > framesizes.WRITTEN_BYTES:
            self._written_bytes = 0
            self._is_writing = self.is_paused

    def _write_on(self) -> None:
        """Writes what waits, until the process should write no more."""
        while not self._is_writing and (frame := self._outbox.first()) is not None:
            if frame.n_parts:
                frame.n_parts -= 1
                self._write(frame.size.part_bytes, _PART)
            else:
                self._outbox.remove(frame)
                self._write(frame.size.last_bytes, frame.item)

    def _flow_sent(self) -> None:
        if self._is_writing and not self.is_paused:
            self._is_writing = False
            self._write_on()

    def late_s(self, size: FrameSize, at_s: float) -> float:
        """Returns how much later than on idle links a frame that is sent at ``at_s`` would arrive, in whole ns."""
        self._lazy_pipe.settle(self._queue.now_s)
        idle_s, wait_s = self.idle_s(size), max(0.0, self._pipe.free_at_s - at_s)
        return on_tick(idle_s + wait_s) - on_tick(idle_s)

    @property
    def acknowledgement_s(self) -> float:
        """The seconds that an acknowledgement takes to leave. What is sent at once after a message came waits for it."""
        return HEADER_BYTES * 8 / self._link.rate_bps

    @property
    def delay_s(self) -> float:
        """The link's propagation delay."""
        return self._link.delay_s

    def acknowledge(self) -> None:
        """Sends an acknowledgement, as for a message that has come on the connection without being simulated."""
        self._pipe.enter(self._queue.now_s, HEADER_BYTES, 0)

    def note(self, size: FrameSize, n_times: int) -> None:
        """Counts frames that have waited for nothing, without sending them."""
        self.n_line_bytes += n_times * (self._known.get(size) or self._learn(size)).n_wire_bytes
        self.waits_s.append(0.0)

    def change(self, link: Link) -> None:
        """Notes that its link is another one from now on."""
        self._link = link
        self._known.clear()

    def idle_s(self, size: FrameSize) -> float:
        """Returns the seconds that a frame takes on idle links, if the window lets all of it through at once."""
        return (self._known.get(size) or self._learn(size)).idle_s

    def _learn(self, size: FrameSize) -> _Known:
        s_per_byte = max(8 / self._link.rate_bps, self._slower)
        wire_bytes = self._tcp.wire_bytes
        n_bytes = wire_bytes(size.last_bytes) + (size.n_parts and size.n_parts * wire_bytes(size.part_bytes))
        pipe, back, tcp = self._lazy_pipe, self._lazy_back, self._tcp
        is_plain = pipe.is_plain and back.is_plain and not tcp.restarts_after_idle
        last = MessageSize(
            size.last_bytes,
            n_bytes,
            -(-size.last_bytes // tcp.mss) * tcp.mss,
            is_plain and not size.n_parts and size.last_bytes <= BURST_BYTES,
        )
        found = self._known[size] = _Known(self._link.delay_s + n_bytes * s_per_byte, n_bytes, last)
        return found

    def _arrived(self, n_bytes: int, item: Any) -> None:
        if item is _PART:
            if self._is_confirmed:  # at once, before all that waits in the process; nobody waits for it
                self._back.enter(self._queue.now_s, _GOT_BYTES)
        elif item is not None:
            due_at_s, call, args = item
            self.waits_s.append(self._queue.now_s - due_at_s)
            call(*args)


class Way(NamedTuple):
    """What carries the messages of hop number ``at`` of ``n_hops``: there, and from there to the client."""

    there: Line
    back: Line
    accepts: Line | None
    """On which a server answers a push, before it computes; ``None``: there are no pushes."""
    at: int
    n_hops: int
    forwarding: bool

    @property
    def returns(self) -> bool:
        """Whether the client gets the hop's result, not the next server."""
        return not self.forwarding or self.at + 1 == self.n_hops

    @property
    def answered_s(self) -> float:
        """For how long after a message the link to the client is busy with what the server answers at once."""
        if self.accepts is not self.back:
            return 0.0 if self.forwarding else self.back.acknowledgement_s
        wire_s = self.back.idle_s(framesizes.OK) - self.back.delay_s
        return self.back.acknowledgement_s + wire_s

    def size_there(self, n_payload: int) -> FrameSize:
        """Returns the size of a frame there with ``n_payload`` bytes of hidden states."""
        if self.forwarding:
            return framesizes.push(n_payload, self.at)
        return framesizes.step(n_payload)

    def size_back(self, n_payload: int) -> FrameSize:
        """Returns the size of a result with ``n_payload`` bytes of hidden states."""
        if self.forwarding:
            return framesizes.result(n_payload, self.n_hops)
        return framesizes.out(n_payload)


class Links:
    """All connections of a run, each from its first use on. Clients and servers are named by their numbers."""

    def __init__(self, queue: EventQueue, experiment: Experiment) -> None:
        self._queue = queue
        self._experiment = experiment
        network = experiment.network
        self._tcp = Tcp.of(network.tcp, network.mtu)
        self._shared = {name: SharedLink(rate_bps) for name, rate_bps in network.shared_bps.items()}
        self._pipes: dict[tuple[str, str], LazyPipe] = {}
        self._lines: dict[tuple[str, str, str], Line] = {}
        self._clients = experiment.problem.clients
        self._servers = [server.name for server in experiment.problem.servers]
        self._window_bytes = window_bytes(experiment, self._tcp)
        pairs = [pair for pair in network.links if experiment.uses(pair)] if network.changes else ()
        self._courses = courses(network.changes, pairs, 1.0)
        self._present: dict[tuple[str, str], Link] = {}
        """Links that have changed."""

    def change(self, links: Mapping[tuple[str, str], Link]) -> None:
        """Gives pairs other links from now on."""
        for pair, link in links.items():
            if pair not in self._courses:
                continue
            self._present[pair] = link
            if (pipe := self._pipes.get(pair)) is not None:
                pipe.change(link, self._queue.now_s)
                pipe.release()
            for end in _ENDS:
                if (line := self._lines.get((*pair, end))) is not None:
                    line.change(link)

    def up(self, client: int, server: int) -> Line:
        """Returns the line from a client to a server."""
        return self._line(self._clients[client], self._servers[server], "asks")

    def down(self, client: int, server: int) -> Line:
        """Returns the line from a server to a client."""
        return self._line(self._servers[server], self._clients[client], "answers")

    def ways(self, client: int, hops: Sequence[Hop]) -> list[Way]:
        """Returns the connections of a client's chain, hop by hop."""
        found, forwarding = [], self._experiment.problem.forwarding
        for at, hop in enumerate(hops):
            there, back = self.up(client, hop.server), self.down(client, hop.server)
            accepts = back if forwarding else None
            if forwarding and at:
                source, target = self._servers[hops[at - 1].server], self._servers[hop.server]
                there, accepts = self._line(source, target, "asks"), self._line(target, source, "answers")
            found.append(Way(there, back, accepts, at, len(hops), forwarding))
        return found

    def note(self, client: int, hops: Sequence[Hop], n_input: int, n_output: int) -> None:
        """Counts the steps of a request that has waited for nothing, without sending them."""
        token_bytes = self._experiment.problem.model.token_bytes
        for way in self.ways(client, hops):
            for n_bytes, n_times in ((n_input * token_bytes, 1), (token_bytes, n_output - 1)):
                way.there.note(way.size_there(n_bytes), n_times)
                if way.accepts is not None:
                    way.accepts.note(framesizes.OK, n_times)
                if way.returns:
                    way.back.note(way.size_back(n_bytes), n_times)

    def use(self, until_s: float) -> list[LinkRow]:
        """Returns the use of every link that has carried messages from 0 to ``until_s``, the busiest first."""
        network = self._experiment.network
        lines: dict[tuple[str, str], list[Line]] = {}
        for line in (line for line in self._lines.values() if line.waits_s):
            lines.setdefault(line.pair, []).append(line)
            for name in network.shared_paths.get(line.pair, ()):
                lines.setdefault((name, name), []).append(line)
        rows = []
        for (source, target), of_link in lines.items():
            is_shared = source in self._shared
            rate_bps = network.shared_bps[source] if is_shared else network.links[source, target].rate_bps
            busy_s = sum(line.n_line_bytes for line in of_link) * 8 / rate_bps
            waits_s = np.concatenate([line.waits_s for line in of_link])
            wait_s = LinkWait(mean=float(waits_s.mean()), p99=float(np.percentile(waits_s, 99)))
            if is_shared:
                source, _, target = source.partition(">")
            rows.append(LinkRow(from_=source, to=target, use_ratio=busy_s / until_s, wait_s=wait_s))
        return sorted(rows, key=lambda row: (-row.use_ratio, row.from_, row.to))

    def _line(self, source: str, target: str, end: str) -> Line:
        """``end``: see ``_ENDS``."""
        line = self._lines.get((source, target, end))
        if line is None:
            pipes = self._pipe(source, target), self._pipe(target, source)
            link = self._link((source, target))
            line = Line(
                self._queue, (source, target), pipes, link, self._tcp, self._window_bytes, end == "asks"
            )
            self._lines[source, target, end] = line
        return line

    def _pipe(self, source: str, target: str) -> LazyPipe:
        pipe = self._pipes.get((source, target))
        if pipe is None:
            network = self._experiment.network
            route = tuple(self._shared[name] for name in network.shared_paths.get((source, target), ()))
            course = self._courses.get((source, target), NO_COURSE)
            pipe = LazyPipe(f"{source} to {target}", network.links[source, target], route, course)
            if (present := self._present.get((source, target))) is not None:
                pipe.change(present, self._queue.now_s)
            self._pipes[source, target] = pipe
        return pipe

    def _link(self, pair: tuple[str, str]) -> Link:
        return self._present.get(pair) or self._experiment.network.links[pair]


def never_wait(experiment: Experiment) -> bool:
    """Returns whether links take their delay alone, as those of an instance file, or there are none."""
    return not experiment.network.changes and all(
        link.rate_bps >= UNLIMITED_BPS and not link.jitter_s and not link.loss_ratio
        for pair, link in experiment.network.links.items()
        if experiment.uses(pair)
    )


def longest_prompt_bytes(experiment: Experiment) -> int:
    """Returns the bytes of the longest prompt's hidden states."""
    return longest_prompt(experiment.workload.requests) * experiment.problem.model.token_bytes


def window_bytes(experiment: Experiment, tcp: Tcp) -> int:
    """Returns the congestion window of a connection at time zero: it has carried the longest prompt if it is warm."""
    if not experiment.network.tcp.warm:
        return tcp.first_flight_bytes
    return _warmed_bytes(tcp, longest_prompt_bytes(experiment))


@lru_cache(64)
def _warmed_bytes(tcp: Tcp, n_bytes: int) -> int:
    """Returns the congestion window of a connection that was warmed with ``n_bytes`` (``nodes.connection.warm``)."""
    queue = EventQueue()
    pipes = [Pipe("warm", -1, Link(0.01, 1e9), repairs=True) for _ in range(2)]
    flow = Flow(queue, queue, pipes[0], pipes[1], tcp, lambda n_bytes, item: None)
    left_bytes = min(n_bytes, 2 * RECEIVE_WINDOW_BYTES)
    while left_bytes > 0:
        flow.put(min(left_bytes, wire.PART_BYTES))
        left_bytes -= wire.PART_BYTES
    queue.at(_LONG_S, queue.stop)
    queue.run()
    flow.room_bytes()
    return flow.window_bytes

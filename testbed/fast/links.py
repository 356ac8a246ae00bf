"""The connections of a simulated run over the links of its scenario: messages wait for those before them.

The links and TCP are those of the network ``memory`` (``netem.flows``), and so are the connections: one of each client
with each server, and one of each server with each other one that it pushes to.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from netem.flows import BURST_BYTES, Tcp, carry
from netem.forwarder_links import SharedLink
from netem.spec import NO_COURSE
from nodes import framesizes
from nodes.clock import on_tick
from nodes.framesizes import FrameSize
from nodes.outbox import Outbox
from policies.links import HEADER_BYTES, UNLIMITED_BPS, Link
from policies.problem import Hop
from testbed.experiments.courses import courses
from testbed.experiments.experiment import Experiment
from testbed.fast.events import EventQueue
from testbed.fast.lazy import LazyFlow, LazyPipe, MessageSize
from testbed.fast.outcome import SimulatedRequest
from testbed.fast.warmed import first_window_bytes
from testbed.records.links import LinksUsed, LinkUse, ends_of

_ENDS = ("asks", "answers")
"""Whether the source of a line has opened the connection, or the target."""
_MOST_RECENT = 3000
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


class Heard:
    """When a client hears of a server, as long as it waits for an answer: the arrivals of messages, in any order."""

    __slots__ = ("_at_s", "n_waiting")

    def __init__(self) -> None:
        self.n_waiting = 0
        """Answers that the client waits for."""
        self._at_s: list[float] = []

    def message(self, at_s: float) -> None:
        """Notes the arrival of a message or of a part of one, which may be in the future."""
        self._at_s.append(at_s)

    def answered(self, asked_at_s: float, now_s: float) -> float:
        """Notes that an answer has come; returns for how long at most nothing came since it was asked for, in seconds."""
        last_s, longest_s = asked_at_s, 0.0
        for at_s in sorted(self._at_s):
            if asked_at_s < at_s <= now_s:
                longest_s, last_s = max(longest_s, at_s - last_s), at_s
        self.n_waiting -= 1
        if not self.n_waiting:
            self._at_s.clear()
        return max(longest_s, now_s - last_s)


class Line(LazyFlow):
    """One direction of a connection. Frames go in the order of ``nodes.outbox``, as ``nodes.parts`` and aiohttp send them.

    ``confirms``: the line on which the receiver confirms every part of a frame, as servers do; ``None``: it does not. ``heard``:
    what the receiver, a client, has heard of the server; ``None`` for other receivers.
    """

    __slots__ = (
        "_confirms", "_end", "_hears", "_is_writing", "_known", "_link", "_noted", "_outbox", "_passed", "_queue", "_rates", "_recent", "_slower", "_written_bytes",
    )  # fmt: skip

    def __init__(
        self,
        queue: EventQueue,
        pipes: tuple[LazyPipe, LazyPipe],
        link: Link,
        tcp: Tcp,
        window_bytes: int,
        confirms: Line | None,
        heard: Heard | None,
    ) -> None:
        super().__init__(queue, *pipes, tcp, self._arrived, self._flow_sent)
        self.window_bytes = window_bytes
        self._queue = queue
        self._confirms = confirms
        self._hears = heard
        self._end: tuple[Callable[..., None], tuple[Any, ...]] | None = None
        """What is called when the end of the connection arrives, while that waits for what was written."""
        self._link = link
        self._slower = max((shared.s_per_byte for shared in pipes[0].route), default=0.0)
        self._outbox: Outbox[Any] = Outbox()
        self._is_writing = False
        """Whether a message waits until the process may write on."""
        self._written_bytes = 0
        self._known: dict[FrameSize, _Known] = {}
        self._passed = array("d")
        """Of each frame with hidden states its bytes with headers, when it was due, and when it arrived."""
        self._recent: list[float] = []
        """The same of the last ones. A list grows in less time than an array, which takes less memory."""
        self._noted = array("d")
        """Of frames that waited for nothing their bytes, their number, and from when until when they went."""
        self._rates = [(0, 8 / link.rate_bps)]
        """Seconds per byte of the line's own link, each with the length of ``_passed`` from which on it counts."""

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
        idle_s, n_wire_bytes, last = known
        at_s = self.pass_on(last)
        if at_s is not None:
            if self._hears is not None and self._hears.n_waiting:
                self._hears.message(at_s)
            if size.kind:
                self._recent += n_wire_bytes, self._queue.now_s + idle_s, at_s
                if len(self._recent) > _MOST_RECENT:
                    self._keep()
            self._written_bytes += last.n_bytes
            if self._written_bytes > framesizes.WRITTEN_BYTES:
                self._written_bytes = 0
        return at_s

    def put_frame(self, size: FrameSize, call: Callable[..., None], *args: Any) -> None:
        """As ``send``, of a frame that may have to wait behind others."""
        known = self._known.get(size) or self._learn(size)
        item = self._queue.now_s + known.idle_s, known.n_wire_bytes if size.kind else 0, call, args
        if self._is_writing:
            self._outbox.put(_Waiting(size, item))
        elif size.n_parts:
            self._outbox.put(_Waiting(size, item))
            self._write_on()
        else:
            self._write(size.last_bytes, size.last_head_bytes, item)

    def _write(self, n_bytes: int, head_bytes: int, item: Any) -> None:
        if head_bytes:
            self.put(head_bytes)
        self.put(n_bytes - head_bytes, item)
        self._written_bytes += n_bytes
        if self._written_bytes > framesizes.WRITTEN_BYTES:
            self._written_bytes = 0
            self._is_writing = self.is_paused

    def _write_on(self) -> None:
        """Writes what waits, until the process should write no more."""
        while not self._is_writing and (frame := self._outbox.first()) is not None:
            if frame.n_parts:
                frame.n_parts -= 1
                self._write(frame.size.part_bytes, frame.size.part_head_bytes, _PART)
            else:
                self._outbox.remove(frame)
                self._write(frame.size.last_bytes, frame.size.last_head_bytes, frame.item)

    def _flow_sent(self) -> None:
        if self._is_writing and not self.is_paused:
            self._is_writing = False
            self._write_on()

        if self._end is not None and not self.unsent_bytes and not self.waiting_bytes:
            (call, args), self._end = self._end, None
            self.packet(0, call, *args)

    def finish(self, call: Callable[..., None], *args: Any) -> None:
        """Sends the end of the connection behind all that was written; what waits in the process is lost with it."""
        self._outbox.clear()
        self._end = call, args
        self._flow_sent()

    def unread(self) -> None:
        """Nobody reads any more what arrives."""
        self._confirms = None

    def packet(self, n_bytes: int, call: Callable[..., None], *args: Any) -> None:
        """Sends a packet that is no part of the stream; ``call(*args)`` is called when it has arrived."""
        carry(self._queue, self._queue, self._pipe, self._tcp, n_bytes, call, *args)

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

    def note(self, size: FrameSize, n_times: int, since_s: float, until_s: float) -> None:
        """Counts frames that have waited for nothing, without sending them."""
        n_wire_bytes = n_times * (self._known.get(size) or self._learn(size)).n_wire_bytes
        self._noted.extend((n_wire_bytes, n_times, since_s, until_s))

    def count(self, own: LinkUse, shared: Sequence[tuple[LinkUse, float]]) -> None:
        """Adds what the line has carried to the use of its link and of shared ones, on which a byte takes so many seconds."""
        self._keep()
        if self._passed:
            n_wire_bytes, due_at_s, arrived_at_s = np.array(self._passed).reshape(-1, 3).T
            own_s_per_byte = np.empty(len(n_wire_bytes))
            for since, s_per_byte in self._rates:
                own_s_per_byte[since // 3 :] = s_per_byte
            left_at_s, waits_s = arrived_at_s - self._link.delay_s, arrived_at_s - due_at_s
            own.add(left_at_s, n_wire_bytes * own_s_per_byte, waits_s)
            for use, s_per_byte in shared:
                use.add(left_at_s, n_wire_bytes * s_per_byte, waits_s)
        rest = iter(self._noted)
        for n_bytes, n_times, since_s, until_s in zip(rest, rest, rest, rest, strict=True):
            for use, s_per_byte in ((own, self._rates[-1][1]), *shared):
                use.spread(since_s, until_s, n_bytes * s_per_byte, int(n_times))

    def change(self, link: Link) -> None:
        """Notes that its link is another one from now on."""
        self._keep()
        self._link = link
        self._rates.append((len(self._passed), 8 / link.rate_bps))
        self._known.clear()

    def _keep(self) -> None:
        self._passed.fromlist(self._recent)
        self._recent.clear()

    def idle_s(self, size: FrameSize) -> float:
        """Returns the seconds that a frame takes on idle links, if the window lets all of it through at once."""
        return (self._known.get(size) or self._learn(size)).idle_s

    def _learn(self, size: FrameSize) -> _Known:
        s_per_byte = max(8 / self._link.rate_bps, self._slower)
        n_bytes = bytes_on_wire(self._tcp, size)
        pipe, back, tcp = self._lazy_pipe, self._lazy_back, self._tcp
        is_plain = pipe.is_plain and back.is_plain and not tcp.restarts_after_idle
        head_bytes, rest_bytes = size.last_head_bytes, size.last_bytes - size.last_head_bytes
        n_segments = -(-head_bytes // tcp.mss) - (-rest_bytes // tcp.mss)
        last = MessageSize(
            size.last_bytes,
            n_bytes,
            n_segments * tcp.mss,
            is_plain and not size.n_parts and rest_bytes <= BURST_BYTES,
            head_bytes,
            tcp.wire_bytes(head_bytes) if head_bytes else 0,
        )
        found = self._known[size] = _Known(self._link.delay_s + n_bytes * s_per_byte, n_bytes, last)
        return found

    def _arrived(self, n_bytes: int, item: Any) -> None:
        if self._hears is not None and self._hears.n_waiting and item is not None:
            self._hears.message(self._queue.now_s)
        if item is _PART:
            confirms = self._confirms
            if confirms is not None and confirms.pass_frame(framesizes.GOT) is None:
                confirms.put_frame(framesizes.GOT, _nothing)
        elif item is not None:
            due_at_s, n_wire_bytes, call, args = item
            if n_wire_bytes:
                self._recent += n_wire_bytes, due_at_s, self._queue.now_s
                if len(self._recent) > _MOST_RECENT:
                    self._keep()
            call(*args)


class Way(NamedTuple):
    """What carries the messages of a hop: there, and from there to the client."""

    there: Line
    back: Line
    accepts: Line | None
    """On which a server answers a push, before it computes; ``None``: there are no pushes."""
    size_there: Callable[[int], FrameSize]
    """The size of a frame there, by its bytes of hidden states."""
    size_back: Callable[[int], FrameSize]
    """The size of a result to the client."""
    returns: bool
    """Whether the client gets the hop's result, not the next server."""
    forwarding: bool

    @property
    def answered_s(self) -> float:
        """For how long after a message the link to the client is busy with what the server answers at once."""
        if self.accepts is not self.back:
            return 0.0 if self.forwarding else self.back.acknowledgement_s
        wire_s = self.back.idle_s(framesizes.OK) - self.back.delay_s
        return self.back.acknowledgement_s + wire_s


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
        self._heard: defaultdict[tuple[str, str], Heard] = defaultdict(Heard)
        """By client and server."""
        self._lost_lines: list[tuple[str, str, Line]] = []
        """Those of connections that were lost and made again: (source, target, line)."""
        self._servers = [server.name for server in experiment.problem.servers]
        self._clients = frozenset(experiment.problem.clients)
        self._sources = [*experiment.problem.clients, *self._servers]
        self._window_bytes = first_window_bytes(experiment)
        changing = network.links.items() if network.changes else ()
        used = {pair: link for pair, link in changing if experiment.uses(pair)}
        self._courses = courses(network.changes, used, 1.0)
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

    def up(self, source: int, server: int) -> Line:
        """Returns the line from a source to a server: a client, or a server as in ``testbed.fast.sending``."""
        return self._line(self._sources[source], self._servers[server], "asks")

    def down(self, source: int, server: int) -> Line:
        """Returns the line from a server back to a source."""
        return self._line(self._servers[server], self._sources[source], "answers")

    def heard(self, client: int, server: int) -> Heard:
        """Returns what a client hears of a server."""
        return self._heard[self._sources[client], self._servers[server]]

    def reconnect(self, source: int, server: int) -> None:
        """Lets a source have a new connection with a server, in place of one that is lost."""
        name, other = self._sources[source], self._servers[server]
        ends = (name, other, "asks"), (other, name, "answers")
        for begin, end, which in ends:
            if (lost := self._lines.pop((begin, end, which), None)) is not None:
                self._lost_lines.append((begin, end, lost))
        for of in ends:
            self._line(*of).window_bytes = self._tcp.first_flight_bytes

    def ways(self, client: int, hops: Sequence[Hop]) -> list[Way]:
        """Returns the connections of a client's chain, hop by hop."""
        found, forwarding, n_hops = [], self._experiment.problem.forwarding, len(hops)
        for at, hop in enumerate(hops):
            there, back = self.up(client, hop.server), self.down(client, hop.server)
            accepts = back if forwarding else None
            if forwarding and at:
                source, target = self._servers[hops[at - 1].server], self._servers[hop.server]
                there, accepts = self._line(source, target, "asks"), self._line(target, source, "answers")
            size_there = framesizes.there(at, forwarding=forwarding)
            size_back = framesizes.back(n_hops, forwarding=forwarding)
            returns = not forwarding or at + 1 == n_hops
            found.append(Way(there, back, accepts, size_there, size_back, returns, forwarding))
        return found

    def note(self, request: SimulatedRequest) -> None:
        """Counts the steps of a request that has waited for nothing, without sending them."""
        plan, route = request.plan, request.route
        if route is None or request.time_s is None or request.ttft_s is None:
            return
        token_bytes = self._experiment.problem.model.token_bytes
        first_at_s, ended_at_s = plan.arrival_at_s + request.ttft_s, plan.arrival_at_s + request.time_s
        began_at_s = plan.arrival_at_s + request.waiting_s + (request.setup_s or 0.0)
        for way in self.ways(plan.client, route.hops):
            for n_tokens, n_times, since_s, until_s in (
                (plan.n_input_tokens, 1, began_at_s, first_at_s),
                (1, plan.n_output_tokens - 1, first_at_s, ended_at_s),
            ):
                if n_times:
                    n_bytes = n_tokens * token_bytes
                    way.there.note(way.size_there(n_bytes), n_times, since_s, until_s)
                    if way.returns:
                        way.back.note(way.size_back(n_bytes), n_times, since_s, until_s)

    def use(self, until_s: float) -> LinksUsed:
        """Returns the use of every link that has carried hidden states from 0 to ``until_s``."""
        network = self._experiment.network
        uses: dict[tuple[str, str], LinkUse] = {}
        shared: dict[str, LinkUse] = {}
        lines = [(source, target, line) for (source, target, _), line in self._lines.items()]
        for source, target, line in lines + self._lost_lines:
            pair = source, target
            names = network.shared_paths.get(pair, ())
            on = [(shared.setdefault(name, LinkUse()), 8 / network.shared_bps[name]) for name in names]
            line.count(uses.setdefault(pair, LinkUse()), on)
        found = [(*pair, use) for pair, use in uses.items()]
        return LinksUsed([*found, *((*ends_of(name), use) for name, use in shared.items())], until_s)

    def _line(self, source: str, target: str, end: str) -> Line:
        """``end``: see ``_ENDS``."""
        line = self._lines.get((source, target, end))
        if line is None:
            pipes = self._pipe(source, target), self._pipe(target, source)
            confirms = heard = None
            if end == "asks":
                confirms = self._line(target, source, "answers")
            elif target in self._clients:
                heard = self._heard[target, source]
            link = self._link((source, target))
            line = Line(self._queue, pipes, link, self._tcp, self._window_bytes, confirms, heard)
            self._lines[source, target, end] = line
        return line

    def _pipe(self, source: str, target: str) -> LazyPipe:
        pipe = self._pipes.get((source, target))
        if pipe is None:
            network = self._experiment.network
            route = tuple(self._shared[name] for name in network.shared_paths.get((source, target), ()))
            course = self._courses.get((source, target), NO_COURSE)
            pipe = LazyPipe(f"{source} to {target}", network.links[source, target], route, course)
            pipe.place(self._queue.now_s)
            if (present := self._present.get((source, target))) is not None:
                pipe.change(present, self._queue.now_s)
            self._pipes[source, target] = pipe
        return pipe

    def _link(self, pair: tuple[str, str]) -> Link:
        return self._present.get(pair) or self._experiment.network.links[pair]


def _nothing() -> None:
    """Nobody waits for a confirmation."""


def bytes_on_wire(tcp: Tcp, size: FrameSize) -> int:
    """Returns the bytes of a frame with all headers. Each of its messages has segments of its own."""
    n_bytes = _on_wire(tcp, size.last_bytes, size.last_head_bytes)
    if not size.n_parts:
        return n_bytes
    return n_bytes + size.n_parts * _on_wire(tcp, size.part_bytes, size.part_head_bytes)


def _on_wire(tcp: Tcp, n_bytes: int, head_bytes: int) -> int:
    rest_bytes = tcp.wire_bytes(n_bytes - head_bytes)
    return tcp.wire_bytes(head_bytes) + rest_bytes if head_bytes else rest_bytes


def never_wait(experiment: Experiment) -> bool:
    """Returns whether links take their delay alone, as those of an instance file, or there are none."""
    return not experiment.network.changes and all(
        link.rate_bps >= UNLIMITED_BPS and not link.jitter_s and not link.loss_ratio
        for pair, link in experiment.network.links.items()
        if experiment.uses(pair)
    )

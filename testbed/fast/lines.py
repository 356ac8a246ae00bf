"""Lines: the directions of simulated connections. Frames wait in the sender's outbox, then for TCP's window and the link."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from netem.flows import BURST_BYTES, Tcp, carry
from nodes import framesizes
from nodes.clock import on_tick
from nodes.framesizes import FrameSize
from nodes.outbox import Outbox
from policies.links import HEADER_BYTES, Link
from testbed.fast.events import EventQueue
from testbed.fast.lazy import LazyFlow, LazyPipe, MessageSize
from testbed.fast.overtime import LinkOverTime
from testbed.records.links import LinkUse

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


class LineState(NamedTuple):
    """What a line has from the messages before: TCP's window, and the bytes since the process last looked whether it may write on.

    A window of ``slow_start_bytes`` or more does not grow by slow start.
    """

    window_bytes: int
    written_bytes: int = 0
    slow_start_bytes: float = math.inf


class Heard:
    """When a client hears of a server, as long as it waits for an answer: the arrivals of messages, in any order.

    ``always``: as long as the run lasts.
    """

    __slots__ = ("_at_s", "n_waiting")

    def __init__(self, *, always: bool = False) -> None:
        self.n_waiting = int(always)
        """Answers that the client waits for, and one more if it always hears."""
        self._at_s: list[float] = []
        """Ascending."""

    def message(self, at_s: float) -> None:
        """Notes the arrival of a message or of a part of one, which may be in the future."""
        insort(self._at_s, at_s)

    def silence_s(self, asked_at_s: float, now_s: float) -> float:
        """Returns for how many seconds at most nothing came since an answer was asked for."""
        first, end = bisect_right(self._at_s, asked_at_s), bisect_right(self._at_s, now_s)
        return max(b - a for a, b in pairwise((asked_at_s, *self._at_s[first:end], now_s)))

    def answered(self, asked_at_s: float, now_s: float) -> float:
        """Notes that an answer to an opening has come, and returns ``silence_s``."""
        silence_s = self.silence_s(asked_at_s, now_s)
        self.n_waiting -= 1
        if not self.n_waiting:
            self._at_s.clear()
        return silence_s


class Line(LazyFlow):
    """One direction of a connection. Frames go in the order of ``nodes.outbox``, as ``nodes.parts`` and aiohttp send them.

    ``confirms``: the line on which the receiver confirms every part of a frame, as servers do; ``None``: it does not. ``heard``:
    what the receiver, a client, has heard of the server; ``None`` for other receivers.
    """

    __slots__ = (
        "_confirms", "_end", "_hears", "_is_writing", "_known", "_link", "_links", "_noted", "_outbox", "_passed", "_recent", "_slower", "_written_bytes",
    )  # fmt: skip

    def __init__(
        self,
        queue: EventQueue,
        pipes: tuple[LazyPipe, LazyPipe],
        link: Link,
        tcp: Tcp,
        confirms: Line | None,
        heard: Heard | None,
    ) -> None:
        super().__init__(queue, *pipes, tcp, self._arrived, self._flow_sent)
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
        """Of each frame with hidden states its bytes with headers, when it was sent, and when it arrived."""
        self._recent: list[float] = []
        """The same of the last ones. A list grows in less time than an array, which takes less memory."""
        self._noted = array("d")
        """Of frames that waited for nothing their bytes, their number, and from when until when they went."""
        self._links = [(0.0, link)]
        """The line's own link, and from when on it is that."""

    def begin(self, state: LineState) -> None:
        """Begins as a line that nothing uses and that has this state."""
        self.window_bytes, self._written_bytes, self._slow_start_bytes = state

    @property
    def state(self) -> LineState:
        """Its state, if all that was sent is acknowledged."""
        self._lazy_back.settle()
        self.room_bytes()
        return LineState(self.window_bytes, self._written_bytes, self._slow_start_bytes)

    def send(self, size: FrameSize, call: Callable[..., None], *args: Any) -> None:
        """Sends a frame; ``call(*args)`` is called when its last byte has arrived."""
        at_s = self.pass_frame(size)
        if at_s is None:
            self.put_frame(size, call, *args)
        else:
            self._queue.on_tick(at_s, call, *args)

    def tell(self, size: FrameSize) -> None:
        """Sends a frame whose arrival changes nothing."""
        if self.pass_frame(size) is None:
            self.put_frame(size, _nothing)

    def pass_frame(self, size: FrameSize) -> float | None:
        """Sends a frame that waits for nothing but its link; returns the instant of its arrival.

        ``None``: it must be ``put_frame``, and nothing was done.
        """
        if self._is_writing:
            return None
        known = self._known.get(size) or self._learn(size)
        _, n_wire_bytes, last = known
        at_s = self.pass_on(last)
        if at_s is not None:
            if self._hears is not None and self._hears.n_waiting:
                self._hears.message(at_s)
            if size.kind:
                self._recent += n_wire_bytes, self._queue.now_s, at_s
                if len(self._recent) > _MOST_RECENT:
                    self._keep()
            self._written_bytes += last.n_bytes
            if self._written_bytes > framesizes.WRITTEN_BYTES:
                self._written_bytes = 0
        return at_s

    def put_frame(self, size: FrameSize, call: Callable[..., None], *args: Any) -> None:
        """As ``send``, of a frame that may have to wait behind others."""
        known = self._known.get(size) or self._learn(size)
        item = self._queue.now_s, known.n_wire_bytes if size.kind else 0, call, args
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
        self._lazy_pipe.settle()
        idle_s, wait_s = self.idle_s(size), max(0.0, self._pipe.free_at_s - at_s)
        return on_tick(idle_s + wait_s) - on_tick(idle_s)

    @property
    def acknowledgement_s(self) -> float:
        """The seconds that an acknowledgement takes to leave. What is sent at once after a message came waits for it."""
        return HEADER_BYTES * 8 / self._link.rate_bps

    def answering_s(self, size: FrameSize, back: Line) -> float:
        """Returns for how long ``back`` is busy with what is sent at once when a frame has come over this line, if both were idle:
        acknowledgements of all that it was sent in, and what confirms its parts.
        """
        now_s = free_at_s = 0.0
        confirms_s = 0.0 if self._confirms is None else back.idle_s(framesizes.GOT) - back.delay_s
        part = size.part_bytes, size.part_head_bytes, confirms_s
        for n_bytes, head_bytes, then_s in (
            *(part,) * size.n_parts,
            (size.last_bytes, size.last_head_bytes, 0.0),
        ):
            for n_together in (head_bytes, n_bytes - head_bytes):
                if n_together:
                    now_s += self._tcp.wire_bytes(n_together) * 8 / self._link.rate_bps
                    free_at_s = max(free_at_s, now_s) + back.acknowledgement_s
            free_at_s += then_s
        return free_at_s - now_s

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
            n_wire_bytes, sent_at_s, arrived_at_s = np.array(self._passed).reshape(-1, 3).T
            if len(self._links) == 1:
                link = self._link
                idle_s = link.delay_s + n_wire_bytes * max(8 / link.rate_bps, self._slower)
                left_at_s, waits_s = arrived_at_s - link.delay_s, arrived_at_s - (sent_at_s + idle_s)
                busy_s = n_wire_bytes * (8 / link.rate_bps)
            else:
                over_time = LinkOverTime(
                    self._links[0][1], self._links[1:], 8 / self._slower if self._slower else math.inf
                )
                n = np.arange(len(sent_at_s))
                on_link = over_time.passed(n, sent_at_s, arrived_at_s, 8 * n_wire_bytes)
                left_at_s, busy_s, waits_s = on_link.left_at_s, on_link.busy_s, on_link.wait_s
            own.add(left_at_s, busy_s, waits_s)
            for use, s_per_byte in shared:
                use.add(left_at_s, n_wire_bytes * s_per_byte, waits_s)
        rest = iter(self._noted)
        for n_bytes, n_times, since_s, until_s in zip(rest, rest, rest, rest, strict=True):
            for use, s_per_byte in ((own, 8 / self._link.rate_bps), *shared):
                use.spread(since_s, until_s, n_bytes * s_per_byte, int(n_times))

    def change(self, link: Link) -> None:
        """Notes that its link is another one from now on."""
        self._link = link
        self._links.append((self._queue.now_s, link))
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
        is_steady = pipe.is_steady and back.is_steady and not tcp.restarts_after_idle
        head_bytes, rest_bytes = size.last_head_bytes, size.last_bytes - size.last_head_bytes
        n_segments = -(-head_bytes // tcp.mss) - (-rest_bytes // tcp.mss)
        last = MessageSize(
            size.last_bytes,
            n_bytes,
            n_segments * tcp.mss,
            is_steady and not size.n_parts and rest_bytes <= BURST_BYTES,
            head_bytes,
            tcp.wire_bytes(head_bytes) if head_bytes else 0,
        )
        found = self._known[size] = _Known(self._link.delay_s + n_bytes * s_per_byte, n_bytes, last)
        return found

    def _arrived(self, n_bytes: int, item: Any) -> None:
        if self._hears is not None and self._hears.n_waiting and item is not None:
            self._hears.message(self._queue.now_s)
        if item is _PART:
            if self._confirms is not None:
                self._confirms.tell(framesizes.GOT)
        elif item is not None:
            sent_at_s, n_wire_bytes, call, args = item
            if n_wire_bytes:
                self._recent += n_wire_bytes, sent_at_s, self._queue.now_s
                if len(self._recent) > _MOST_RECENT:
                    self._keep()
            call(*args)


def _nothing() -> None:
    """Nobody waits for it."""


def bytes_on_wire(tcp: Tcp, size: FrameSize) -> int:
    """Returns the bytes of a frame with all headers. Each of its messages has segments of its own."""
    n_bytes = _on_wire(tcp, size.last_bytes, size.last_head_bytes)
    if not size.n_parts:
        return n_bytes
    return n_bytes + size.n_parts * _on_wire(tcp, size.part_bytes, size.part_head_bytes)


def _on_wire(tcp: Tcp, n_bytes: int, head_bytes: int) -> int:
    rest_bytes = tcp.wire_bytes(n_bytes - head_bytes)
    return tcp.wire_bytes(head_bytes) + rest_bytes if head_bytes else rest_bytes

"""Links and TCP with fewer events: an acknowledgement that nobody waits for enters its link when something else does.

They give the same instants as ``netem.flows.Flow`` and ``netem.forwarder_links.Pipe``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from netem.flows import Deliver, Flow, Tcp
from netem.forwarder_links import Pipe, SharedLink, Transit
from netem.spec import NO_COURSE, Course
from netem.tcp import RECEIVE_WINDOW_BYTES
from nodes.clock import NS
from policies.links import HEADER_BYTES, Link
from testbed.fast.events import EventQueue


class LazyPipe(Pipe):
    """A link that never drops. ``promised`` are acknowledgements to come, in order: (instant, number, flow, bytes).

    The numbers are those of the events of ``queue``: of what happens at one instant, the acknowledgement enters in its turn.
    """

    __slots__ = ("_queue", "is_steady", "promised")

    def __init__(
        self,
        queue: EventQueue,
        name: str,
        profile: Link,
        route: tuple[SharedLink, ...] = (),
        course: Course = NO_COURSE,
    ) -> None:
        self._queue = queue
        super().__init__(name, -1, profile, route=route, repairs=True, course=course)
        self.is_steady = not (route or course[0] or profile.jitter_s or profile.loss_ratio)
        """Whether a packet's time follows from the rate and the delay alone, for the whole run."""
        self.promised: deque[tuple[float, int, LazyFlow, int]] = deque()
        """Those of messages that have passed one steady link, and so are in order."""

    def enter(
        self, now_s: float, size: int, n_segments: int = 1, segment_bytes: int = 0
    ) -> tuple[float, Transit | None] | None:
        """See ``Pipe.enter``."""
        if self.promised and self.promised[0][0] <= now_s:
            self.settle()
        return super().enter(now_s, size, n_segments, segment_bytes)

    def take(self, now_s: float, size: int) -> float:
        """See ``Pipe.take``."""
        if self.promised and self.promised[0][0] <= now_s:
            self.settle()
        return Pipe.take(self, now_s, size)  # in less time than with ``super()``

    def settle(self) -> None:
        """Lets the acknowledgements enter that were to do so until now."""
        promised, free_at_s = self.promised, self.free_at_s
        wire_s, delay_s = HEADER_BYTES * self.s_per_byte, self.delay_s
        now = self._queue.now_s, self._queue.number
        while promised and promised[0] < now:
            at_s, _, flow, n_bytes = promised.popleft()
            if at_s > free_at_s:
                free_at_s = at_s
            free_at_s += wire_s
            flow.acknowledged.append((free_at_s + delay_s, n_bytes))
        self.free_at_s = free_at_s


class MessageSize(NamedTuple):
    """A message's bytes, those with headers, and those if all its segments were full.

    ``is_one_burst``: it can be passed on. TCP's pauses, after which a window restarts, do not count then. The first
    ``head_bytes`` have a segment of their own, which takes ``head_wire_bytes``; 0: it is all one burst.
    """

    n_bytes: int
    n_wire_bytes: int
    full_bytes: int
    is_one_burst: bool
    head_bytes: int
    head_wire_bytes: int


class LazyFlow(Flow):
    """``netem.flows.Flow`` over lazy pipes."""

    __slots__ = ("_lazy_back", "_lazy_pipe", "_queue")

    def __init__(
        self,
        queue: EventQueue,
        pipe: LazyPipe,
        back: LazyPipe,
        tcp: Tcp,
        deliver: Deliver,
        sent: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(queue, queue, pipe, back, tcp, deliver, sent)
        self._queue = queue
        self._lazy_pipe, self._lazy_back = pipe, back

    def pass_on(self, size: MessageSize) -> float | None:
        """Sends a message that waits for nothing but its link; returns when it arrives, in whole ns.

        ``None``: it must be ``put``. The receiver must read it at once; ``deliver`` is not called.
        """
        n_bytes, n_wire_bytes, full_bytes, is_one_burst, head_bytes, head_wire_bytes = size
        if self.unsent_bytes or not is_one_burst:
            return None
        pipe, back, now_s = self._lazy_pipe, self._lazy_back, self._kernel.now_s
        flight_bytes, window_bytes = self._flight_full_bytes + full_bytes, self.window_bytes
        if (
            2 * flight_bytes > window_bytes
            or 2 * self._peak_bytes > window_bytes
            or flight_bytes > RECEIVE_WINDOW_BYTES
        ):  # else the window neither limits nor grows, and which acknowledgements have come does not matter
            back.settle()
            if (n_bytes + self._tcp.mss if head_bytes else n_bytes) > self.room_bytes():
                return None
            if 2 * full_bytes > self.window_bytes:  # it is more than a burst may be
                return None
            flight_bytes = self._flight_full_bytes + full_bytes
        self.flight_bytes += n_bytes
        self._flight_full_bytes = flight_bytes
        if flight_bytes > self._peak_bytes:
            self._peak_bytes = flight_bytes
        promised = pipe.promised
        if promised and promised[0][0] <= now_s:
            pipe.settle()
        start_s = pipe.free_at_s
        if start_s < now_s:
            start_s = now_s
        s_per_byte, delay_s = pipe.s_per_byte, pipe.delay_s
        if head_bytes:
            at_s = round((start_s + head_wire_bytes * s_per_byte + delay_s) * NS) / NS
            back.promised.append((at_s, self._queue.next_number(), self, head_bytes))
            n_bytes -= head_bytes
        pipe.free_at_s = free_at_s = start_s + n_wire_bytes * s_per_byte
        at_s = round((free_at_s + delay_s) * NS) / NS
        back.promised.append((at_s, self._queue.next_number(), self, n_bytes))
        return at_s

    def put(self, n_bytes: int, item: Any = None) -> None:
        """See ``Flow.put``. What is put may wait for acknowledgements, so that these get events."""
        if self._lazy_back.promised:
            self._plan_promised()
        super().put(n_bytes, item)

    def _plan_promised(self) -> None:
        back = self._lazy_back
        back.settle()
        mine = [promise for promise in back.promised if promise[2] is self]
        back.promised = deque(promise for promise in back.promised if promise[2] is not self)
        for at_s, number, _, n_bytes in mine:
            self._queue.in_turn(at_s, number, self._arrive, n_bytes, None)

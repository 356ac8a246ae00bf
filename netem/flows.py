"""What asyncio and a kernel's TCP do with the bytes that one end of a connection sends: ``Flow``. Pure: no clock, no files.

The network ``memory`` carries bytes with it, the simulator's engine ``fast`` only their sizes. Data are sent as the
congestion window allows, in bursts of segments, and arrive in order when their last byte has passed the link. Every burst is
acknowledged at once. What a link loses arrives later (``policies.links.repair_s``), and the window is halved as by Reno.

The kernel takes data until ``UNSENT_BYTES`` of them wait for the window (``TCP_NOTSENT_LOWAT``), and again when less
than half of that does. The rest waits in the process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from netem.forwarder_links import Pipe, Transit
from netem.spec import TcpSpec
from netem.tcp import COLD_FLIGHT_SEGMENTS, RECEIVE_WINDOW_BYTES, WARM_FLIGHT_BYTES
from policies.links import HEADER_BYTES, MIN_RETRANSMISSION_S, UNSENT_BYTES

BURST_BYTES = 65_160
"""The largest burst that TCP sends at once."""
HIGH_WATER_BYTES, LOW_WATER_BYTES = 64 * 1024, 16 * 1024
"""A process stops writing while more of its data wait than the first, until no more than the second do. They are
asyncio's defaults."""
SYN_BYTES = 8
"""TCP options of a packet that connects, beyond those of every packet."""
_TSO_WIN_DIVISOR = 3
"""While data are in flight, less than this part of a burst and of the window waits for more room (``tcp_tso_win_divisor``):
else every acknowledgement would let a few segments go, each with an acknowledgement of its own."""
_LEAST_SEGMENTS = 2
"""A window is not halved below them."""
_NS = 1e9

Deliver = Callable[[int, Any], None]
"""Called with a burst's bytes when it has arrived, and with the item of the piece that ends with it, else ``None``."""


class Schedule(Protocol):
    """Has functions called at the whole nanosecond nearest to an instant, those of one in the order of planning."""

    @property
    def now_s(self) -> float: ...

    def at(self, at_s: float, call: Callable[..., object], *args: Any) -> object: ...


class Tcp(NamedTuple):
    """TCP's parameters on every connection. ``mss``: a segment's largest payload, in bytes."""

    mss: int
    first_flight_bytes: int
    restarts_after_idle: bool

    @classmethod
    def of(cls, tcp: TcpSpec, mtu: int) -> Tcp:
        """Returns the parameters by a network's description."""
        mss = mtu - HEADER_BYTES
        first_flight_bytes = WARM_FLIGHT_BYTES if tcp.warm else COLD_FLIGHT_SEGMENTS * mss
        return cls(mss, first_flight_bytes, tcp.slow_start_after_idle)

    def wire_bytes(self, n_bytes: int) -> int:
        """Returns the bytes on the wire of ``n_bytes`` in as few segments as possible; 0 bytes are a bare header."""
        return n_bytes + max(-(-n_bytes // self.mss), 1) * HEADER_BYTES


def carry(
    kernel: Schedule,
    receiver: Schedule,
    pipe: Pipe,
    tcp: Tcp,
    n_bytes: int,
    call: Callable[..., object],
    *args: Any,
) -> None:
    """Sends ``n_bytes`` over the link, or over it and those that its pair shares with others.

    ``call(*args)`` is planned with ``receiver`` for when the last of them arrives. ``kernel`` plans what happens on
    the way. On a cut link they wait until it is up again.
    """
    if pipe.cut:
        pipe.held.append(lambda: carry(kernel, receiver, pipe, tcp, n_bytes, call, *args))
        return
    _go_on(kernel, receiver, _enter(pipe, tcp.mss, n_bytes, kernel.now_s), call, args)


def _enter(pipe: Pipe, mss: int, n_bytes: int, now_s: float) -> tuple[float, Transit | None]:
    """Puts ``n_bytes`` on a link that is up; returns as ``Pipe.enter`` does."""
    n_segments = -(-n_bytes // mss)
    size = n_bytes + (n_segments or 1) * HEADER_BYTES
    segment_bytes = (mss if n_bytes > mss else n_bytes) + HEADER_BYTES
    return _kept(pipe.enter(now_s, size, n_segments, segment_bytes))


def _kept(entered: tuple[float, Transit | None] | None) -> tuple[float, Transit | None]:
    assert entered is not None, "a pipe that repairs drops nothing"
    return entered


def _go_on(
    kernel: Schedule,
    receiver: Schedule,
    entered: tuple[float, Transit | None],
    call: Callable[..., object],
    args: tuple[Any, ...],
) -> None:
    """Plans what follows on having entered a link: the arrival, or entering the next one."""
    at_s, transit = entered
    if transit is None:
        receiver.at(at_s, call, *args)
    else:
        kernel.at(at_s, _enter_next, kernel, receiver, transit, call, args)


def _enter_next(
    kernel: Schedule, receiver: Schedule, transit: Transit, call: Callable[..., object], args: tuple[Any, ...]
) -> None:
    _go_on(kernel, receiver, _kept(transit.enter(kernel.now_s)), call, args)


class Flow:
    """The bytes from one end of a connection to the other, with their acknowledgements.

    They go over ``pipe``, and the acknowledgements over ``back``. ``receiver`` plans their arrival, ``kernel`` all else.
    ``deliver``: see ``Deliver``. ``sent()`` is called when the window has let through some of what waited.

    ``waiting_bytes`` wait in the process, and ``is_paused`` says whether it should write no more. ``unsent_bytes``
    wait for the window, ``flight_bytes`` were sent and are not yet known to have arrived. The owner sets
    ``held_bytes`` to those that have arrived and not been read: the receive window is smaller by them.
    ``window_bytes`` is the congestion window. As in Linux it counts segments, each as if it were full.
    """

    __slots__ = (
        "_back", "_deliver", "_flight_full_bytes", "_halved_at_s", "_is_limited", "_kernel", "_losses", "_more_bytes", "_peak_bytes", "_pipe", "_pushes_at_s",
        "_receiver", "_sent", "_sent_at_s", "_sent_bytes", "_slow_start_bytes", "_tcp", "_unsent", "_waiting", "acknowledged", "flight_bytes", "held_bytes", "is_paused", "unsent_bytes",
        "waiting_bytes", "window_bytes",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Schedule,
        receiver: Schedule,
        pipe: Pipe,
        back: Pipe,
        tcp: Tcp,
        deliver: Deliver,
        sent: Callable[[], None] | None = None,
    ) -> None:
        self._kernel, self._receiver = kernel, receiver
        self._pipe, self._back = pipe, back
        self._tcp = tcp
        self._deliver = deliver
        self._sent = sent
        self._waiting: deque[tuple[int, Any]] = deque()
        """Pieces (bytes, item)."""
        self._unsent: deque[tuple[int, Any]] = deque()
        """Pieces of at most one burst."""
        self.acknowledged: deque[tuple[float, int]] = deque()
        """Acknowledgements: (when the sender receives it, how many bytes it acknowledges)."""
        self.waiting_bytes = self.unsent_bytes = self.flight_bytes = self.held_bytes = 0
        self.is_paused = False
        self.window_bytes = tcp.first_flight_bytes
        self._flight_full_bytes = self._peak_bytes = 0
        """Segments in flight, each as if it were full, and the most of them since the last time that none were."""
        self._sent_at_s, self._pushes_at_s = 0.0, math.inf
        self._slow_start_bytes = math.inf
        """A smaller window grows by slow start, another one by a segment per round trip."""
        self._is_limited = False
        """Whether data have waited for the window since the last time that none were in flight."""
        self._more_bytes = 0
        """What has been acknowledged since the window grew last by a segment."""
        self._sent_bytes = 0
        """Those that were sent while the link was not plain."""
        self._losses: deque[tuple[float, float]] = deque()
        """Losses that are not seen yet: (when the sender sees it, when it had sent that)."""
        self._halved_at_s = -math.inf
        """When the window was halved last; for what was sent before, it is not halved again."""

    def put(self, n_bytes: int, item: Any = None) -> None:
        """Sends ``n_bytes`` behind all that were put before, as soon as the window allows."""
        # What waits in the process waits behind what waits for the window.
        if (
            not self.unsent_bytes
            and n_bytes <= BURST_BYTES
            and n_bytes <= self.room_bytes()
            and n_bytes <= self._half_bytes()
        ):
            self._send(n_bytes, item)
            return
        self._waiting.append((n_bytes, item))
        self.waiting_bytes += n_bytes
        if self.waiting_bytes == n_bytes:
            self._take()
        if self.waiting_bytes > HIGH_WATER_BYTES:
            self.is_paused = True

    def clear(self) -> None:
        """Drops what has not been sent."""
        self._waiting.clear()
        self._unsent.clear()
        self.waiting_bytes = self.unsent_bytes = 0

    def push(self) -> None:
        """Sends what the window allows. The rest is sent when acknowledgements arrive."""
        self._push()
        if self._waiting and 2 * self.unsent_bytes < UNSENT_BYTES:
            self._take()
        if self.waiting_bytes <= LOW_WATER_BYTES:
            self.is_paused = False
        if self._sent is not None:
            self._sent()

    def _take(self) -> None:
        """The kernel takes what waits in the process, burst by burst."""
        waiting = self._waiting
        while waiting and self.unsent_bytes < UNSENT_BYTES:
            n_bytes, item = waiting.popleft()
            if n_bytes > BURST_BYTES:
                waiting.appendleft((n_bytes - BURST_BYTES, item))
                n_bytes, item = BURST_BYTES, None
            self.waiting_bytes -= n_bytes
            self.unsent_bytes += n_bytes
            self._unsent.append((n_bytes, item))
            self._push()

    def _push(self) -> None:
        unsent, mss = self._unsent, self._tcp.mss
        while unsent:
            n_bytes, item = unsent[0]
            room_bytes = self.room_bytes()
            half_bytes = self._half_bytes()
            if n_bytes <= room_bytes and n_bytes <= half_bytes:
                unsent.popleft()
            else:  # whole segments only
                fits = room_bytes // mss * mss
                if fits <= 0 or (
                    self.flight_bytes and fits < min(BURST_BYTES, self.window_bytes) // _TSO_WIN_DIVISOR
                ):
                    self._is_limited = True
                    if self.acknowledged:
                        self._push_at(self.acknowledged[0][0])
                    break
                fits = min(fits, half_bytes)
                unsent[0] = n_bytes - fits, item
                n_bytes, item = fits, None
            self.unsent_bytes -= n_bytes
            self._send(n_bytes, item)

    def _half_bytes(self) -> int:
        """Returns the largest burst that the window allows: as in Linux half of its segments, so that two are on their way."""
        mss = self._tcp.mss
        return max(self.window_bytes // mss // 2, 1) * mss

    def room_bytes(self) -> int:
        """Processes acknowledgements that have arrived; returns how many bytes may be sent now."""
        now_s, acknowledged = self._kernel.now_s, self.acknowledged
        if acknowledged and acknowledged[0][0] <= now_s:
            mss, flight_bytes, full_bytes = self._tcp.mss, self.flight_bytes, self._flight_full_bytes
            while acknowledged and acknowledged[0][0] <= now_s:
                n_bytes = acknowledged.popleft()[1]
                n_full_bytes = -(-n_bytes // mss) * mss
                # Slow start as in Linux: the window grows only if more than half of it was used.
                if self.window_bytes < 2 * self._peak_bytes:
                    if self.window_bytes < self._slow_start_bytes:
                        self.window_bytes += n_full_bytes
                    else:
                        self._avoid_congestion(n_full_bytes)
                if self._losses:
                    self._see_losses(now_s)
                flight_bytes -= n_bytes
                full_bytes -= n_full_bytes
                if not flight_bytes:
                    self._peak_bytes, self._is_limited = 0, False
            self.flight_bytes, self._flight_full_bytes = flight_bytes, full_bytes
        if self._tcp.restarts_after_idle and not self.flight_bytes:
            # Linux restarts slow start after one retransmission timeout without traffic: a round trip and 0.2 s.
            timeout_s = self._pipe.delay_s + self._back.delay_s + MIN_RETRANSMISSION_S
            if self._sent_at_s + timeout_s < now_s:
                self.window_bytes = min(self.window_bytes, self._tcp.first_flight_bytes)
        free_bytes = RECEIVE_WINDOW_BYTES - self.held_bytes - self.flight_bytes
        window_bytes = self.window_bytes - self._flight_full_bytes
        return window_bytes if window_bytes < free_bytes else free_bytes

    def _send(self, n_bytes: int, item: Any) -> None:
        self.flight_bytes += n_bytes
        mss = self._tcp.mss
        n_segments = -(-n_bytes // mss)
        self._flight_full_bytes += n_segments * mss
        if self._flight_full_bytes > self._peak_bytes:
            self._peak_bytes = self._flight_full_bytes
        self._sent_at_s = now_s = self._kernel.now_s
        if self._pipe.is_plain:
            at_s = self._pipe.take(now_s, n_bytes + (n_segments or 1) * HEADER_BYTES)
            self._receiver.at(at_s, self._arrive, n_bytes, item)
        else:
            self._sent_bytes += n_bytes
            self._enter(n_bytes, item, self._sent_bytes)

    def _enter(self, n_bytes: int, item: Any, end: int) -> None:
        """Puts a burst on a link that is not plain, or on a cut one when it is up. ``end``: the bytes sent up to its end.

        Where other segments show that some are lost, they are acknowledged when they would have arrived without losses.
        """
        pipe, mss, now_s = self._pipe, self._tcp.mss, self._kernel.now_s
        if pipe.cut:
            pipe.held.append(lambda: self._enter(n_bytes, item, end))
            return
        pipe.more_follows, pipe.n_lost = bool(self._unsent or self._sent_bytes > end), 0
        at_s, transit = entered = _enter(pipe, mss, n_bytes, now_s)
        pipe.more_follows = False
        left_bytes, sent_at_s = n_bytes, now_s if pipe.n_lost else None
        if transit is None and pipe.counts and at_s > pipe.on_time_s:
            left_bytes = min(pipe.n_lost * mss, n_bytes)
        if left_bytes < n_bytes:
            self._kernel.at(pipe.on_time_s, self._acknowledge_on_way, n_bytes - left_bytes, sent_at_s)
            sent_at_s = None
        _go_on(self._kernel, self._receiver, entered, self._arrive, (n_bytes, item, left_bytes, sent_at_s))

    def _avoid_congestion(self, n_bytes: int) -> None:
        """Lets the window grow by a segment for each window that is acknowledged, if data wait for it."""
        if not self._is_limited:
            return
        self._more_bytes += n_bytes
        if self._more_bytes >= self.window_bytes:
            self._more_bytes -= self.window_bytes
            self.window_bytes += self._tcp.mss

    def _see_losses(self, now_s: float) -> None:
        """Halves the window for losses that are seen by now: once for all that is in flight then."""
        losses, mss = self._losses, self._tcp.mss
        while losses and losses[0][0] <= now_s:
            seen_at_s, sent_at_s = losses.popleft()
            if sent_at_s >= self._halved_at_s:
                self.window_bytes = max(self.window_bytes // mss // 2, _LEAST_SEGMENTS) * mss
                self._slow_start_bytes, self._more_bytes = self.window_bytes, 0
                self._halved_at_s = seen_at_s

    def _arrive(
        self, n_bytes: int, item: Any, left_bytes: int | None = None, sent_at_s: float | None = None
    ) -> None:
        """At the receiver: passes a burst on, and acknowledges ``left_bytes`` of it, all by default.

        ``sent_at_s``: see ``_acknowledge_on_way``.
        """
        left_bytes = n_bytes if left_bytes is None else left_bytes
        if left_bytes:
            self._acknowledge_on_way(left_bytes, sent_at_s)
        self._deliver(n_bytes, item)

    def _acknowledge_on_way(self, n_bytes: int, sent_at_s: float | None) -> None:
        """Sends an acknowledgement; ``sent_at_s``: it shows that some of what was sent then is lost."""
        back = self._back
        if back.is_plain:
            self._acknowledge(n_bytes, back.take(self._kernel.now_s, HEADER_BYTES), sent_at_s)
        elif back.cut or back.route:
            carry(self._kernel, self._kernel, back, self._tcp, 0, self._acknowledge_now, n_bytes, sent_at_s)
        else:
            at_s, _ = _kept(back.enter(self._kernel.now_s, HEADER_BYTES, 0))
            self._acknowledge(n_bytes, at_s, sent_at_s)

    def _acknowledge_now(self, n_bytes: int, sent_at_s: float | None) -> None:
        self._acknowledge(n_bytes, self._kernel.now_s, sent_at_s)

    def _acknowledge(self, n_bytes: int, at_s: float, sent_at_s: float | None = None) -> None:
        """Notes that an acknowledgement of ``n_bytes`` more reaches the sender at ``at_s``."""
        self.acknowledged.append((at_s, n_bytes))
        if sent_at_s is not None:
            self._losses.append((at_s, sent_at_s))
        if self._unsent:
            self._push_at(at_s)

    def _push_at(self, at_s: float) -> None:
        """Plans a push for ``at_s``, or the first whole nanosecond after it, unless one is planned before."""
        if at_s >= self._pushes_at_s:
            return
        ns = round(at_s * _NS)
        tick_s = ns / _NS
        if tick_s < at_s:
            tick_s = (ns + 1) / _NS
        if tick_s < self._pushes_at_s:
            self._pushes_at_s = tick_s
            self._kernel.at(tick_s, self._push_again)

    def _push_again(self) -> None:
        self._pushes_at_s = math.inf
        self.push()

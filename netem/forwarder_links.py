"""Computes when packets arrive, and keeps the state of the links that are emulated in user space.

Used by ``fabric``'s forwarder for packets, and by ``memory`` for bursts of bytes. Pure: no clock, no files.

- ``Pipe``: one ordered pair's own link: loss, rate, delay, jitter. Links are FIFO.
- ``SharedLink``: a link that several pairs use; ``Transit``: a packet on its way over such links. Where the pair's rate is that of
  the narrowest of them, it has no link of its own: its packets begin no sooner than that rate allows, and that takes no time.
- ``Losses``: draws which segments of a pair are lost.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from random import Random

from netem.forwarder_packets import segments, without
from netem.spec import NO_COURSE, Course
from policies.links import Link, repair_s

_EARLY_S = 1e-6
"""A planned change comes late by any time, but not earlier than by this."""
MAX_BACKLOG_S = 30.0
"""A packet that would have to wait longer for a link is dropped."""


class Losses:
    """Loses each segment with probability ``ratio`` (0 < ratio < 1), independently.

    Super-packets are not lost whole: the lost segments are cut out of them, so TCP sees single losses.
    """

    __slots__ = ("_log_kept", "_random", "_spared")

    def __init__(self, random: Random, ratio: float) -> None:
        self._random = random
        self._log_kept = math.log1p(-ratio)
        self._spared = self._draw()

    def _draw(self) -> int:
        """Draws how many segments get through before the next one is lost (geometric)."""
        return int(math.log(1.0 - self._random.random()) / self._log_kept)

    def lost_of(self, n_segments: int) -> list[int]:
        """Returns which of the next ``n_segments`` segments are lost: their numbers from 0, ascending."""
        lost = []
        at = self._spared
        while at < n_segments:
            lost.append(at)
            at += 1 + self._draw()
        self._spared = at - n_segments
        return lost


class SharedLink:
    """A link that several pairs use; ``free_at_s``: until when it is busy."""

    __slots__ = ("free_at_s", "rate_bps", "s_per_byte")

    def __init__(self, rate_bps: float) -> None:
        self.rate_bps = rate_bps
        self.s_per_byte = 8 / rate_bps
        self.free_at_s = 0.0


class Transit:
    """A packet on its way over shared links, which store and forward each segment.

    A super-packet enters a link when its first segment arrives there. It has left when all its bytes are
    transmitted, but at the earliest one segment's transmission time after its end left the previous link.

    ``size`` and ``segment_bytes`` (its first segment) are in bytes on the wire. ``through_at_s``: when it has
    left the previous link, or begins if there is none; ``delay_s``: its propagation delay, applied after the last link.
    """

    __slots__ = ("_delay_s", "_hop", "_pipe", "_segment_bytes", "_size", "_through_at_s")

    def __init__(
        self, pipe: Pipe, size: int, segment_bytes: int, through_at_s: float, delay_s: float
    ) -> None:
        self._pipe = pipe
        self._size = size
        self._segment_bytes = segment_bytes
        self._through_at_s = through_at_s
        self._delay_s = delay_s
        self._hop = 0

    def enter(self, now_s: float) -> tuple[float, Transit | None] | None:
        """Enters the next shared link with the first segment at ``now_s``; returns as ``Pipe.enter`` does."""
        link = self._pipe.route[self._hop]
        start_s = max(now_s, link.free_at_s)
        if start_s - now_s > MAX_BACKLOG_S and not self._pipe.repairs:
            return None
        link.free_at_s = start_s + self._size * link.s_per_byte
        segment_s = self._segment_bytes * link.s_per_byte
        self._through_at_s = max(link.free_at_s, self._through_at_s + segment_s)
        self._hop += 1
        if self._hop < len(self._pipe.route):
            return start_s + segment_s, self
        return self._pipe.arrive(self._through_at_s + self._delay_s), None


class Pipe:
    """The link of one ordered pair: what it does to packets, until when it is busy, and where it ends.

    ``out_fd`` is the descriptor of the receiver's device. ``name`` seeds the random draws
    (``netem.spec.draws_name``). ``early_s`` is subtracted from every delay. ``route``: the shared links after the
    pair's own, in order; the narrowest of them may be all that limits the pair.

    ``repairs``: no packet is ever dropped, because TCP's timers, which would send it again, do not know
    virtual time. Instead what is lost arrives later (``policies.links.repair_s``), and packets on a cut
    link are ``held`` until it is up again. Of the packet that entered last ``n_lost`` segments are lost; without any
    losses it would arrive ``on_time_s``. ``more_follows``: whether other packets follow the next one, which show a
    loss of its last segment.
    """

    __slots__ = (
        "_draws", "_early_s", "_has_own_link", "_instants", "_jitter_s", "_last_at_s", "_losses", "_n_changed", "_origin_s",
        "_rates_bps", "_round_trip_s", "cut", "delay_s", "free_at_s", "held", "is_plain", "more_follows", "n_lost", "name", "on_time_s", "out_fd", "repairs", "route", "s_per_byte",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        out_fd: int,
        profile: Link,
        early_s: float = 0.0,
        route: tuple[SharedLink, ...] = (),
        repairs: bool = False,
        course: Course = NO_COURSE,
    ) -> None:
        self.out_fd = out_fd
        self.route = route
        self.repairs = repairs
        self.held: list[Callable[[], None]] = []
        """Functions that send the packets that wait for a cut link, in order."""
        self.name = name
        self._early_s = early_s
        self.free_at_s = 0.0
        self.more_follows, self.n_lost, self.on_time_s = False, 0, 0.0
        self._last_at_s = 0.0
        self._draws: tuple[Random, Random] | None = None
        self._losses: Losses | None = None
        self._instants, self._rates_bps = course
        self._n_changed, self._origin_s = 0, 0.0
        self._use(profile)

    def change(self, profile: Link, now_s: float = 0.0) -> None:
        """Uses another profile from the next packet on; those on their way keep their instants of arrival.

        ``now_s`` places the course in time. A rate that is not the next one of the course ends the course.
        """
        if self._instants:
            self._follow(0.0 if profile.loss_ratio >= 1 else profile.rate_bps, now_s)
        self._use(profile)

    def place(self, now_s: float) -> None:
        """Places the course where its origin is that of the clock, which shows ``now_s``: what has changed until now has."""
        self._n_changed = bisect_right(self._instants, now_s)

    def _follow(self, rate_bps: float, now_s: float) -> None:
        """Goes on to the next change of the course, or ends the course if another rate is set by hand."""
        n, instants = self._n_changed, self._instants
        is_due = n < len(instants) and (not n or now_s >= self._origin_s + instants[n] - _EARLY_S)
        if is_due and rate_bps == self._rates_bps[n]:
            self._n_changed, self._origin_s = n + 1, now_s - instants[n]
        elif not n or rate_bps != self._rates_bps[n - 1]:
            self._instants = ()

    def _through_s(self, start_s: float, size: float) -> float:
        """Returns when ``size`` bytes that begin at ``start_s`` have been transmitted, by the course if there is one."""
        if not self._n_changed or not self._instants:
            return start_s + size * self.s_per_byte
        instants, rates_bps = self._instants, self._rates_bps
        at_s, left_bits = start_s - self._origin_s, 8 * size
        n = max(bisect_right(instants, at_s), self._n_changed)
        while n < len(instants):
            room_bits = (instants[n] - at_s) * rates_bps[n - 1]
            if left_bits <= room_bits:
                break
            left_bits, at_s, n = left_bits - max(room_bits, 0.0), max(instants[n], at_s), n + 1
        # a cut without an end: as if there were none
        s_per_bit = 1 / rates_bps[n - 1] if rates_bps[n - 1] else self.s_per_byte / 8
        return self._origin_s + at_s + left_bits * s_per_bit

    def _use(self, profile: Link) -> None:
        self.delay_s = profile.delay_s - self._early_s
        self.s_per_byte = 8 / profile.rate_bps
        self._has_own_link = profile.rate_bps != min((link.rate_bps for link in self.route), default=0.0)
        self._jitter_s = profile.jitter_s
        self._round_trip_s = 2 * profile.delay_s
        if self._draws is None and (profile.jitter_s or profile.loss_ratio):  # most pairs never need them
            self._draws = Random(f"jitter {self.name}"), Random(f"loss {self.name}")
        self.cut = profile.loss_ratio >= 1
        self._losses = None
        if self._draws is not None and 0 < profile.loss_ratio < 1:
            self._losses = Losses(self._draws[1], profile.loss_ratio)
        self.is_plain = not (self.route or self._instants or self.cut or profile.jitter_s or self._losses)
        """Whether ``take`` is all that it does to packets, until its profile changes."""

    def release(self) -> None:
        """Sends the held packets, unless the link is still cut."""
        while self.held and not self.cut:
            self.held.pop(0)()

    @property
    def loses(self) -> bool:
        """Whether packets may be lost, so that ``survivors`` must be called for each."""
        return not self.repairs and (self.cut or self._losses is not None)

    @property
    def holds(self) -> bool:
        """Whether packets must wait in ``held``."""
        return self.repairs and self.cut

    @property
    def counts(self) -> bool:
        """Whether ``enter`` must know a packet's segments."""
        return bool(self.route) or (self.repairs and self._losses is not None)

    def survivors(self, packet: bytes) -> tuple[list[bytes], int]:
        """Draws losses; returns the packets left of ``packet``, and how many of its segments are lost."""
        n_segments, _ = segments(packet)
        if self.cut:
            return [], n_segments
        lost = self._losses.lost_of(n_segments) if self._losses is not None else []
        return (without(packet, lost), len(lost)) if lost else ([packet], 0)

    def enter(
        self, now_s: float, size: int, n_segments: int = 1, segment_bytes: int = 0
    ) -> tuple[float, Transit | None] | None:
        """Puts a packet of ``size`` bytes on the wire on the link at ``now_s``.

        If the link ``counts``, ``n_segments`` and ``segment_bytes``, the size of the first one, must be
        given.

        Returns (arrival at the receiver, ``None``), or (arrival at the next shared link, the ``Transit``
        that continues there), or ``None`` if the packet is dropped because the queue is too long.
        """
        start_s = self.free_at_s if self.free_at_s > now_s else now_s
        if start_s - now_s > MAX_BACKLOG_S and not self.repairs:
            return None
        if self.is_plain:
            return self.take(now_s, size), None
        through_at_s = self._through_s(start_s, size) if self._instants else start_s + size * self.s_per_byte
        self.free_at_s = through_at_s
        delay_s = self.delay_s
        if self._jitter_s and self._draws is not None:
            delay_s += self._jitter_s * (2 * self._draws[0].random() - 1)
        if self.repairs and self._losses is not None:
            self.on_time_s = max(through_at_s + delay_s, self.on_time_s)
            late_s, self.n_lost = repair_s(
                self._round_trip_s, n_segments, self._losses.lost_of, self.more_follows
            )
            delay_s += late_s
        if not self.route:
            return self.arrive(through_at_s + delay_s), None
        if not self._has_own_link:
            return start_s, Transit(self, size, segment_bytes, start_s, delay_s)
        transit = Transit(self, size, segment_bytes, through_at_s, delay_s)
        return self._through_s(start_s, segment_bytes), transit

    def take(self, now_s: float, size: int) -> float:
        """As ``enter`` on a plain link that drops nothing; returns the arrival at the receiver."""
        free_at_s = self.free_at_s
        self.free_at_s = free_at_s = (free_at_s if free_at_s > now_s else now_s) + size * self.s_per_byte
        return self.arrive(free_at_s + self.delay_s)

    def arrive(self, at_s: float) -> float:
        """Returns ``at_s``, or later if needed: no packet arrives before one that was sent before it."""
        if at_s < self._last_at_s:
            return self._last_at_s
        self._last_at_s = at_s
        return at_s

"""Another machine's ``time.monotonic``, estimated from questions that it answers with its time.

A sample is (``t0_s``: sent here, ``t1_s``: answered there, ``t2_s``: received here); it may go over any
transport. The answer was given between ``t0_s`` and ``t2_s``, so the other clock's offset (its time less ours)

- was at most ``t1_s - t0_s`` at ``t0_s``, which is close where the way there was short, and
- was at least ``t1_s - t2_s`` at ``t2_s``, which is close where the way back was short.

While the clocks drift apart at a constant rate the offset is a straight line below all of the former and above all
of the latter. The estimate is the middle of the lines that are left, so it is decided by the samples with the least
delay on either way (a minimum-RTT filter for each way), and slow ones do nothing.

``uncertainty_s`` is half the width of that: **a hard bound, not a standard deviation**, however the delays lie on the two
ways. It comes down to about half the smallest RTT, and not below the part of it that no sample can give to a way: ways
that always differ move the estimate by half the difference, inside the bound. Two things are taken as given: the drift
is at most ``MAX_DRIFT``, and constant over the window. Where samples contradict that, older ones are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

MAX_DRIFT = 1e-3
"""Seconds per second: twice what a clock that is being set (``adjtime``) may run off, which quartz does far less."""
MAX_SAMPLES = 128


class _Line(NamedTuple):
    """Where the offset is: at ``at_s`` (our time) within ``half_s`` of ``offset_s``, moving by ``drift`` +- ``spread``."""

    at_s: float
    offset_s: float
    half_s: float
    drift: float
    spread: float


class HostClock:
    """The clock of one other machine; nothing is known before the first sample.

    ``window_s``: how long a sample counts; at most the last ``MAX_SAMPLES`` do.
    """

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=MAX_SAMPLES)
        self._line = _Line(0.0, 0.0, float("inf"), 0.0, MAX_DRIFT)
        self.n_samples = 0
        """Samples taken since the start."""
        self.n_forgotten = 0
        """How often samples contradicted each other, because a clock was moved or changed its rate."""

    def add(self, t0_s: float, t1_s: float, t2_s: float) -> None:
        """One answered question, in about the order of time. Raises ``ValueError`` for ``t2_s`` < ``t0_s``."""
        if t2_s < t0_s:
            raise ValueError("an answer cannot be received before its question was sent")
        self.n_samples += 1
        samples = self._samples
        samples.append((t0_s, t1_s, t2_s))
        while samples[0][0] < t2_s - self._window_s and len(samples) > 1:
            samples.popleft()
        while (line := _fit(samples)) is None:
            self.n_forgotten += 1
            for _ in range((len(samples) + 1) // 2):
                samples.popleft()
        self._line = line

    @property
    def offset_s(self) -> float:
        """The other clock less ours, at the newest sample."""
        return self._line.offset_s

    @property
    def drift(self) -> float:
        """Seconds by which the other clock gains on ours, per second of ours."""
        return self._line.drift

    @property
    def uncertainty_s(self) -> float:
        """How far ``offset_s`` is off at most; infinite without samples."""
        return self._line.half_s

    def uncertainty_at(self, at_s: float) -> float:
        """How far ``to_remote(at_s)`` is off at most (``at_s``: our time); it grows with the distance to the newest sample."""
        return self._line.half_s + self._line.spread * abs(at_s - self._line.at_s)

    @property
    def rtt_min_s(self) -> float:
        """The smallest RTT of the samples that count; infinite without samples."""
        return min((t2_s - t0_s for t0_s, _, t2_s in self._samples), default=float("inf"))

    def to_remote(self, at_s: float) -> float:
        """What the other clock shows when ours shows ``at_s``."""
        line = self._line
        return at_s + line.offset_s + line.drift * (at_s - line.at_s)

    def to_local(self, at_s: float) -> float:
        """What our clock shows when the other one shows ``at_s``."""
        line = self._line
        return line.at_s + (at_s - line.offset_s - line.at_s) / (1 + line.drift)


def _fit(samples: Iterable[tuple[float, float, float]]) -> _Line | None:
    """What the samples leave of the offset at the newest one; ``None`` if no straight line meets all of them.

    A line with slope b is below the upper bound at x and above the lower bound at y: for x > y, b is at most
    (upper - lower) / (x - y), for x < y at least that. Only corners of the bounds' convex hulls decide. As all
    bounds lie before the instant asked for, the largest b gives the largest offset there, the smallest the least.
    """
    ordered = list(samples)
    end_s = max(t2_s for _, _, t2_s in ordered)
    # Offsets can be large (clocks start with their machines): what is computed here are differences to one of them.
    base_s = ordered[-1][1] - end_s
    upper = _hull([(t0_s - end_s, t1_s - t0_s - base_s) for t0_s, t1_s, _ in ordered])
    lower = [(x, -y) for x, y in _hull([(t2_s - end_s, t2_s - t1_s + base_s) for _, t1_s, t2_s in ordered])]
    least, most = -MAX_DRIFT, MAX_DRIFT
    for x, above in upper:
        for y, below in lower:
            if x > y:
                most = min(most, (above - below) / (x - y))
            elif x < y:
                least = max(least, (above - below) / (x - y))
            elif above < below:
                return None
    if least > most:
        return None
    highest = min(above - most * x for x, above in upper)
    lowest = max(below - least * y for y, below in lower)
    return _Line(
        end_s,
        base_s + (highest + lowest) / 2,
        (highest - lowest) / 2,
        (most + least) / 2,
        (most - least) / 2,
    )


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of the convex hull's lower side, from left to right."""
    corners: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while len(corners) > 1:
            (x0, y0), (x1, y1) = corners[-2:]
            if (y1 - y0) * (x - x1) < (y - y1) * (x1 - x0):
                break
            corners.pop()
        if corners and corners[-1][0] == x:
            if corners[-1][1] <= y:
                continue
            corners.pop()
        corners.append((x, y))
    return corners

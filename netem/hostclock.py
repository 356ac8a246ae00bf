"""Estimates another machine's ``time.monotonic`` from questions that it answers with its time.

A sample is (``t0_s``, ``t1_s``, ``t2_s``): the question was sent here at ``t0_s``, answered there at ``t1_s``
on the other clock, and the answer was received here at ``t2_s``. Any transport will do. The answer was sent
between ``t0_s`` and ``t2_s``, so the other clock's offset (its time minus ours)

- was at most ``t1_s - t0_s`` at ``t0_s``: a tight bound if the question had a short delay, and
- was at least ``t1_s - t2_s`` at ``t2_s``: a tight bound if the answer had a short delay.

While the clocks drift apart at a constant rate, the offset over time is a straight line. It lies below all
upper bounds and above all lower bounds. The estimate is the middle of the lines that remain possible. So the
samples with the least delay in each direction decide it (a minimum-RTT filter per direction), and slow
samples have no effect.

``uncertainty_s`` is half the range of the offsets that remain possible: **a hard bound, not a standard
deviation**, however the RTT divides between the two directions. It falls to about half the smallest RTT. The
rest stays, as no sample shows how an RTT divides: if the two directions always differ, the estimate is off by
half the difference, which is inside the bound. Two assumptions are made: the drift is at most ``MAX_DRIFT``,
and it is constant over the window. If samples contradict them, the older ones are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

MAX_DRIFT = 1e-3
"""Seconds per second: twice the rate at which ``adjtime`` shifts a clock. Quartz drifts far less."""
MAX_SAMPLES = 128


class _Line(NamedTuple):
    """The estimate: ``offset_s`` +- ``half_s`` at ``at_s`` (our time), with slope ``drift``."""

    at_s: float
    offset_s: float
    half_s: float
    drift: float


class HostClock:
    """The clock of one other machine; its offset is unknown before the first sample.

    ``window_s``: how many seconds a sample counts. At most the last ``MAX_SAMPLES`` samples count.
    """

    def __init__(self, window_s: float = 30.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=MAX_SAMPLES)
        self._line = _Line(0.0, 0.0, float("inf"), 0.0)
        self.n_samples = 0
        """Samples added since the start."""
        self.n_forgotten = 0
        """How often samples contradicted each other, because a clock was set or changed its rate."""

    def add(self, t0_s: float, t1_s: float, t2_s: float) -> None:
        """Adds a sample, roughly in the order of time. Raises ``ValueError`` if ``t2_s`` < ``t0_s``."""
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
        """The other clock's time minus ours, at the newest sample."""
        return self._line.offset_s

    @property
    def drift(self) -> float:
        """Seconds by which the other clock gains on ours, per second of ours."""
        return self._line.drift

    @property
    def uncertainty_s(self) -> float:
        """The largest possible error of ``offset_s``; infinite without samples."""
        return self._line.half_s

    @property
    def rtt_min_s(self) -> float:
        """The smallest RTT of the samples that count; infinite without samples."""
        return min((t2_s - t0_s for t0_s, _, t2_s in self._samples), default=float("inf"))

    def to_local(self, at_s: float) -> float:
        """Returns what our clock shows when the other one shows ``at_s``."""
        line = self._line
        return line.at_s + (at_s - line.offset_s - line.at_s) / (1 + line.drift)


def _fit(samples: Iterable[tuple[float, float, float]]) -> _Line | None:
    """Returns the offsets at the newest sample that all samples allow, or ``None`` if no straight line fits.

    A line with slope b lies below the upper bound at x and above the lower bound at y: for x > y, b is at
    most (upper - lower) / (x - y); for x < y, b is at least that. Only the corners of the bounds' convex
    hulls matter. All bounds lie before the newest instant, so the largest b yields the largest offset there,
    and the smallest b the smallest.
    """
    ordered = list(samples)
    end_s = max(t2_s for _, _, t2_s in ordered)
    # Offsets can be large (clocks start with their machines), so compute differences to one of them: keeps
    # precision.
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
    )


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the corners of the lower side of the points' convex hull, from left to right."""
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

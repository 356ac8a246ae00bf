"""Groups samples of equal conditions into points, with their medians."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from testbed.studies.calibrate.measure import Kind, Sample

STEPS_TOGETHER = 16
"""A point has so many successive steps of a session. Over so few the context hardly changes."""


@dataclass(frozen=True)
class Point:
    """Samples of equal conditions. ``time_s`` is the median of ``n_samples``, ``low_s`` and ``high_s`` their
    quartiles.

    ``cached_tokens`` is a median, too (0 for a prefill): a time that is linear in it has its median there.
    """

    kind: Kind
    n_blocks: int
    n_input_tokens: int
    cached_tokens: float
    n_sessions: int
    n_samples: int
    time_s: float
    low_s: float
    high_s: float
    is_paced: bool = True


def points_of(samples: Iterable[Sample]) -> list[Point]:
    """Groups the used samples by kind, blocks, input length, sessions, pace and ``STEPS_TOGETHER`` steps.

    The points are sorted by these.
    """
    groups: dict[tuple[Kind, int, int, int, bool, int], list[Sample]] = {}
    for sample in samples:
        if sample.is_used:
            part = sample.step // STEPS_TOGETHER
            where = (sample.kind, sample.n_blocks, sample.n_input_tokens)
            groups.setdefault((*where, sample.n_sessions, sample.is_paced, part), []).append(sample)
    points = []
    for (kind, n_blocks, n_input_tokens, n_sessions, is_paced, _), group in sorted(groups.items()):
        low_s, time_s, high_s = np.percentile([sample.time_s for sample in group], [25, 50, 75])
        points.append(
            Point(
                kind=kind,
                n_blocks=n_blocks,
                n_input_tokens=n_input_tokens,
                cached_tokens=float(np.median([sample.cached_tokens for sample in group])),
                n_sessions=n_sessions,
                n_samples=len(group),
                time_s=float(time_s),
                low_s=float(low_s),
                high_s=float(high_s),
                is_paced=is_paced,
            )
        )
    return points

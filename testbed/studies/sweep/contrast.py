"""Means over seeds, and paired differences between policies on the same seeds, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from testbed.results.intervals import EQUAL, LESS, MORE, Mean, mean_of, sign_of, t_quantile
from testbed.studies.sweep.axes import Point
from testbed.studies.sweep.measures import BEST_AT_ONE, HIGHER_IS_BETTER
from testbed.studies.sweep.runs import OK
from testbed.studies.sweep.table import Row

BETTER, WORSE = "better", "worse"
N_FAILED = "n_failed"


class Difference(NamedTuple):
    """Mean of (policy - baseline) over the ``n`` seeds for which both have a value, and its 95 % half-width.

    ``ratio``: ``mean`` divided by the baseline's mean over the same seeds; None if that is 0. ``verdict``:
    ``BETTER`` or ``WORSE`` (``LESS`` or ``MORE`` for ``BEST_AT_ONE``) if the interval does not contain 0,
    ``UNRESOLVED`` if it does, ``EQUAL`` if the two values are equal for every seed, None without an interval
    (a half-width of nan).
    """

    mean: float
    half_width: float
    n: int
    ratio: float | None
    verdict: str | None


def p_value(difference: Difference) -> float | None:
    """Returns the two-sided p-value of a difference of 0 (Student's t), from its interval; None without one."""
    from scipy.special import stdtr

    if math.isnan(difference.half_width) or difference.verdict == EQUAL:
        return None
    if not difference.half_width:
        return 0.0
    degrees = difference.n - 1
    return float(2 * stdtr(degrees, -abs(difference.mean) / difference.half_width * t_quantile(degrees)))


def holm(p_values: Sequence[float], level: float = 0.05) -> int:
    """Returns how many hypotheses Holm's step-down procedure rejects, with ``level`` for all of them together."""
    ordered = sorted(p_values)
    n = len(ordered)
    return next((i for i, p in enumerate(ordered) if p > level / (n - i)), n)


class Cell(NamedTuple):
    """One point of the study under one policy: its runs, sorted by seed."""

    point: Point
    policy: str
    rows: Sequence[Row]

    @property
    def n_measured(self) -> int:
        return sum(row.record.status == OK for row in self.rows)

    def n_of(self, measure: str, seeds: Container[int] | None = None) -> int:
        """Returns the sum of ``measure``, a number of requests, over the runs (None: of all seeds)."""
        rows = (row for row in self.rows if seeds is None or row.seed in seeds)
        return int(sum(row.value(measure) or 0 for row in rows))

    def n_left_out(self, baseline: Cell) -> tuple[int, int]:
        """Returns how many requests of the baseline, and of this cell, failed in the runs that are compared."""
        theirs, own = (
            {row.seed for row in cell.rows if row.record.status == OK} for cell in (baseline, self)
        )
        return baseline.n_of(N_FAILED, theirs & own), self.n_of(N_FAILED, theirs & own)

    def mean(self, measure: str) -> Mean | None:
        """Returns the mean over the runs that have a value, or None if none has.

        If all runs measured the same, the half-width is nan: the seeds then change nothing, and there is no
        spread to estimate.
        """
        values = [value for row in self.rows if (value := row.value(measure)) is not None]
        found = mean_of(values, _share(self.rows))
        return found._replace(half_width=math.nan) if found and _is_one_run(self.rows) else found

    def against(self, baseline: Cell, measure: str) -> Difference | None:
        """Returns the paired difference to ``baseline``, a cell of the same point. None if they share no
        seed.
        """
        of_base = {row.seed: row.value(measure) for row in baseline.rows}
        pairs = [
            (value, base)
            for row in self.rows
            if (value := row.value(measure)) is not None and (base := of_base.get(row.seed)) is not None
        ]
        found = mean_of([value - base for value, base in pairs], _share(self.rows))
        if found is None:
            return None
        if _is_one_run(self.rows) and _is_one_run(baseline.rows):
            found = found._replace(half_width=math.nan)
        base_mean = math.fsum(base for _, base in pairs) / len(pairs)
        verdict = None
        if not math.isnan(found.half_width):
            verdict = sign_of(pairs, found)
            if verdict in (LESS, MORE) and measure not in BEST_AT_ONE:
                verdict = BETTER if (verdict == MORE) == (measure in HIGHER_IS_BETTER) else WORSE
        return Difference(*found, found.mean / base_mean if base_mean else None, verdict)


def cells_of(rows: Sequence[Row]) -> list[Cell]:
    """Groups rows by point and policy, in the order of their first rows."""
    by_place: dict[tuple[tuple[tuple[str, str], ...], str], list[Row]] = {}
    for row in rows:
        by_place.setdefault((tuple(row.at.items()), row.policy), []).append(row)
    return [
        Cell(dict(at), policy, sorted(found, key=lambda row: row.seed))
        for (at, policy), found in by_place.items()
    ]


def baselines(cells: Sequence[Cell], policy: str) -> Mapping[tuple[str, ...], Cell]:
    """Returns the cells of ``policy``, the baseline, by the values of their points."""
    return {tuple(cell.point.values()): cell for cell in cells if cell.policy == policy}


def _share(rows: Sequence[Row]) -> float:
    return max((row.record.recorded_share for row in rows), default=0.0)


def _is_one_run(rows: Sequence[Row]) -> bool:
    """Whether all of several runs measured exactly the same."""
    return len(rows) > 1 and all(row.record.measures == rows[0].record.measures for row in rows)

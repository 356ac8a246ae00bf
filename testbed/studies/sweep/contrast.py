"""Means over seeds, and what a policy has over another on the same seeds, with 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from testbed.results.intervals import Mean, mean_of
from testbed.studies.sweep.axes import Point
from testbed.studies.sweep.measures import HIGHER_IS_BETTER
from testbed.studies.sweep.runs import OK
from testbed.studies.sweep.table import Row

BETTER, WORSE, UNRESOLVED, EQUAL = "better", "worse", "unresolved", "equal"


class Difference(NamedTuple):
    """Mean of (policy - baseline) over ``n`` seeds that both have; ``ratio`` to the baseline's mean over these.

    ``verdict``: ``BETTER`` or ``WORSE`` if the interval leaves 0 out, ``UNRESOLVED`` if it holds 0, ``EQUAL`` if
    every pair is; without an interval ``None``.
    """

    mean: float
    half_width: float
    n: int
    ratio: float | None
    verdict: str | None


class Cell(NamedTuple):
    """A point under a policy: its runs in the order of their seeds."""

    point: Point
    policy: str
    rows: Sequence[Row]

    @property
    def n_measured(self) -> int:
        return sum(row.record.status == OK for row in self.rows)

    def mean(self, measure: str) -> Mean | None:
        """Over the runs that have it. Runs that are all the same have no interval (nan): no seed changes anything."""
        values = [value for row in self.rows if (value := row.value(measure)) is not None]
        found = mean_of(values, _share(self.rows))
        return found._replace(half_width=math.nan) if found and _is_one_run(self.rows) else found

    def against(self, baseline: Cell, measure: str) -> Difference | None:
        """The paired difference to ``baseline``, a cell of the same point; ``None`` without a seed that both have."""
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
            verdict = UNRESOLVED
            if all(math.isclose(value, base, rel_tol=1e-9) for value, base in pairs):
                verdict = EQUAL
            elif abs(found.mean) > found.half_width:
                verdict = BETTER if (found.mean > 0) == (measure in HIGHER_IS_BETTER) else WORSE
        return Difference(*found, found.mean / base_mean if base_mean else None, verdict)


def cells_of(rows: Sequence[Row]) -> list[Cell]:
    """In the order in which points and policies come; the runs of each by seed."""
    by_place: dict[tuple[tuple[tuple[str, str], ...], str], list[Row]] = {}
    for row in rows:
        by_place.setdefault((tuple(row.at.items()), row.policy), []).append(row)
    return [
        Cell(dict(at), policy, sorted(found, key=lambda row: row.seed))
        for (at, policy), found in by_place.items()
    ]


def baselines(cells: Sequence[Cell], policy: str) -> Mapping[tuple[str, ...], Cell]:
    """The cells of the policy that others are compared with, by the texts of their points."""
    return {tuple(cell.point.values()): cell for cell in cells if cell.policy == policy}


def _share(rows: Sequence[Row]) -> float:
    return max((row.record.recorded_share for row in rows), default=0.0)


def _is_one_run(rows: Sequence[Row]) -> bool:
    """Every run is a replay of the first."""
    return len(rows) > 1 and all(row.record.measures == rows[0].record.measures for row in rows)

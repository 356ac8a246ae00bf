"""What runs at one rate come to: whether they keep the objectives, and whether they could go on for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from testbed.results.intervals import Mean, mean_of
from testbed.scenario.slo import Objective
from testbed.studies.capacity.measures import MEAN_TIME, N_FAILED, THIRDS
from testbed.studies.sweep.measures import GOODPUT
from testbed.studies.sweep.runs import FAILED, INFEASIBLE, OK, Record

PLACEMENT, REQUESTS = "placement", "failed"
"""What breaks a rate beside objectives: a seed without a placement; requests that fail or give up."""
GROWTH_RATIO = 1.2
"""So many times the first third's is the last third's mean, at least, where it keeps growing."""
STEADY_RATIO = 0.5
"""And so much of the growth before, at least, is the growth from the second third to the last one."""


@dataclass(frozen=True)
class Verdict:
    """Runs with several seeds at ``rate`` (requests/s). ``error``: one of them broke; there is no verdict.

    ``excess`` has by objective, ``PLACEMENT`` and ``REQUESTS`` how far its value is above its limit, over the seeds;
    ``values`` the values themselves (seconds). ``mean_s``: a request's time in the system. ``thirds_s``: as ``THIRDS``.
    """

    rate: float
    n_requests: int
    excess: Mapping[str, Mean] = field(default_factory=dict)
    values: Mapping[str, Mean] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    mean_s: float = 0.0
    goodput: Mean | None = None
    thirds_s: tuple[float, float, float] | None = None
    is_growing: bool = False
    reason: str = ""
    error: str = ""

    @property
    def is_kept(self) -> bool:
        """The means keep all limits."""
        return all(over.mean <= 0 for over in self.excess.values())

    @property
    def is_surely_kept(self) -> bool:
        """The intervals over seeds do."""
        return all(over.mean + over.half_width <= 0 for over in self.excess.values())

    @property
    def is_surely_broken(self) -> bool:
        """An interval over seeds is above its limit."""
        return any(over.mean - over.half_width > 0 for over in self.excess.values())

    @property
    def broken_by(self) -> str | None:
        """What breaks it: a placement or requests that fail, else the objective that is missed by the largest part of its limit."""
        for name in (PLACEMENT, REQUESTS):
            if name in self.excess and self.excess[name].mean > 0:
                return name
        missed = [name for name, over in self.excess.items() if over.mean > 0]
        return max(missed, key=lambda name: self.ratios[name], default=None)


def verdict_of(
    rate: float, n_requests: int, records: Sequence[Record], objectives: Sequence[Objective]
) -> Verdict:
    """The verdict on the runs of all seeds, in their order."""
    wrong = next((record for record in records if record.status == FAILED), None)
    if wrong is not None:
        return Verdict(rate, n_requests, error=wrong.reason)
    share = max(record.recorded_share for record in records)
    served = [record.measures for record in records if record.status == OK]
    excess, values, ratios = {}, {}, {}
    n_without = [float(record.status == INFEASIBLE) for record in records]
    without = mean_of(n_without)
    assert without is not None
    excess[PLACEMENT] = without
    failed = mean_of([float(of[N_FAILED] or 0) for of in served])
    if failed is not None:
        excess[REQUESTS] = failed
    for objective in objectives:
        found = mean_of([value for of in served if (value := of[objective.name]) is not None], share)
        if found is not None:
            values[objective.name] = found
            over_s = found.mean - objective.limit_s
            excess[objective.name] = found._replace(mean=over_s)
            ratios[objective.name] = over_s / objective.limit_s if objective.limit_s else over_s
        elif failed is not None and failed.mean == 0:
            return Verdict(
                rate, n_requests, error=f"no request has a {objective.metric}; leave {objective.name} out"
            )
    times_s = [value for of in served if (value := of[MEAN_TIME]) is not None]
    goodput = mean_of([value for of in served if (value := of[GOODPUT]) is not None], share)
    thirds_s, is_growing = _growth(served, share)
    return Verdict(
        rate,
        n_requests,
        excess,
        values,
        ratios,
        sum(times_s) / len(times_s) if times_s else 0.0,
        goodput,
        thirds_s,
        is_growing,
        next((record.reason for record in records if record.status == INFEASIBLE), ""),
    )


def _growth(
    served: Sequence[Mapping[str, float | int | None]], share: float
) -> tuple[tuple[float, float, float] | None, bool]:
    """The thirds' means over the seeds, and whether the time to the first token keeps growing.

    It does if it grows from third to third, the last one's growth is at least ``STEADY_RATIO`` of the one before (what only
    fills up from empty grows ever less), the last third is at least ``GROWTH_RATIO`` times the first, and the 95 % interval of
    that difference over the seeds leaves out 0.
    """
    rows = [
        (first, second, last)
        for of in served
        for first, second, last in [[of[name] for name in THIRDS]]
        if first is not None and second is not None and last is not None
    ]
    if not rows:
        return None, False
    first_s, second_s, last_s = (sum(column) / len(rows) for column in zip(*rows, strict=True))
    grown = mean_of([last - first for first, _, last in rows], share)
    assert grown is not None
    is_growing = (
        first_s < second_s < last_s
        and last_s - second_s >= STEADY_RATIO * (second_s - first_s)
        and last_s >= GROWTH_RATIO * first_s
        and not grown.mean - grown.half_width <= 0
    )
    return (first_s, second_s, last_s), is_growing

"""The verdict on runs at one rate: whether they keep the objectives, and whether waiting times keep
growing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from testbed.experiments.slo import Objective
from testbed.results.costs import COSTS
from testbed.results.intervals import Mean, mean_of
from testbed.studies.capacity.measures import FINGERPRINT, MEAN_TIME, N_FAILED, THIRDS, of_client
from testbed.studies.sweep.measures import GOODPUT
from testbed.studies.sweep.runs import FAILED, INFEASIBLE, OK, Record

PLACEMENT, REQUESTS = "placement", "failed"
"""What can break a rate besides objectives: a seed without a placement, and requests that fail or give up."""
GROWTH_RATIO = 1.2
"""A time keeps growing only if the last third's mean is at least so many times the first third's."""
STEADY_RATIO = 0.5
"""It keeps growing only if the second growth (second to last third) is at least this share of the first."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on runs with several seeds at ``rate`` (requests/s).

    - ``excess``: objective, ``PLACEMENT`` or ``REQUESTS`` -> value minus limit, mean over the seeds. The
      value is in seconds, for ``PLACEMENT`` the share of seeds without one, for ``REQUESTS`` the number of
      requests that failed
    - ``values``: objective -> value (seconds); ``ratios``: objective -> excess divided by the limit
    - ``by_client``: objective -> client -> value of its own requests; empty with a single client
    - ``costs``: the figures of ``testbed.results.costs`` by name, where the scenario has prices or powers
    - ``mean_s``: mean time of a request in the system; ``thirds_s``: means of ``THIRDS``
    - ``is_growing``: whether the time to the first token keeps growing, see ``_growth``
    - ``engine``, ``engine_why``: what served the first seed, and why
    - ``recorded_share``: the share of a recording that each seed draws, for ``mean_of``
    - ``is_same_run``: no seed changes anything: ``values``, ``by_client``, ``costs`` and ``goodput`` have no
      interval then, and ``excess`` one of no width
    - ``reason``: why a seed has no placement; ``error``: why a run failed, in which case there is no verdict
    """

    rate: float
    n_requests: int
    excess: Mapping[str, Mean] = field(default_factory=dict)
    values: Mapping[str, Mean] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    by_client: Mapping[str, Mapping[str, Mean]] = field(default_factory=dict)
    costs: Mapping[str, Mean] = field(default_factory=dict)
    mean_s: float = 0.0
    goodput: Mean | None = None
    thirds_s: tuple[float, float, float] | None = None
    is_growing: bool = False
    engine: str = ""
    engine_why: str = ""
    recorded_share: float = 0.0
    is_same_run: bool = False
    reason: str = ""
    error: str = ""

    @property
    def is_kept(self) -> bool:
        """Whether the means keep all limits."""
        return all(over.mean <= 0 for over in self.excess.values())

    @property
    def is_surely_kept(self) -> bool:
        """Whether the 95 % intervals over seeds are entirely within all limits."""
        return all(over.mean + over.half_width <= 0 for over in self.excess.values())

    @property
    def is_surely_broken(self) -> bool:
        """Whether a 95 % interval over seeds is entirely above its limit."""
        return any(over.mean - over.half_width > 0 for over in self.excess.values())

    @property
    def broken_by(self) -> str | None:
        """What breaks the rate: ``PLACEMENT``, ``REQUESTS``, or the objective with the largest excess per
        limit.

        None if nothing does.
        """
        for name in (PLACEMENT, REQUESTS):
            if name in self.excess and self.excess[name].mean > 0:
                return name
        missed = [name for name, over in self.excess.items() if over.mean > 0]
        return max(missed, key=lambda name: self.ratios[name], default=None)

    def missed_at(self, objective: Objective) -> list[str]:
        """Returns the clients whose own requests miss an objective, the worst first; none with a single client."""
        values = self.by_client.get(objective.name, {})
        missed = [client for client, value in values.items() if value.mean > objective.limit_s]
        return sorted(missed, key=lambda client: -values[client].mean)


def verdict_of(
    rate: float, n_requests: int, records: Sequence[Record], objectives: Sequence[Objective]
) -> Verdict:
    """Returns the verdict on ``records``, one per seed."""
    wrong = next((record for record in records if record.status == FAILED), None)
    if wrong is not None:
        return Verdict(rate, n_requests, error=wrong.reason)
    share = max(record.recorded_share for record in records)
    served = [record.measures for record in records if record.status == OK]
    is_same_run = len(served) == len(records) > 1 and len({measures[FINGERPRINT] for measures in served}) == 1
    different = served[:1] if is_same_run else served
    excess, values, ratios = {}, {}, {}
    n_without = [float(record.status == INFEASIBLE) for record in records]
    without = mean_of(n_without)
    assert without is not None
    excess[PLACEMENT] = without
    failed = mean_of([float(of[N_FAILED] or 0) for of in served])
    if failed is not None:
        excess[REQUESTS] = failed

    def over_seeds(name: str) -> Mean | None:
        return mean_of([value for of in different if (value := of.get(name)) is not None], share)

    for objective in objectives:
        found = over_seeds(objective.name)
        if found is not None:
            values[objective.name] = found
            over_s = found.mean - objective.limit_s
            excess[objective.name] = Mean(over_s, 0.0 if is_same_run else found.half_width, found.n)
            ratios[objective.name] = over_s / objective.limit_s if objective.limit_s else over_s
        elif failed is not None and failed.mean == 0:
            return Verdict(
                rate,
                n_requests,
                error=f"no request has a {objective.metric}; give another than {objective.name}",
            )
    times_s = [value for of in served if (value := of[MEAN_TIME]) is not None]
    prefixes = [of_client(objective.name, "") for objective in objectives]
    clients = dict.fromkeys(
        name.removeprefix(p) for of in served for p in prefixes for name in of if name.startswith(p)
    )
    by_client = {
        objective.name: {
            client: mean
            for client in clients
            if (mean := over_seeds(of_client(objective.name, client))) is not None
        }
        for objective in objectives
        if clients
    }
    costs = {name: mean for name in COSTS if (mean := over_seeds(name)) is not None}
    thirds_s, is_growing = _growth(served, share)
    return Verdict(
        rate,
        n_requests,
        excess,
        values,
        ratios,
        by_client,
        costs,
        sum(times_s) / len(times_s) if times_s else 0.0,
        over_seeds(GOODPUT),
        thirds_s,
        is_growing,
        records[0].engine,
        records[0].engine_why,
        share,
        is_same_run,
        next((record.reason for record in records if record.status == INFEASIBLE), ""),
    )


def _growth(
    served: Sequence[Mapping[str, float | int | None]], share: float
) -> tuple[tuple[float, float, float] | None, bool]:
    """Returns the means of ``THIRDS`` over the seeds, and whether the time to the first token keeps growing.

    It keeps growing if all of this holds: it grows from third to third; the second growth is at least
    ``STEADY_RATIO`` of the first (a system that only fills up from empty grows less and less); the last third
    is at least ``GROWTH_RATIO`` times the first; and the lower end of the 95 % interval of that difference
    over the seeds is above 0 (a single seed has no interval).
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


def costs_over_seeds(verdict: Verdict) -> dict[str, dict[str, float | None]]:
    """Returns what the runs cost, by the names of ``COSTS``: ``value`` and ``ci95``; empty if nothing is known."""
    return {
        name: {"value": of.mean, "ci95": of.half_width if of.n > 1 else None}
        for name, of in verdict.costs.items()
    }

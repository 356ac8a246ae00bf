"""The measures of a run for its capacity: all times that objectives can limit, and whether they grow."""

from __future__ import annotations

import math
from collections.abc import Mapping

from testbed.experiments.slo import NAMES, STATISTICS
from testbed.results.requests import stats
from testbed.results.slo import goodput_rps
from testbed.simulator.engine import Simulation
from testbed.studies.sweep.measures import GOODPUT

N_FAILED = "n_failed"
MEAN_TIME = "e2e_mean"
THIRDS = ("ttft_first_third_s", "ttft_second_third_s", "ttft_last_third_s")
"""Mean time to the first token of each third of the requests, in the order of their arrivals."""


def load_measures(simulation: Simulation, limits_s: Mapping[str, float]) -> dict[str, float | int | None]:
    """Returns the times (seconds) as ``METRIC_STATISTIC``, the number of failed requests, the goodput, and
    ``THIRDS``.

    Statistics of a time cover the requests that have it. ``limits_s``: metric -> limit, for the goodput.
    """
    rows = sorted(simulation.rows, key=lambda row: (row.arrival_at_s, row.request))
    found: dict[str, float | int | None] = {N_FAILED: sum(not row.is_completed for row in rows)}
    for metric in NAMES:
        over = stats(row.times[f"{metric}_s"] for row in rows)
        found |= {f"{metric}_{statistic}": over[statistic] for statistic in STATISTICS}
    found[GOODPUT] = goodput_rps(rows, limits_s)
    n = len(rows)
    for number, name in enumerate(THIRDS):
        part = rows[n * number // 3 : n * (number + 1) // 3]
        times_s = [row.times.ttft_s for row in part if row.times.ttft_s is not None]
        found[name] = math.fsum(times_s) / len(times_s) if times_s else None
    return found

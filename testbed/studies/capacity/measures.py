"""The measures of a run for its capacity: all times that objectives can limit, whether they grow, and costs."""

from __future__ import annotations

import hashlib
import math

import msgspec

from testbed.experiments.slo import NAMES, STATISTICS, Objectives
from testbed.results.requests import stats, values_of
from testbed.results.slo import goodput_rps
from testbed.simulator.answer import request_of
from testbed.simulator.engine import Simulation
from testbed.simulator.runs import fingerprint
from testbed.simulator.summary import simulated_costs
from testbed.studies.sweep.measures import GOODPUT

N_FAILED = "n_failed"
MEAN_TIME = "e2e_mean"
THIRDS = ("ttft_first_third_s", "ttft_second_third_s", "ttft_last_third_s")
"""Mean time to the first token of each third of the requests, in the order of their arrivals."""
FINGERPRINT = "fingerprint"
"""A number that is equal for two runs only if they are the same (``testbed.simulator.runs.fingerprint``)."""


def of_client(name: str, client: str) -> str:
    """Returns the name of a ``METRIC_STATISTIC`` over the requests of one client."""
    return f"{name}@{client}"


def load_measures(simulation: Simulation, objectives: Objectives) -> dict[str, float | int | None]:
    """Returns the times (seconds) as ``METRIC_STATISTIC``, the number of failed requests, the goodput, ``THIRDS``,
    ``FINGERPRINT``, and what the run cost, if that is known.

    Statistics of a time cover the completed requests. ``objectives`` are for the goodput. Where there are several
    clients, their metrics are there for each client, too, under ``of_client``.
    """
    rows = sorted(simulation.rows, key=lambda row: (row.arrival_at_s, row.request))
    found: dict[str, float | int | None] = {N_FAILED: sum(not row.is_completed for row in rows)}
    clients = simulation.case.experiment.problem.clients
    for metric in NAMES:
        over = stats(values_of(rows, f"{metric}_s"))
        found |= {f"{metric}_{statistic}": over[statistic] for statistic in STATISTICS}
        for client in clients if metric in objectives.common and len(clients) > 1 else ():
            over = stats(values_of([row for row in rows if row.client == client], f"{metric}_s"))
            found |= {of_client(f"{metric}_{statistic}", client): over[statistic] for statistic in STATISTICS}
    found |= simulated_costs(simulation)
    found[GOODPUT] = goodput_rps(rows, objectives)
    n = len(rows)
    for number, name in enumerate(THIRDS):
        part = rows[n * number // 3 : n * (number + 1) // 3]
        times_s = [row.times.ttft_s for row in part if row.times.ttft_s is not None]
        found[name] = math.fsum(times_s) / len(times_s) if times_s else None
    run = fingerprint(simulation.case, {"requests": [request_of(row) for row in rows]})
    found[FINGERPRINT] = int.from_bytes(hashlib.sha256(msgspec.json.encode(run)).digest()[:6])
    return found

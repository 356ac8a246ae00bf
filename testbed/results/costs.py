"""What a run's servers cost, and the energy and carbon dioxide of its output tokens (docs/metrics.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from testbed.experiments.experiment import Experiment
from testbed.experiments.hours import hours_by_server
from testbed.experiments.schema import Scenario
from testbed.records.requests import RequestRow
from testbed.records.summary import RunSummary
from testbed.results.hop_table import HopTable

COST, ENERGY, CARBON = "cost_per_million_tokens", "energy_j_per_token", "carbon_g_per_million_tokens"
COSTS = COST, ENERGY, CARBON


def costs_given(experiment: Experiment) -> tuple[str, ...]:
    """Return the names of the figures that the scenario gives prices or powers for."""
    costs = experiment.costs
    given = bool(costs.per_hour), bool(costs.power_w), bool(costs.power_w and costs.carbon_g_per_kwh)
    return tuple(name for name, is_given in zip(COSTS, given, strict=True) if is_given)


def costs_of(
    experiment: Experiment, rows: Sequence[RequestRow], hops: HopTable | None
) -> dict[str, float | None]:
    """Return the figures of ``costs_given`` by name; None if no token was made, or ``hops`` is not known.

    The time counts from the first arrival to the last end of any request, for each server while its ``hours``
    last. Tokens are all output tokens that arrived. A server needs its busy power while it has a step, with the
    waits behind other steps on the same server, and else its idle power.
    """
    names = costs_given(experiment)
    found: dict[str, float | None] = dict.fromkeys(names)
    n_tokens = sum(row.n_tokens_done for row in rows)
    began_at_s = min((row.arrived_at_s for row in rows if row.arrived_at_s is not None), default=0.0)
    ended_at_s = max((row.ended_at_s for row in rows if row.ended_at_s is not None), default=0.0)
    if not names or not n_tokens:
        return found
    costs = experiment.costs
    paid_s = _there_s(experiment, began_at_s, ended_at_s)
    if COST in found:
        cost = sum(price * time_s for price, time_s in zip(costs.per_hour, paid_s, strict=True)) / 3600
        found[COST] = cost / n_tokens * 1e6
    if ENERGY in found and hops is not None:
        energies_j = [
            idle_w * max(there_s, busy_s) + (busy_w - idle_w) * busy_s
            for (idle_w, busy_w), there_s, busy_s in zip(
                costs.power_w, paid_s, _busy_s(hops, len(paid_s)), strict=True
            )
        ]
        found[ENERGY] = sum(energies_j) / n_tokens
        if CARBON in found:
            each = zip(energies_j, costs.carbon_g_per_kwh, strict=True)
            grams = sum(joules / 3.6e6 * grams_per_kwh for joules, grams_per_kwh in each)
            found[CARBON] = grams / n_tokens * 1e6
    return found


def add_costs(
    summary: RunSummary, experiment: Experiment, rows: Sequence[RequestRow], hops: HopTable | None
) -> None:
    """Add the figures of ``costs_of`` to ``summary``."""
    for name, value in costs_of(experiment, rows, hops).items():
        setattr(summary, name, value)


def _there_s(experiment: Experiment, began_at_s: float, ended_at_s: float) -> list[float]:
    """Return for each server the seconds of this period in which its hours last: all if it has none."""
    scenario = experiment.tables
    hours = hours_by_server(scenario) if isinstance(scenario, Scenario) else {}
    return [
        hours[j].open_until_s(ended_at_s) - hours[j].open_until_s(began_at_s)
        if j in hours
        else ended_at_s - began_at_s
        for j in range(experiment.problem.n_servers)
    ]


def _busy_s(hops: HopTable, n_servers: int) -> list[float]:
    """Return for each server the seconds in which it had at least one step."""
    found = [0.0] * n_servers
    for server in range(n_servers):
        is_own = hops.server == server
        if not np.any(is_own):
            continue
        begins_s, ends_s = hops.arrived_at_s[is_own], hops.departed_at_s[is_own]
        order = np.argsort(begins_s, kind="stable")
        begins_s, until_s = begins_s[order], np.maximum.accumulate(ends_s[order])
        gaps_s = np.maximum(begins_s[1:] - until_s[:-1], 0.0)
        found[server] = float(until_s[-1] - begins_s[0] - gaps_s.sum())
    return found


def costs_text(found: Mapping[str, float | None]) -> list[str]:
    """Return a line with the figures that are known, if there are any; ``found`` is by the names of ``COSTS``."""
    words = {
        COST: "cost {:.4g} per million output tokens",
        ENERGY: "{:.4g} J per output token",
        CARBON: "{:.4g} g of carbon dioxide per million output tokens",
    }
    known = [words[name].format(value) for name, value in found.items() if value is not None]
    return [", ".join(known)] if known else []

"""What each client asks for, and when: shares of all requests, curves over a day, lengths and objectives of its own."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from testbed.experiments.hours import DAY_S, time_of_day, zone_s
from testbed.experiments.lengths import LengthTable
from testbed.experiments.problems import Key, KeyedError
from testbed.experiments.schema import ClientsTable, Scenario
from testbed.experiments.slo import parse_objectives
from testbed.experiments.workload_tables import WorkloadTable


class Curve(NamedTuple):
    """Rates over time in proportion to each other: ``values`` evenly spaced over ``period_s``, and repeated.

    The run begins when the curve has gone on for ``ahead_s``.
    """

    values: tuple[float, ...]
    period_s: float
    ahead_s: float = 0.0

    def over_mean(self, at_s: float) -> float:
        """Return the value at ``at_s`` of the run over the mean of all."""
        number = int((at_s + self.ahead_s) % self.period_s / self.period_s * len(self.values))
        return self.values[number % len(self.values)] * len(self.values) / sum(self.values)

    def pieces(self) -> Iterator[tuple[float, float]]:
        """Yield (from when on in s of the run, value), without end; the first is from 0 s or before."""
        n = len(self.values)
        first = int(self.ahead_s / self.period_s * n)
        for number in itertools.count(first):
            yield number * self.period_s / n - self.ahead_s, self.values[number % n]


def _begins(piece: tuple[Curve, tuple[float, float]]) -> float:
    return piece[1][0]


@dataclass(frozen=True)
class Demand:
    """What each client, by its number, asks for.

    ``weights``: requests in proportion to each other; ``None``: all as many. ``curves``: ``None`` for a client whose rate
    does not change. ``inputs``, ``outputs``: lengths in tokens of a client's own requests; ``None`` for a client that has
    the workload's.
    """

    n_clients: int
    weights: tuple[float, ...] | None = None
    curves: tuple[Curve | None, ...] = ()
    inputs: tuple[LengthTable | None, ...] = ()
    outputs: tuple[LengthTable | None, ...] = ()

    @property
    def is_constant(self) -> bool:
        """Whether no client has a curve."""
        return not any(self.curves)

    def rates(self, rate: float) -> Iterator[tuple[float, float]]:
        """Yield (from when on in s, requests per second of all clients), whose mean is ``rate``; without end for curves."""
        weights = self.weights or (1.0,) * self.n_clients
        shares: dict[Curve | None, float] = {}
        for curve, weight in zip(self.curves or (None,) * self.n_clients, weights, strict=True):
            shares[curve] = shares.get(curve, 0.0) + weight
        total = sum(shares.values())
        means = {curve: rate * (share / total) for curve, share in shares.items()}
        steady = means.pop(None, 0.0)
        if not means:
            yield 0.0, rate
            return
        now: dict[Curve, float] = {}
        pieces = heapq.merge(
            *(zip(itertools.repeat(curve), curve.pieces()) for curve in means if curve), key=_begins
        )
        for at_s, changes in itertools.groupby(pieces, key=_begins):
            for curve, (_, value) in changes:
                now[curve] = means[curve] * value / (sum(curve.values) / len(curve.values))
            if len(now) == len(means):
                yield max(at_s, 0.0), steady + sum(now.values())

    def clients(self, arrives_at_s: Sequence[float], choice: random.Random) -> list[int]:
        """Draw the client of each request: in proportion to all clients' rates when it comes."""
        everybody = range(self.n_clients)
        if len(set(self.curves)) > 1:
            base = self.weights or (1.0,) * self.n_clients
            found = []
            for at_s in arrives_at_s:
                over_mean = (1.0 if curve is None else curve.over_mean(at_s) for curve in self.curves)
                now = [weight * factor for weight, factor in zip(base, over_mean, strict=True)]
                found += choice.choices(
                    everybody, now if any(now) else base
                )  # at the very end of a time with requests
            return found
        return self.usual_clients(len(arrives_at_s), choice)

    def usual_clients(self, n: int, choice: random.Random) -> list[int]:
        """Draw ``n`` clients in proportion to the mean rates of all."""
        if self.weights is None:
            return [choice.randrange(self.n_clients) for _ in range(n)]
        return choice.choices(range(self.n_clients), self.weights, k=n)

    def own_lengths(self, column: int) -> Mapping[int, LengthTable]:
        """Return the input (``column`` 0) or output (1) lengths of the clients that have their own, by number."""
        specs = (self.inputs, self.outputs)[column]
        return {client: spec for client, spec in enumerate(specs) if spec is not None}

    def lengths_in_use(self, column: int, common: LengthTable | None) -> list[LengthTable | None]:
        """Return all lengths of some client, of which those without their own have ``common``."""
        own = self.own_lengths(column)
        return [*own.values(), *([common] if len(own) < self.n_clients else [])]


def demand_of(scenario: Scenario) -> Demand:
    """Return what the scenario's clients ask for. Raises ``KeyedError`` for keys that contradict each other."""
    groups, workload = scenario.clients, scenario.workload
    curves = [_curve(group, index, workload, scenario.begins_at) for index, group in enumerate(groups)]
    if workload.curve_period is not None and not any(curves):
        raise KeyedError(
            ("workload", "curve_period"), "is of a curve; give workload.curve, or leave this out"
        )
    for index, group in enumerate(groups):
        _check_lengths(group, index, workload)
    every = [(group, curve) for group, curve in zip(groups, curves, strict=True) for _ in range(group.count)]
    weights = [group.weight for group, _ in every if group.weight is not None]
    return Demand(
        len(every),
        tuple(weights) if len(weights) == len(every) else None,
        tuple(curve for _, curve in every),
        tuple(group.n_input_tokens for group, _ in every),
        tuple(group.n_output_tokens for group, _ in every),
    )


def _check_lengths(group: ClientsTable, index: int, workload: WorkloadTable) -> None:
    for key in ("n_input_tokens", "n_output_tokens"):
        if getattr(group, key) is None:
            continue
        why = ""
        if workload.turns is not None:
            why = "workload.turns makes conversations, whose messages have the same lengths for all clients"
        elif workload.arrivals in ("trace", "listed") or getattr(workload, key) is None:
            why = "the workload's requests have recorded lengths"
        if why:
            raise KeyedError(("clients", index, key), f"is given, and {why}; leave it out")


def _curve(group: ClientsTable, index: int, workload: WorkloadTable, begins_at: str) -> Curve | None:
    values, table = group.curve or workload.curve, ("clients", index)
    if group.curve is not None:
        if workload.arrivals in ("trace", "listed"):
            raise KeyedError(
                (*table, "curve"), "is for generated arrivals, and these are recorded; leave it out"
            )
        if workload.changes:
            raise KeyedError(
                (*table, "curve"), "sets the rates, and so does workload.changes; keep one of them"
            )
        if not any(group.curve):
            raise KeyedError((*table, "curve"), "is 0 at all times; at least one value must be above 0")
    if values is None:
        if group.time_zone is not None:
            raise KeyedError((*table, "time_zone"), "is that of a curve; give one, or leave it out")
        return None
    period_s = workload.curve_period or DAY_S
    if group.time_zone is None:
        return Curve(tuple(values), period_s)
    local_s = (time_of_day(begins_at) or 0.0) + zone_s(group.time_zone, (*table, "time_zone"))
    return Curve(tuple(values), period_s, local_s % period_s)


def objectives_in(slo: str | None, key: Key) -> tuple[tuple[str, float], ...]:
    """Return ``Problem.objectives_s``. Raises ``KeyedError``."""
    try:
        return tuple(parse_objectives(slo).items()) if slo is not None else ()
    except ValueError as error:
        raise KeyedError(key, str(error)) from error


def own_objectives(groups: Sequence[ClientsTable]) -> tuple[tuple[tuple[str, float], ...] | None, ...]:
    """Return ``Problem.own_objectives_s``. Raises ``KeyedError``."""
    if all(group.slo is None for group in groups):
        return ()
    return tuple(
        None if group.slo is None else objectives_in(group.slo, ("clients", index, "slo"))
        for index, group in enumerate(groups)
        for _ in range(group.count)
    )

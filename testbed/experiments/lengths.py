"""Lengths of requests in tokens: what draws them, the longest that can occur, and their description."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from testbed.experiments.workload_tables import Choice, Lognormal, Quantiles, Uniform

LengthTable = int | Uniform | Lognormal | Choice | Quantiles


def drawer(table: LengthTable, rng: random.Random) -> Callable[[], int]:
    if isinstance(table, int):
        return lambda: table
    if isinstance(table, Uniform):
        return lambda: rng.randint(table.low, table.high)
    if isinstance(table, Choice):
        return lambda: rng.choices(table.values, table.weights)[0]
    if isinstance(table, Quantiles):
        mu, sigma, most = math.log(table.p50), table.sigma, table.most
    else:
        mu, sigma, most = math.log(table.mean) - table.sigma**2 / 2, table.sigma, table.max
    return lambda: min(max(round(rng.lognormvariate(mu, sigma)), 1), most)


def longest(table: LengthTable | None, seen: list[int]) -> int:
    """Return the length that the placement is designed for: the largest that can occur."""
    if isinstance(table, int):
        return table
    if isinstance(table, Uniform):
        return table.high
    if isinstance(table, Lognormal):
        return table.max
    if isinstance(table, Quantiles):
        return table.most
    return max(table.values if isinstance(table, Choice) else seen)


def in_words(table: LengthTable | None) -> str:
    """Describe a length in words."""
    if table is None:
        return "as recorded"
    if isinstance(table, Uniform):
        return f"{table.low} to {table.high}"
    if isinstance(table, Lognormal):
        return f"lognormal, mean {table.mean:g}, at most {table.max}"
    if isinstance(table, Quantiles):
        return f"lognormal, p50 {table.p50}, p95 {table.p95}, at most {table.most}"
    if isinstance(table, Choice):
        return "of " + ", ".join(map(str, table.values))
    return str(table)

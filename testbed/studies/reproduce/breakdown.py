"""How much of the gain from PETALS to the proposed policy comes from what.

What a change brings depends on what was changed before it. The Shapley value is its mean over all
orders of making the changes, so that the shares add up to the whole gain; the range over the orders is
given with it, and two orders step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from testbed.studies.reproduce.runs import FACTORS
from testbed.studies.reproduce.windows import STEPS

PLACEMENT_FIRST = ("order", "number", "windows", "routing", "setup")
SETUP_FIRST = PLACEMENT_FIRST[::-1]

Worth = dict[frozenset[str], float]
"""Mean time per token in seconds by what is taken from the proposed policy."""


class Share(NamedTuple):
    """Seconds per token that a change saves: mean over all orders, and the extremes (negative: costs)."""

    mean_s: float
    least_s: float
    most_s: float


class Breakdown(NamedTuple):
    """``before_s`` (PETALS) to ``after_s`` (proposed): ``shares`` by factor, ``groups`` with placement as one.

    ``paths``: savings one after the other. ``setup_alone_s``: PETALS with the proposed policy's session setup;
    ``without_setup_s``: the proposed policy with PETALS' (both ``None`` where session setups do not count).

    ``n_runs`` of ``n_all`` runs count: those in which every combination has a placement.
    """

    before_s: float
    after_s: float
    groups: dict[str, Share]
    shares: dict[str, Share]
    paths: dict[tuple[str, ...], list[float]]
    setup_alone_s: float | None
    without_setup_s: float | None
    n_runs: int
    n_all: int


def break_down(records: Sequence[dict[str, Any]], *, with_setup: bool) -> Breakdown | None:
    """The breakdown over runs of one setting; ``with_setup``: session setups count and are a factor.

    ``None`` if there is no run in which every combination has a placement.
    """
    factors = FACTORS if with_setup else tuple(f for f in FACTORS if f != "setup")
    worths = [worth for r in records if (worth := _worth(r, factors, with_setup=with_setup)) is not None]
    if not worths:
        return None
    mean = {on: math.fsum(w[on] for w in worths) / len(worths) for on in worths[0]}
    paths = {
        path: _savings(mean, path)
        for path in (tuple(f for f in order if f in factors) for order in (PLACEMENT_FIRST, SETUP_FIRST))
    }
    groups = {"placement": STEPS, **{f: (f,) for f in factors if f not in STEPS}}

    def worth_s(on: frozenset[str]) -> float:
        return mean[frozenset(f for group in on for f in groups[group])]

    everything = frozenset(factors)
    return Breakdown(
        before_s=mean[frozenset()],
        after_s=mean[everything],
        groups=shapley(tuple(groups), worth_s),
        shares=shapley(factors, mean.__getitem__),
        paths=paths,
        setup_alone_s=mean[frozenset({"setup"})] if with_setup else None,
        without_setup_s=mean[everything - {"setup"}] if with_setup else None,
        n_runs=len(worths),
        n_all=len(records),
    )


def _worth(record: dict[str, Any], factors: Sequence[str], *, with_setup: bool) -> Worth | None:
    worth: Worth = {}
    for row in record["factors"]:
        if "infeasible" in row:
            return None
        on = frozenset(row["on"])
        if not with_setup and row["setup"] == "none":
            worth[on] = row["per_token_s"]
        elif with_setup and row["setup"] != "none":
            worth[on | {"setup"} if row["setup"] == "proposed" else on] = row["per_token_s"]
    assert len(worth) == 2 ** len(factors), "every combination is in the record"
    return worth


def _savings(worth: Worth, path: Iterable[str]) -> list[float]:
    on: frozenset[str] = frozenset()
    saved = []
    for factor in path:
        saved.append(worth[on] - worth[on | {factor}])
        on |= {factor}
    return saved


def shapley(factors: Sequence[str], worth_s: Callable[[frozenset[str]], float]) -> dict[str, Share]:
    """For each factor its saving, averaged over all orders of the factors, and its extremes."""
    n = len(factors)
    weight = {
        size: math.factorial(size) * math.factorial(n - 1 - size) / math.factorial(n) for size in range(n)
    }
    shares = {}
    for factor in factors:
        others = [f for f in factors if f != factor]
        savings = {
            frozenset(on): worth_s(frozenset(on)) - worth_s(frozenset(on) | {factor})
            for size in range(n)
            for on in combinations(others, size)
        }
        mean_s = math.fsum(weight[len(on)] * saving for on, saving in savings.items())
        shares[factor] = Share(mean_s, min(savings.values()), max(savings.values()))
    return shares

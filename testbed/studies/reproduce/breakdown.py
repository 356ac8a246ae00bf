"""How much each change contributes to the gain from PETALS to the proposed policy.

How much a change saves depends on the changes made before it. Its Shapley value is the mean saving over all
orders of the changes; the values of all changes add up to the whole gain. With it come the least and the
largest saving in any order, and the savings of two orders step by step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

from testbed.studies.reproduce.runs import FACTORS, changed
from testbed.studies.reproduce.windows import STEPS
from testbed.studies.sweep.runs import Measures

PLACEMENT_FIRST = ("order", "number", "windows", "routing", "setup")
SETUP_FIRST = PLACEMENT_FIRST[::-1]

Worth = dict[frozenset[str], float]
"""Set of factors that are as in the proposed policy (the others as in PETALS) -> mean time per token in
seconds.
"""


class Share(NamedTuple):
    """Seconds per token that a change saves: mean over all orders, least and most. Negative: the change costs
    time.
    """

    mean_s: float
    least_s: float
    most_s: float


class Breakdown(NamedTuple):
    """The breakdown of a setting's gain. Times are mean seconds per token.

    - ``before_s``: PETALS; ``after_s``: the proposed policy
    - ``shares``: by factor; ``groups``: the same with placement as one factor
    - ``paths``: order of the changes -> the saving of each, one after the other
    - ``setup_alone_s``: PETALS with the proposed policy's session setup; ``without_setup_s``: the proposed
      policy with that of PETALS. Both are None if session setups do not count
    - ``n_runs``: the runs that are used, of ``n_all``: those in which every combination has a placement
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


def break_down(runs: Sequence[Measures], *, with_setup: bool) -> Breakdown | None:
    """Returns the breakdown over the runs of one setting.

    ``with_setup``: session setups count and are a factor. None if no run has a placement for every
    combination.
    """
    factors = FACTORS if with_setup else tuple(f for f in FACTORS if f != "setup")
    worths = [worth for run in runs if (worth := _worth(run, factors, with_setup=with_setup)) is not None]
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
        n_all=len(runs),
    )


def _worth(run: Measures, factors: Sequence[str], *, with_setup: bool) -> Worth | None:
    worth: Worth = {}
    for size in range(len(factors) + 1):
        for on in map(frozenset, combinations(factors, size)):
            setup = ("proposed" if "setup" in on else "petals") if with_setup else "none"
            value = run.get(f"{changed(on - {'setup'})}/{setup}/per_token_s")
            if value is None:
                return None
            worth[on] = value
    return worth


def _savings(worth: Worth, path: Iterable[str]) -> list[float]:
    on: frozenset[str] = frozenset()
    saved = []
    for factor in path:
        saved.append(worth[on] - worth[on | {factor}])
        on |= {factor}
    return saved


def shapley(factors: Sequence[str], worth_s: Callable[[frozenset[str]], float]) -> dict[str, Share]:
    """Returns for each factor its saving, averaged over all orders of the factors, and its extremes.

    ``worth_s`` returns the time (seconds) with a set of factors changed.
    """
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

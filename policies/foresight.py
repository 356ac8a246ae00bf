"""Foresight's placement: CG-BP's, unless trials show that another one is clearly better."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import ClassVar

from policies.cgbp import CgBp
from policies.composition import ChainComposition
from policies.foresight_routing import ForesightRouting
from policies.foresight_sharing import SharedSearch
from policies.greedy import plan
from policies.interfaces import PlacementPolicy
from policies.link_waits import LinkWaits
from policies.neighbours import Neighbours, Ranges
from policies.petals import choose_ranges
from policies.pipelines import SeparatePipelines, Swarm
from policies.problem import InfeasiblePlacement, Placement, PolicyError, Problem
from policies.search import STATED, STREAM_REQUESTS, Load, Trials, candidate_concurrencies
from policies.waiting import ROUNDING_RATIO
from policies.wsrr import WsRr

LOADS = (
    STATED,
    Load("rush", rate_ratio=3.0),
    Load("bursts of mixed lengths", shape=0.25, length_ratios=(0.25, 0.5, 1.0)),
)
"""The loads on which placements are tried."""

_EXCHANGE_RATIO = 0.2
"""On mixed lengths a placement may lose this share of its gain on the stated load. Lengths are stated as
maxima, and room for the longest requests makes shorter ones a little slower."""

_SCREENING = ("fit 0",)
_FITTING = ("fit 1", "fit 2", "fit 3")
_VALIDATION = tuple(f"validation {i}" for i in range(8))
_T_95 = 1.895
"""Student's t, one-sided 95 %, for seven degrees of freedom (eight validation streams)."""

_RIVALS = (ChainComposition, SeparatePipelines, Swarm)
"""Policies whose placements are tried, too. They may use only a few fast servers, which CG-BP never does."""
_N_FINALISTS = 4

Times = list[list[float]]
"""Mean time per token in seconds, by load and stream."""


@dataclass
class ForesightPlacement(PlacementPolicy):
    """The proposed placement, unless another one is clearly better on simulated arrivals (own).

    CG-BP computes |R| by a formula, and from it every server's m_j. Foresight tries candidates instead:

    - CG-BP at every |R| that changes some m_j, and the same m_j on other windows
    - the placements of GBP-CR, separate pipelines and SWARM
    - small changes of the best of these

    Each is simulated with Foresight's routing on the same synthetic arrivals: the stated load, three times
    its rate, and bursts of mixed lengths. The best few are then compared with CG-BP (under Foresight's
    routing and under WS-RR) on other arrivals. A candidate replaces CG-BP only if its mean time per token
    there

    - is no larger on the stated load and on three times its rate,
    - is larger on mixed lengths by at most a fifth of the gain on the stated load, and
    - is smaller over all three loads at 95 % (paired test).

    If CG-BP's |R| does not fit but a smaller one does, Foresight returns a placement instead of refusing.
    If servers share their time among sessions, messages wait for links, or past requests of several lengths
    are known, ``foresight_sharing`` searches instead.
    The same problem always gets the same placement. ``docs/foresight.md`` has the results.
    """

    name: str = "foresight"
    counts_drafts: ClassVar[bool] = True
    sees_join_order: ClassVar[bool] = False
    searches: ClassVar[bool] = True

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Searches for a placement. ``design_concurrency`` is the |R| of the CG-BP placement to compare with.

        Raises ``InfeasiblePlacement`` if none of the tried policies has a placement, and ``PolicyError`` if
        ``design_concurrency`` is below 1 and servers do not share their time.
        """
        differ = len(set(problem.length_samples)) > 1
        if problem.batching != "none" or differ or LinkWaits.of(problem) is not None:
            return self._best_shared(problem, design_concurrency)
        return _Search(problem, self.name).run(design_concurrency)

    def _best_shared(self, problem: Problem, design_concurrency: int | None) -> Placement:
        return SharedSearch(problem, self.name).run(design_concurrency)


class _Search:
    """One search. Counts limit it, not a clock: more servers or longer streams mean fewer candidates."""

    def __init__(self, problem: Problem, name: str) -> None:
        self._problem = problem
        self._name = name
        self._trials = Trials(problem, ForesightRouting().bind, LOADS)
        self._proposed = Trials(problem, WsRr().bind, LOADS)
        share = STREAM_REQUESTS / self._trials.n_requests
        self._n_concurrencies = max(round(share * min(600 // problem.n_servers, 40)), 4)
        self._n_draws = round(share * min(1200 // problem.n_servers, 100))

    def run(self, design_concurrency: int | None) -> Placement:
        refusal = None
        try:
            baseline = CgBp().place(self._problem, design_concurrency)
            baseline = replace(baseline, policy=self._name)
        except InfeasiblePlacement as infeasible:
            baseline, refusal = None, infeasible
        seeds = self._seeds(baseline)
        if refusal is not None and not seeds:
            raise refusal
        finalists = self._finalists(seeds, baseline or seeds[0])
        if baseline is None:
            return finalists[0]
        return next((f for f in finalists if self._clearly_better(f, baseline)), baseline)

    def _seeds(self, baseline: Placement | None) -> list[Placement]:
        """Returns the placements to try first.

        They are CG-BP's at every |R| to be tried, those with its m_j on the windows that PETALS would choose
        in CG-BP's order, and the rivals'.
        """
        problem = self._problem
        seeds: dict[Ranges, Placement] = {}
        # The largest |R| first: of equally good ones it is kept, since the load may exceed what was tried.
        for concurrency in reversed(candidate_concurrencies(problem, self._n_concurrencies)):
            greedy = plan(problem, concurrency)
            counts = [held.n_blocks for held in greedy.ranges]
            for ranges in (greedy.ranges, choose_ranges(problem, counts, greedy.order)):
                placement = self._placed(ranges, concurrency)
                if not placement.uncovered(problem.model.n_blocks):
                    seeds.setdefault(ranges, placement)
        for rival in _RIVALS:
            with suppress(PolicyError):
                ranges = rival().place(problem).ranges
                if self._keeps_caps(ranges):
                    seeds.setdefault(ranges, self._placed(ranges, None))
        if baseline is not None:
            seeds.pop(baseline.ranges, None)
        return list(seeds.values())

    def _keeps_caps(self, ranges: Ranges) -> bool:
        """Whether ranges keep to ``ServerSpec.block_cap``, as CG-BP's do."""
        pairs = zip(self._problem.servers, ranges, strict=True)
        return all(spec.block_cap is None or held.n_blocks <= spec.block_cap for spec, held in pairs)

    def _placed(self, ranges: Ranges, concurrency: int | None) -> Placement:
        """Returns the placement with these ranges; all memory that the blocks leave is for caches."""
        return Placement(self._name, ranges, self._problem.room_bytes(ranges), concurrency)

    def _finalists(self, seeds: list[Placement], reference: Placement) -> list[Placement]:
        """Returns the best seeds and the result of local search from the best, ranked on other streams."""
        screen = _Ranking(self._trials, reference, _SCREENING)
        best = sorted([*seeds, reference], key=screen.of)[:_N_FINALISTS]
        best.insert(0, self._improved(best[0], screen))
        unlike = list({placement.ranges: placement for placement in best}.values())
        return sorted(unlike, key=_Ranking(self._trials, reference, _FITTING).of)

    def _improved(self, placement: Placement, ranking: _Ranking) -> Placement:
        """Returns the result of local search, which keeps a change if it ranks better."""
        neighbours = Neighbours(self._problem, random.Random("foresight"))
        rank = ranking.of(placement)
        for _ in range(self._n_draws):
            ranges = neighbours.draw(placement.ranges)
            if ranges is not None:
                changed = self._placed(ranges, placement.design_concurrency)
                changed_rank = ranking.of(changed)
                if changed_rank < rank:
                    placement, rank = changed, changed_rank
        return placement

    def _clearly_better(self, placement: Placement, baseline: Placement) -> bool:
        """Whether ``placement`` beats ``baseline`` on the validation streams, under both routings."""
        times_s = self._trials.per_token_s(placement, _VALIDATION)
        return all(
            _beats(times_s, trials.per_token_s(baseline, _VALIDATION))
            for trials in (self._trials, self._proposed)
        )


class _Ranking:
    """Ranks placements against ``reference``: acceptable ones first, then by mean ratio over the loads."""

    def __init__(self, trials: Trials, reference: Placement, streams: Sequence[str]) -> None:
        self._trials = trials
        self._streams = streams
        self._reference_s = [fmean(row) for row in trials.per_token_s(reference, streams)]

    def of(self, placement: Placement) -> tuple[bool, float]:
        """Returns the rank of ``placement``; smaller is better."""
        times_s = self._trials.per_token_s(placement, self._streams)
        ratios = [_ratio(fmean(row), other) for row, other in zip(times_s, self._reference_s, strict=True)]
        return not _acceptable(ratios), fmean(ratios)


def _acceptable(ratios: Sequence[float]) -> bool:
    """Whether times on the loads, as ratios to the reference's, are at most 1; see ``_EXCHANGE_RATIO``."""
    stated, rush, mixed = ratios
    may_lose = _EXCHANGE_RATIO * max(1 - stated, 0.0)
    return max(stated, rush, mixed - may_lose) <= 1 + ROUNDING_RATIO


def _ratio(own_s: float, other_s: float) -> float:
    """Returns ``own_s / other_s``; 1 if they are equal, even if both are 0 or infinite."""
    if own_s == other_s:
        return 1.0
    return own_s / other_s if other_s else math.inf


def _beats(times_s: Times, rival_s: Times) -> bool:
    """Whether times are acceptable on every load and, at 95 %, smaller over all loads.

    The test is on the mean ratio over the loads, paired by stream.
    """
    loads = list(zip(times_s, rival_s, strict=True))
    if not _acceptable([_ratio(fmean(own), fmean(other)) for own, other in loads]):
        return False
    by_load = [list(map(_ratio, own, other)) for own, other in loads]
    gains = [1 - fmean(ratios) for ratios in zip(*by_load, strict=True)]
    return fmean(gains) > _T_95 * stdev(gains) / math.sqrt(len(gains))

"""Variants of a scenario, and their judgement from the results of their runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from testbed.errors import RunError
from testbed.experiments.slo import Objective
from testbed.studies.advise.candidates import Addition, Counts, Fleet
from testbed.studies.advise.search import Score, Search, without_one
from testbed.studies.capacity.verdict import PLACEMENT, REQUESTS, Verdict, verdict_of
from testbed.studies.sweep.contrast import Cell
from testbed.studies.sweep.runs import Record, Run
from testbed.studies.sweep.table import Row
from testbed.terminal import say


class Variant(NamedTuple):
    """The scenario with ``counts`` of each candidate added and the server of index ``lost`` removed, with
    ``seeds``.
    """

    counts: Counts
    seeds: range
    lost: int | None = None


class VariantVerdict(NamedTuple):
    """The verdict on a variant's runs with all seeds. ``error``: why one of them failed; empty if
    none did.
    """

    verdict: Verdict
    cell: Cell

    @property
    def error(self) -> str:
        return self.verdict.error

    @property
    def n_without(self) -> float:
        """Share of the seeds that have no placement, 0 to 1."""
        return self.verdict.excess[PLACEMENT].mean

    @property
    def n_failed(self) -> float | None:
        """Number of requests that fail, mean over seeds; None if no seed has a placement."""
        failed = self.verdict.excess.get(REQUESTS)
        return None if failed is None else failed.mean


class Judging:
    """Decides which runs are done, until ``search`` has found the best combination and all reported variants
    are judged.

    ``search_seeds`` serve to choose the best combination, ``seeds`` to measure what is reported. If the seeds
    that chose the best also measured it, it would look too good: the best of many combinations is also the
    luckiest.

    ``fleets``: by seed, for both kinds of seeds. ``objectives``: limits to keep if ``is_slo``, else one
    metric to lower. ``losses``: indices of servers whose loss is judged. ``result`` returns the result of a
    record that a worker has returned.
    """

    def __init__(
        self,
        candidates: Sequence[Addition],
        fleets: Mapping[int, Fleet],
        seeds: range,
        search_seeds: range,
        overrides: Sequence[str],
        policy: str | None,
        objectives: Sequence[Objective],
        is_slo: bool,
        search: Search,
        losses: Sequence[int],
        result: Callable[[Record], Record],
    ) -> None:
        self._candidates, self._fleets, self._overrides = candidates, fleets, tuple(overrides)
        self._policy, self._objectives, self._is_slo, self._result = policy, objectives, is_slo, result
        self._search, self._losses = search, losses
        self._seeds, self._search_seeds = seeds, search_seeds
        self._steps = self._all_steps()
        self._asked: list[Variant] = []
        self._records: dict[Run, Record | None] = {}
        self.judged: dict[Variant, VariantVerdict] = {}
        self.best: Counts = ()

    @property
    def none(self) -> Counts:
        return (0,) * len(self._candidates)

    @property
    def scores(self) -> dict[Counts, Score]:
        """The scores of all combinations that the search has asked for so far."""
        searched = ((v, judged) for v, judged in self.judged.items() if v.seeds == self._search_seeds)
        return {variant.counts: self._score(judged) for variant, judged in searched}

    def measured(self, counts: Counts, lost: int | None = None) -> Variant:
        return Variant(counts, self._seeds, lost)

    def searched(self, counts: Counts) -> Variant:
        return Variant(counts, self._search_seeds)

    def run(self, variant: Variant, seed: int) -> Run:
        changes = self._fleets[seed].changes(self._candidates, variant.counts, variant.lost)
        return Run((*self._overrides, *changes), self._policy, seed)

    def begin(self) -> list[list[Run]]:
        """Returns the first runs, in one group per variant."""
        return self._go_on()

    def more(self, run: Run, record: Record) -> list[list[Run]]:
        """Record a result. Returns the next groups of runs if it was the last one that was pending."""
        self._records[run] = self._result(record)
        return [] if None in self._records.values() else self._go_on()

    def severity(self, lost: int) -> tuple[float, ...]:
        """Returns a key to sort losses by: the worse the loss, the larger. A loss that cannot be judged is
        smallest.
        """
        judged = self.judged[self.measured(self.none, lost)]
        return () if judged.error else self._score(judged).badness

    def _go_on(self) -> list[list[Run]]:
        groups: list[list[Run]] = []
        while not groups:
            for variant in self._asked:
                self._judge(variant)
            try:
                self._asked = [v for v in next(self._steps) if v not in self.judged]
            except StopIteration:
                self._asked = []
                break
            for variant in self._asked:
                runs = [
                    run for seed in variant.seeds if (run := self.run(variant, seed)) not in self._records
                ]
                self._records |= dict.fromkeys(runs)
                groups += [runs] if runs else []
        return groups

    def _all_steps(self) -> Generator[list[Variant], None, None]:
        singles = [tuple(int(i == j) for j in range(len(self.none))) for i in range(len(self.none))]
        yield [
            *map(self.measured, [self.none, *singles]),
            *(self.measured(self.none, lost) for lost in self._losses),
        ]
        sent: dict[Counts, Score] | None = None
        while True:
            try:
                wanted = next(self._search) if sent is None else self._search.send(sent)
            except StopIteration as end:
                self.best = end.value
                break
            yield [*map(self.searched, wanted)]
            sent = self.scores
        yield [*map(self.measured, [self.best, *without_one(self.best)])]

    def _judge(self, variant: Variant) -> None:
        runs = [self.run(variant, seed) for seed in variant.seeds]
        records = [record for run in runs if (record := self._records[run]) is not None]
        verdict = verdict_of(0.0, 0, records, self._objectives)
        name = self.name(variant)
        if verdict.error and variant.lost is None:
            raise RunError(f"{name}: {verdict.error}")
        rows = [Row({}, name, run.seed, record) for run, record in zip(runs, records, strict=True)]
        self.judged[variant] = VariantVerdict(verdict, Cell({}, name, rows))
        say(f"{name} ({over(variant.seeds)}): {self._in_words(verdict)}")

    def _in_words(self, verdict: Verdict) -> str:
        if verdict.error or verdict.reason:
            return verdict.error or f"no placement: {verdict.reason}"
        values = (f"{name} {value.mean:.4g} s" for name, value in verdict.values.items())
        return ", ".join(values) or "all requests fail"

    def name(self, variant: Variant) -> str:
        """Returns the variant in words, for example ``2 a100@Cluster1`` or ``without server3``."""
        if variant.lost is not None:
            fleet = self._fleets[self._seeds[0]]
            return f"without {fleet.servers[variant.lost]['name']}"
        return counted_names(self._candidates, variant.counts) or "as it is"

    def _score(self, judged: VariantVerdict) -> Score:
        """Returns the score. With objectives, ``value`` is the largest ratio by which one exceeds its
        limit.
        """
        verdict = judged.verdict
        if self._is_slo:
            value = max(verdict.ratios.values(), default=math.inf)
        else:
            values = verdict.values.values()
            value = max((of.mean for of in values), default=math.inf)
        failed = math.inf if judged.n_failed is None else judged.n_failed
        return Score(self._is_slo and verdict.is_kept, judged.n_without, failed, value)


def counted_names(candidates: Sequence[Addition], counts: Counts) -> str:
    """Returns a combination in words, for example ``2 a100@Cluster1 + 1 mig-1g@Cluster0``; empty for none."""
    return " + ".join(f"{n} {c.name}" for c, n in zip(candidates, counts, strict=True) if n)


def over(seeds: Sequence[int]) -> str:
    """Returns consecutive seeds in words."""
    return f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {seeds[0]} to {seeds[-1]}"


def numbers(of: Any) -> tuple[float | None, float | None]:
    """Returns mean and half-width of a ``Mean`` or ``Difference``; None for each that is missing."""
    if of is None:
        return None, None
    return of.mean, None if math.isnan(of.half_width) else of.half_width

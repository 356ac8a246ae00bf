"""A share of ``python -m benchmarks chaos``: whatever disturbs a drawn system, the invariants hold."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.stress import chaos
from tests.stress.chaos_mutations import MUTATIONS, ROOT, Mutation
from tests.support.effort import n_drawn

N_SEEDS = n_drawn(30)
"""Each takes a third of a second."""

tried = functools.cache(chaos.try_seed)


@pytest.mark.parametrize("tenth", range(10))
def test_seeds_hold_every_invariant(tenth: int) -> None:
    for seed in range(tenth, N_SEEDS, 10):
        outcome = tried(seed)
        assert not outcome.broken, f"python -m benchmarks chaos --seeds 1 --first {seed}: {outcome.broken}"


def test_a_case_is_the_same_whenever_it_is_drawn_and_most_can_be_played() -> None:
    outcomes = [tried(seed) for seed in range(10)]
    played = [outcome.seed for outcome in outcomes if outcome.played]
    assert len(played) >= 3
    assert sum(outcome.counts["completed"] for outcome in outcomes) > 10
    assert chaos.case_of(played[0]) == chaos.case_of(played[0])


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_line_that_a_mutation_breaks_is_in_its_file_once(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1


def test_a_broken_promise_is_found_and_its_case_made_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kills(run: object) -> Iterator[str]:
        if any(fault.kind == "kill" for fault in run.experiment.faults.planned):  # type: ignore[attr-defined]
            yield "a server was killed"

    monkeypatch.setattr(chaos.chaos_checks, "INVARIANTS", (no_kills,))
    whole = chaos.case_of(39)
    assert [fault["kind"] for fault in whole["fault"]] == ["slow", "kill"]
    assert whole["network"]["event"] and len(whole["workload"]["requests"]) > 2
    outcome = chaos.try_seed(39)
    assert outcome.broken == [(1, "a server was killed")]
    assert outcome.document is not None
    assert [fault["kind"] for fault in outcome.document["fault"]] == ["kill"]
    assert "event" not in outcome.document["network"]
    assert len(outcome.document["workload"]["requests"]) <= 2

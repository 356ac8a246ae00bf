"""The search against servers whose capacity is known exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from testbed.experiments.slo import Objective
from testbed.results.intervals import Mean
from testbed.studies.capacity.measures import THIRDS
from testbed.studies.capacity.search import STEPS_DOWN, STEPS_UP, TURNOVERS, RateTrial, SearchResult, search
from testbed.studies.capacity.verdict import PLACEMENT, REQUESTS, Verdict, verdict_of
from testbed.studies.sweep.runs import FAILED, INFEASIBLE, Record

WIDTH = 0.02
SERVICE_S = 0.8


def found_by(
    judge: Callable[[RateTrial], Verdict],
    start: float,
    n: int = 100,
    most: int = 20_000,
    *,
    several: bool = True,
) -> tuple[SearchResult, list[RateTrial]]:
    asked = []
    steps = search(start, n, most, WIDTH, several)
    trial = next(steps)
    while True:
        asked.append(trial)
        try:
            trial = steps.send(judge(trial))
        except StopIteration as end:
            return end.value, asked


def one_server(trial: RateTrial) -> dict[str, float | int | None]:
    """A server that takes ``SERVICE_S`` for a request, one after the other, and requests as regular as a clock."""
    number = np.arange(trial.n_requests)
    ttft_s = SERVICE_S + number * max(0.0, SERVICE_S - 1 / trial.rate)
    parts = {name: float(part.mean()) for name, part in zip(THIRDS, np.array_split(ttft_s, 3), strict=True)}
    mean_s, p95_s = float(ttft_s.mean()), float(np.percentile(ttft_s, 95))
    return {
        "fingerprint": 0,
        "n_failed": 0,
        "ttft_p95": p95_s,
        "e2e_mean": mean_s,
        "goodput_rps": trial.rate,
        **parts,
    }


def by_one_server(limit_s: float) -> Callable[[RateTrial], Verdict]:
    objectives = [Objective("ttft", "p95", limit_s)]
    return lambda asked: verdict_of(*asked, [Record("", measures=one_server(asked))] * 3, objectives)


@pytest.mark.parametrize("start", [0.03, 1.0, 1.24, 7.0])
def test_the_edge_of_a_deterministic_server_is_its_service_rate(start: float) -> None:
    found, asked = found_by(by_one_server(1.001 * SERVICE_S), start)
    assert found.kept is not None and found.broken is not None
    assert found.kept.rate <= 1.25 * 1.0001 and 1.25 < found.broken.rate <= found.kept.rate * (1 + WIDTH)
    assert (found.low, found.high) == (found.kept.rate, found.broken.rate), "no seed changes anything"
    assert found.broken.broken_by == "ttft_p95" and not found.kept.is_growing
    assert len(asked) == len(set(asked)) == found.n_judged, "nothing is judged twice"


def test_an_edge_beyond_what_the_server_can_do_is_metastable() -> None:
    found, _ = found_by(by_one_server(4 * SERVICE_S), 1.0)
    assert found.kept is not None and found.kept.rate > 1.26 and found.kept.is_growing
    draining = [verdict.rate for verdict in found.judged if not verdict.is_growing]
    assert 1.0 <= max(draining) <= 1.2501


def test_what_fills_up_from_empty_does_not_count_as_growing() -> None:
    def growing(*thirds_s: float) -> bool:
        of = {"fingerprint": 0, "n_failed": 0, "e2e_mean": 1.0, "goodput_rps": 1.0, "ttft_mean": 1.0}
        record = Record("", measures={**of, **dict(zip(THIRDS, thirds_s, strict=True))})
        return verdict_of(1.0, 100, [record] * 3, [Objective("ttft", "mean", 5.0)]).is_growing

    assert growing(1.0, 2.0, 3.0) and growing(1.0, 2.0, 2.5)
    assert not growing(1.0, 2.0, 2.4) and not growing(1.0, 3.0, 2.0) and not growing(1.0, 1.05, 1.1)


def noisy(trial: RateTrial) -> Verdict:
    """Broken from 2.5 requests/s on, and only told from nothing a tenth of a power of e away."""
    over = math.log(trial.rate / 2.5)
    return Verdict(*trial, {"ttft_p95": Mean(over, 0.1, 5)}, ratios={"ttft_p95": over}, mean_s=200.0)


def test_the_interval_is_where_seeds_cannot_tell() -> None:
    found, asked = found_by(noisy, 0.4)
    assert found.kept is not None and found.low is not None and found.high is not None
    assert found.kept.rate <= 2.5 < found.kept.rate * (1 + WIDTH)
    assert found.low <= 2.5 * math.exp(-0.1) < found.low * (1 + WIDTH)
    assert found.high / (1 + WIDTH) < 2.5 * math.exp(0.1) <= found.high
    n = found.kept.n_requests
    assert n >= TURNOVERS * found.kept.rate * 200.0 and {v.n_requests for v in found.judged} == {n}
    assert max(q.n_requests for q in asked) == n
    assert found_by(noisy, 0.4, several=False)[0].low is None


def test_requests_are_never_more_than_there_may_be() -> None:
    found, asked = found_by(noisy, 0.4, most=300)
    assert found.kept is not None and max(q.n_requests for q in asked) == found.kept.n_requests == 300


def test_that_no_rate_keeps_it_costs_few_rates() -> None:
    found, asked = found_by(by_one_server(0.5 * SERVICE_S), 1.0)
    assert found.kept is None and [q.rate for q in asked] == [1.0, 2.0, 4.0, 8.0, 16.0, 2.0**-STEPS_DOWN]
    assert found.at_bottom is not None and found.at_bottom.broken_by == "ttft_p95"


def test_every_rate_keeps_it_up_to_a_bound() -> None:
    found, _ = found_by(by_one_server(1e6), 0.01)
    assert (
        found.kept is not None
        and found.kept.rate == pytest.approx(0.01 * 2**STEPS_UP)
        and found.broken is None
    )


def test_failed_requests_break_a_rate_before_any_objective() -> None:
    def judge(trial: RateTrial) -> Verdict:
        of = {**one_server(trial), "n_failed": int(trial.rate > 0.9)}
        return verdict_of(*trial, [Record("", measures=of)] * 2, [Objective("ttft", "p95", 5.0)])

    found, _ = found_by(judge, 0.5)
    assert found.kept is not None and found.kept.rate <= 0.9 < found.kept.rate * (1 + WIDTH)
    assert found.broken is not None and found.broken.broken_by == REQUESTS


def test_a_seed_without_a_placement_breaks_a_rate_and_a_run_that_broke_ends_the_search() -> None:
    good = Record("", measures=one_server(RateTrial(0.5, 100)))
    objectives = [Objective("ttft", "p95", 5.0)]
    found, _ = found_by(lambda q: verdict_of(*q, [good, Record("", INFEASIBLE, "no room")], objectives), 0.5)
    assert found.kept is None and found.at_bottom is not None
    assert (found.at_bottom.broken_by, found.at_bottom.reason) == (PLACEMENT, "no room")
    found, asked = found_by(lambda q: verdict_of(*q, [good, Record("", FAILED, "broke")], objectives), 0.5)
    assert found.error == "broke" and len(asked) == 1


def test_the_objective_missed_by_the_largest_part_of_its_limit_limits() -> None:
    of = {**one_server(RateTrial(0.5, 100)), "tpot_mean": 0.3, "ttft_p95": 6.0}
    objectives = [Objective("ttft", "p95", 5.0), Objective("tpot", "mean", 0.2)]
    assert verdict_of(0.5, 100, [Record("", measures=of)], objectives).broken_by == "tpot_mean"
    none = verdict_of(0.5, 100, [Record("", measures={**of, "tpot_mean": None})], objectives)
    assert none.error == "no request has a tpot; give another than tpot_mean"


def test_a_rate_that_is_kept_above_one_that_is_not_is_found() -> None:
    def judge(trial: RateTrial) -> Verdict:
        over = 1.0 if trial.rate < 3 else trial.rate - 9.0
        return Verdict(*trial, {"ttft_p95": Mean(over, 0.0, 5)}, ratios={"ttft_p95": over})

    found, _ = found_by(judge, 1.0)
    assert found.kept is not None and found.kept.rate <= 9 < found.kept.rate * (1 + WIDTH)
    assert found.broken_below == [1.0, 2.0]


def test_a_kept_rate_that_is_met_above_the_edge_is_where_the_search_begins_again() -> None:
    def judge(trial: RateTrial) -> Verdict:
        unclear = Mean(0.5, 0.6, 5)
        over = unclear if 1.4 <= trial.rate < 1.7 else Mean(-1.0 if trial.rate < 9 else 1.0, 0.1, 5)
        return Verdict(*trial, {"ttft_p95": over}, ratios={"ttft_p95": over.mean})

    found, asked = found_by(judge, 0.75)
    assert found.kept is not None and found.broken is not None
    assert found.kept.rate < 9 <= found.broken.rate <= found.kept.rate * (1 + WIDTH)
    assert (found.low, found.high) == (found.kept.rate, found.broken.rate)
    assert 1.5 in found.broken_below and len(asked) == len(set(asked))

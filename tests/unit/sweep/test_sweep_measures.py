from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from testbed.experiments.policy import PolicyChoice
from testbed.experiments.slo import Objectives
from testbed.records.requests import RequestRow, Times
from testbed.results.slo import goodput_rps, n_met
from testbed.results.summary import active_sessions
from testbed.simulator.cases import scenario_case
from testbed.simulator.engine import Simulation, simulate
from testbed.simulator.gaps import token_gaps_s
from testbed.studies.sweep.measures import FAIRNESS, MEASURES, MET, measures_of
from testbed.studies.sweep.runs import Run, Runner, Setup

FEW = "workload.n_requests=6"
UNEQUAL = 'workload.n_output_tokens={distribution="uniform",low=1,high=40}'


def simulated(*changes: str, is_virtual: bool = False, target: str = "clustered") -> Simulation:
    case = scenario_case(target, PolicyChoice("chain-composition"), [FEW, *changes], 0)
    return simulate(case, "testbed", is_virtual=is_virtual, live=False)


@pytest.mark.parametrize("is_virtual", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        (),
        (UNEQUAL, 'hardware.a100.context_slope="1 us"'),
        ("compute.batching=continuous", UNEQUAL, "workload.rate=2"),
        ("policy.communication=server-to-server",),
    ],
)
def test_the_gaps_of_a_request_add_up_to_its_time_after_the_first_token(
    changes: tuple[str, ...], is_virtual: bool
) -> None:
    simulation = simulated(*changes, is_virtual=is_virtual)
    gaps_s = token_gaps_s(simulation)
    done = [row for row in simulation.rows if row.is_completed]
    assert len(gaps_s) == sum(row.n_output_tokens - 1 for row in done) > 0
    assert gaps_s.sum() == pytest.approx(sum((r.times.e2e_s or 0) - (r.times.ttft_s or 0) for r in done))
    assert gaps_s.min() > 0


def test_gaps_are_over_all_tokens_and_grow_with_the_context() -> None:
    simulation = simulated('hardware.a100.context_slope="1 us"', "workload.n_requests=1")
    assert [row.chain != "" for row in simulation.rows] == [True]
    steps_s = np.diff(token_gaps_s(simulation))
    assert steps_s == pytest.approx(70e-6), "a token more in the caches of 70 blocks"


def test_what_is_measured_of_tokens_lengths_and_objectives() -> None:
    simulation = simulated(UNEQUAL, "workload.rate=0.5", "workload.n_requests=8")
    rows = simulation.rows
    found = measures_of(simulation, Objectives({"ttft": 3.0, "tpot": 0.5}))
    assert set(found) == {*MEASURES, "goodput_rps", MET}
    gaps_s = token_gaps_s(simulation)
    for name, share in (("p50", 50), ("p95", 95), ("p99", 99)):
        assert found[f"token_gap_s_{name}"] == np.percentile(gaps_s, share)
    in_order = sorted(rows, key=lambda row: row.n_output_tokens)
    longest, shortest = (sum(row.times.per_token_s for row in part) for part in (in_order[-2:], in_order[:2]))
    assert found[FAIRNESS] == pytest.approx(longest / shortest) and longest < shortest
    n_tokens = sum(row.n_output_tokens for row in rows)
    assert found["decode_tokens_per_s"] == pytest.approx(
        (found["tokens_per_s"] or 0) * (n_tokens - 8) / n_tokens
    )


def row(status: str = "completed", ended_at_s: float = 10.0, **times: Any) -> RequestRow:
    return RequestRow(
        request=0,
        client="client-0",
        status=status,
        arrival_at_s=0.0,
        arrived_at_s=0.0,
        ended_at_s=ended_at_s,
        n_input_tokens=1,
        n_output_tokens=2,
        max_new_tokens=2,
        times=Times(**{"e2e_s": 10.0, "ttft_s": 1.0, **times}),
    )


def test_a_request_meets_objectives_that_it_has_a_value_for_and_only_if_it_completed() -> None:
    failed = row(status="failed", ttft_s=None, e2e_s=None, ended_at_s=12.5)
    rows = [row(), row(ttft_s=2.0, tpot_s=0.5), row(ttft_s=3.0), row(tpot_s=2.0), failed]
    objectives = Objectives({"ttft": 2.0, "tpot": 0.5})
    assert n_met(rows, objectives) == 2 and goodput_rps(rows, objectives) == 2 / 12.5
    assert goodput_rps([failed], objectives) == 0.0
    interrupted = row(status="interrupted", ttft_s=None, e2e_s=None, ended_at_s=20.0)
    assert goodput_rps([*rows, interrupted], objectives) == 2 / 20
    assert goodput_rps([interrupted], objectives) is None


def test_sessions_at_a_time_are_counted_until_the_last_request_has_ended_also_one_without_a_session() -> None:
    gave_up = row(status="failed", ttft_s=None, e2e_s=None, ended_at_s=20.0)
    found = active_sessions([row(queue_s=0.0), gave_up])
    assert (found.mean, found.max) == (0.5, 1.0)


def test_with_few_requests_there_is_no_fairness() -> None:
    found = measures_of(simulated("workload.n_requests=3"), Objectives())
    assert found[FAIRNESS] is None and found["token_gap_s_p50"] is not None


def test_decisions_have_cpu_times_that_are_no_measures() -> None:
    runner = Runner(Setup("clustered"))
    first, again = (runner(Run((FEW,), "foresight", seed)) for seed in (0, 1))
    assert (first.placement_cpu_s or 0) > 0 and (first.routing_cpu_s or 0) > 0
    assert again.placement_cpu_s == first.placement_cpu_s, "decided once, for both"
    assert not any("cpu" in name for name in first.measures)

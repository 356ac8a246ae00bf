"""`testbed reproduce chain`: printed response times beside simulated ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from testbed.cli.main import main
from testbed.errors import UserError
from testbed.experiments.policy import PolicyChoice
from testbed.results.intervals import t_quantile
from testbed.simulator.cases import scenario_case
from testbed.simulator.engine import simulate
from testbed.studies.reproduce import chain
from testbed.studies.reproduce.chain import METRIC, chain_command
from testbed.studies.sweep.runs import Run
from testbed.studies.sweep.study import Study

TIMES_S = {"petals": 10.0, "proposed": 5.0, "whole-model": 3.0, "chain-composition": 2.0}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A response takes ``TIMES_S`` times the rate, and a second more per seed; ``proposed`` has none at 2/s
    with seed 8.
    """

    def times(study: Study, seeds: Sequence[int], jobs: int) -> dict[Run, float | None]:
        return {
            study.run(point, policy, seed): None
            if (policy, point["workload.rate"], seed) == ("proposed", "2.0", 8)
            else TIMES_S[policy] * float(point["workload.rate"]) + 2 * (seed - 7)
            for policy in study.policies
            for point in study.points
            for seed in seeds
        }

    monkeypatch.setattr(chain, "_times_s", times)


def test_every_line_has_its_mean_and_interval_at_every_rate(quick: None) -> None:
    answer, text = chain_command(2, 7)
    assert [row["name"] for row in answer["rows"]] == ["PETALS", "BPRR", "JFFC only", "proposed"]
    assert [row["response_s"] for row in answer["rows"]] == [31.4, 19.8, 10.0, 7.3]
    first = answer["rows"][0]["simulated"][2]
    assert (first["rate"], first["n_runs"], first["response_s"]) == (2.0, 2, 21.0)
    assert first["ci95_s"] == pytest.approx(t_quantile(1))  # s is the square root of 2, n is 2
    alone = answer["rows"][1]["simulated"][2]
    assert (alone["n_runs"], alone["response_s"], alone["ci95_s"]) == (1, 10.0, None)
    assert [line.split()[:4] for line in text.splitlines()[2:4]] == [
        ["PETALS", "petals", "31.4", "6.0"],
        ["BPRR", "proposed", "19.8", "3.5"],
    ]


def test_a_response_is_the_mean_over_all_requests_of_a_run() -> None:
    slow, fast = (_response_s("chain-7b", "petals", rate) for rate in (0.05, 0.001))
    assert slow is not None and fast is not None
    assert fast <= slow
    assert _response_s("clustered", "whole-model", 0.1) is None  # no server there holds the model


def _response_s(scenario: str, policy: str, rate: float) -> float | int | None:
    short = ["workload.n_requests=40", "workload.n_output_tokens=24"]
    changes = [f"workload.rate={rate}", "compute.batching=none", *short]
    case = scenario_case(scenario, PolicyChoice(policy), changes, 0)
    return chain._response(simulate(case, "testbed"), {})[METRIC]


def test_no_runs_and_no_negative_seed_are_accepted() -> None:
    with pytest.raises(UserError, match="--runs must be at least 1, not 0"):
        chain_command(0, 0)
    with pytest.raises(UserError, match="--seed must not be negative, but is -1"):
        chain_command(1, -1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("chain", "--log", "x"), "No such option: --log"),
        (("helix", "--runs", "3"), "No such option: --runs"),
        (("helix",), "reproduce helix needs --log DIR, --cluster FILE and --tables DIR"),
        (("paper", "--warm-up", "3"), "No such option: --warm-up"),
        (("papper",), "No such command 'papper'"),
        ((), "Missing command"),
    ],
)
def test_a_study_has_only_its_own_options(
    arguments: tuple[str, ...],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["testbed", "reproduce", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and complaint in said and said.count("\n") == 1

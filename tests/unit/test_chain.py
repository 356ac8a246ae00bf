"""`testbed reproduce chain`: printed response times beside simulated ones."""

from __future__ import annotations

import pytest

from testbed.cli.main import app
from testbed.errors import UserError
from testbed.results.intervals import t_quantile
from testbed.studies.chain import command
from testbed.studies.chain.command import Printed, chain_command


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, float, int], float | None]:
    """Two lines at two rates, and the result of every simulation."""
    answers: dict[tuple[str, float, int], float | None] = {}
    monkeypatch.setattr(command, "RATES", (1.0, 2.0))
    monkeypatch.setattr(command, "TABLE_I", (Printed("one", "petals", 3.0), Printed("two", "proposed", 2.0)))
    monkeypatch.setattr(command, "_response_s", lambda *key: answers[key])
    return answers


def test_every_line_has_its_mean_and_interval_at_every_rate(
    little: dict[tuple[str, float, int], float | None],
) -> None:
    for pair, at in (("petals", 10.0), ("proposed", 5.0)):
        for rate in (1.0, 2.0):
            little[pair, rate, 7], little[pair, rate, 8] = at * rate, at * rate + 2.0
    little["proposed", 2.0, 8] = None
    answer, text = chain_command(2, 7, lambda text: None)
    assert [row["name"] for row in answer["rows"]] == ["one", "two"]
    first = answer["rows"][0]["simulated"][1]
    assert (first["rate"], first["n_runs"], first["response_s"]) == (2.0, 2, 21.0)
    assert first["ci95_s"] == pytest.approx(t_quantile(1))  # s is the square root of 2, n is 2
    alone = answer["rows"][1]["simulated"][1]
    assert (alone["n_runs"], alone["response_s"], alone["ci95_s"]) == (1, 10.0, None)
    assert [line.split()[:4] for line in text.splitlines()[2:4]] == [
        ["one", "petals", "3.0", "11.0"],
        ["two", "proposed", "2.0", "6.0"],
    ]


def test_a_response_is_the_mean_over_all_requests_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = (command._response_s("petals", rate, 0) for rate in (0.05, 0.001))
    assert slow is not None and fast is not None
    assert fast <= slow
    monkeypatch.setattr(command, "SCENARIO", "clustered")
    assert command._response_s("whole-model", 0.1, 0) is None  # no server there holds the model


def test_no_runs_and_no_negative_seed_are_accepted() -> None:
    with pytest.raises(UserError, match="--runs must be at least 1, not 0"):
        chain_command(0, 0, print)
    with pytest.raises(UserError, match="--seed must not be negative, but is -1"):
        chain_command(1, -1, print)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("chain", "--log", "x"), "--log is for reproduce helix; leave it out of reproduce chain"),
        (("helix", "--runs", "3"), "--runs is for reproduce paper and chain"),
        (("paper", "--warm-up", "3"), "--warm-up is for reproduce helix"),
        (("nothing",), "valid: paper, chain, helix"),
    ],
)
def test_options_of_other_studies_are_refused(arguments: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        app(["reproduce", *arguments], standalone_mode=False)

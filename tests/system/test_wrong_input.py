"""A user's mistake ends as one sentence on stderr and exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from netem.kernel import NetemBackend
from netem.probe import try_in_child
from tests.support.runs import FAST, REAL, Testbed, assert_one_sentence

MISTAKES = {
    "an unknown scenario": (("clusterd",), ("clusterd", "clustered")),
    "a missing file": (("nowhere/mine.toml",), ("nowhere/mine.toml",)),
    "an unknown key": (("clustered", "--set", "workload.rte=1"), ("workload.rte", "rate")),
    "an unknown unit": (("clustered", "--set", "backoff.first=5 parsecs"), ("parsecs", "ms")),
    "a negative time scale": (("clustered", "--time-scale", "-1"), ("time_scale",)),
    "an override without a value": (
        ("clustered", "--set", "workload.rate"),
        ("--set workload.rate", "key.path=value"),
    ),
    "an unknown pair of policies": (("clustered", "--policy", "propsed"), ("propsed", "proposed")),
    "an unknown placement": (("clustered", "--placement", "cgbp"), ("placement policy 'cgbp'", "'cg-bp'")),
    "an unknown routing": (("clustered", "--routing", "wsrr"), ("routing policy 'wsrr'", "'ws-rr'")),
    "a policy that cannot be imported": (("clustered", "--routing", "no_such:Thing"), ("no_such:Thing",)),
    "a pair and a half of policies": (
        ("clustered", "--policy", "petals", "--placement", "petals"),
        ("--policy", "--placement"),
    ),
    "an unknown network": (("clustered", "--network", "fabrik"), ("fabrik", "fabric")),
    "an unknown objective": (("clustered", "--slo", "ttf=5s"), ("--slo", "'ttf'", "ttft")),
    "an objective without a unit": (("clustered", "--slo", "ttft=5"), ("--slo: ttft", '"5" has no unit')),
    "a site without a row": (("clustered", "--set", "clients.site=Mars"), ("Mars",)),
    "servers that cannot hold the model": (
        ("clustered", "--set", "servers.1.count=0"),
        ("block", "on no server", "GB of memory", "would do"),
    ),
    "servers that cannot hold the model under petals": (
        ("clustered", "--policy", "petals", "--set", "servers.1.count=0"),
        ("block", "on no server", "GB of memory", "would do"),
    ),
    "a design concurrency that does not fit": (
        ("clustered", "--set", "policy.design_concurrency=1000"),
        ("|R| = 1000", "GB of memory", "|R| <= "),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(mistake: str, testbed: Testbed) -> None:
    arguments, expected = MISTAKES[mistake]
    outcome = testbed.up(*arguments)
    assert_one_sentence(outcome, *expected)
    assert not testbed.runs.exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("net",), "Missing argument 'SCENARIO'"),
        (("up", "clustered", "--tme-scale", "2"), "--time-scale"),
        (("up", "clustered", "--seed", "soon"), '--seed must be a whole number, not "soon" (see `testbed up'),
        (("upp", "clustered"), "'up'"),
        (("report",), "Missing argument 'RUN'"),
        (("links", "clustered", "--echoes", "1"), '--echoes must be at least 2, not "1" (see'),
        (("up", "clustered", "--time-scale", "fast"), '--time-scale must be a number, not "fast" (see'),
        (("validate", "clustered", "petals"), "petals"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_too(
    arguments: tuple[str, ...], expected: str, testbed: Testbed
) -> None:
    assert_one_sentence(testbed(*arguments), expected, "--help`")


@pytest.mark.parametrize("arguments", [("up",), ("serve",), ("chat",), ("generate", "--prompt", "a")])
def test_a_command_without_scenario_and_model_says_what_to_give(
    arguments: tuple[str, ...], testbed: Testbed
) -> None:
    assert_one_sentence(testbed(*arguments), "give a SCENARIO", "--model DIR")


def test_validate_looks_the_online_policy_up(testbed: Testbed) -> None:
    outcome = testbed("validate", "clustered", "--set", "policy.online=nothing")
    assert_one_sentence(outcome, "there is no online policy 'nothing'", "two-time-scale")


def test_an_out_folder_that_cannot_be_made_is_named(testbed: Testbed, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    outcome = testbed("up", "clustered", "--out", str(tmp_path / "file"), *FAST)
    assert_one_sentence(outcome, str(tmp_path / "file"), "--out")


def test_report_of_a_folder_that_is_no_run_says_so(testbed: Testbed, tmp_path: Path) -> None:
    assert_one_sentence(testbed("report", str(tmp_path)), str(tmp_path), "not a run directory")


def test_netem_works_or_says_how_to_get_it(testbed: Testbed) -> None:
    missing = try_in_child(NetemBackend.missing)
    outcome = testbed.up(
        "clustered", "--network", "netem", "--set", "compute.batching=none", *FAST, *REAL
    )  # what is not given is reported
    if missing is None:
        assert outcome.code == 0, outcome.stderr
    else:
        assert_one_sentence(outcome, "the netem network does not work here", "modprobe sch_netem")

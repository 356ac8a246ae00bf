"""The shipped suites: that their figures are whole, and those of today's code."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.suite import data_text
from testbed.experiments import load_experiment
from testbed.studies.score.leaderboard import frozen_text
from testbed.studies.score.marks import Figures, best_of
from testbed.studies.score.measures import figures_of
from testbed.studies.score.suite import REFERENCE, all_changes, read_suite, shipped_suites
from testbed.studies.sweep.runs import Runner, Setup

AGAIN = ("clustered-design", "abovenet-noisy", "clustered-turns", "homes-drafts")
"""Settings that are quickly served again."""
PUBLISHED = {
    "geo-1": "246da65ca37f4b23df1293e0fcf14d86a3414ad127aeaa8554a946c24d17cec0",
    "geo-2": "ce6bdc4edfaf63bb229e4c20de8b442231d21e4964ff82a29bac30421c221f40",
    "geo-3": "204a375bba70e4b2b47c60446bcdb30167a515db8bb9fefe0909689777f467fd",
    "geo-4": "55cd85c620db684f86fdb563ddb3bc5cfd7af01c4329b1537b3f794e11bf9465",
}
"""The SHA-256 digests of settings and figures, which never change under their names."""


@pytest.mark.parametrize("name", shipped_suites())
def test_a_suite_has_the_figures_of_every_reference_policy_in_every_setting(name: str) -> None:
    suite = read_suite(name)
    assert suite.reference is not None and suite.reference.suite == suite.name == name
    assert list(suite.reference.policies) == [setting.name for setting in suite.settings]
    for setting, policies in suite.reference.policies.items():
        assert list(policies) == list(suite.references)
        assert {len(figures) for figures in policies.values()} <= {0, len(suite.seeds)}
        best = suite.reference.best[setting]
        assert best == best_of(policies)
        assert best.met_ratio > 0 and best.ttft_rate > 0 and best.tpot_rate > 0, "somebody can serve it"


@pytest.mark.parametrize("name", shipped_suites())
def test_every_setting_is_a_valid_scenario_with_an_objective(name: str) -> None:
    for setting in read_suite(name).settings:
        experiment = load_experiment(setting.target, setting.changes)
        assert (
            set(experiment.objectives.common) == {"ttft", "tpot"}
            and experiment.compute.batching == "continuous"
        )
        assert all(request.max_new_tokens is not None for request in experiment.workload.requests)


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_was_published_under_a_name_stays(name: str) -> None:
    folder = Path(__file__).parents[3] / "scenarios" / "suites" / name
    files = [(folder / file).read_bytes() for file in ("suite.toml", REFERENCE)]
    assert hashlib.sha256(b"".join(files)).hexdigest() == PUBLISHED[name]


def test_the_documents_have_the_frozen_figures() -> None:
    docs = Path(__file__).parents[3] / "docs"
    assert (docs / "leaderboard.md").read_text(encoding="utf-8") == frozen_text(read_suite("geo-4"))
    for name in PUBLISHED:
        assert (docs / "data" / f"{name}.md").read_text(encoding="utf-8") == data_text(read_suite(name))


def test_a_setting_that_was_frozen_in_virtual_time_is_served_there() -> None:
    engines = {setting.name: setting.engine for setting in read_suite("geo-1").settings if setting.engine}
    assert engines == {"clustered-turns": "virtual", "churn": "virtual"}
    (setting,) = (one for one in read_suite("geo-1").settings if one.name == "clustered-turns")
    small = (
        *setting.changes,
        "workload.n_requests=3",
        "workload.n_output_tokens=2",
        "policy.design_concurrency=2",
    )
    records = [
        Runner(Setup(""))(replace(setting, engine=engine).run(small, "proposed", 0))
        for engine in (None, "virtual")
    ]
    assert [record.engine for record in records] == ["fast", "virtual"]
    assert records[0].key != records[1].key


@pytest.mark.parametrize("setting", AGAIN)
def test_todays_code_has_the_frozen_figures(setting: str) -> None:
    suite = read_suite("geo-4")
    (found,) = (one for one in suite.settings if one.name == setting)
    assert suite.reference is not None
    runner = Runner(Setup(""), figures_of)
    for policy in ("proposed", "chain-composition"):
        record = runner(found.run(all_changes(found), policy, suite.seeds[0]))
        frozen = suite.reference.policies[setting][policy][0]
        measured = msgspec.convert(record.measures, Figures)
        assert msgspec.structs.asdict(measured) == pytest.approx(msgspec.structs.asdict(frozen), rel=1e-9)

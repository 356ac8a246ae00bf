"""``testbed score`` on a small suite, with policies that work, fail, loop, change and print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import testbed as tb
from policies.cgbp import CgBp
from policies.problem import Placement, Problem
from testbed.errors import UserError
from testbed.experiments.inputs import read_inputs
from testbed.studies.bundle.command import bundle_command
from testbed.studies.bundle.reproduce import reproduce_bundle
from testbed.studies.score import command
from testbed.studies.score.command import Options, leaderboard_command, score_command
from testbed.studies.score.leaderboard import answers_of_group, groups_of
from testbed.studies.score.measures import figures_of
from testbed.studies.score.suite import read_suite
from testbed.studies.sweep.pool import Local
from testbed.studies.sweep.runs import Runner
from tests.support.small_suite import POLICIES, write_suite


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    write_suite(folder)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scored.py").write_text(POLICIES)
    monkeypatch.chdir(tmp_path)  # runs are kept there, and policies are found


def score(suite: Path, policy: str, **options: Any) -> tuple[dict[str, Any], str]:
    answer, text, code = score_command(policy, Options(str(suite), **{"jobs": 1, **options}))
    assert code == (0 if answer["valid"] else 1)
    json.dumps(answer, allow_nan=False)
    return answer, text


def test_a_reference_policy_has_its_frozen_figures(suite: Path) -> None:
    answer, text = score(suite, "proposed", jobs=2)
    assert answer["valid"] and answer["why"] == ""
    reference = read_suite(str(suite)).reference
    assert reference is not None
    for row in answer["settings"]:
        frozen = reference.policies[row["name"]]["proposed"]
        assert row["ttft_p95_s"] == pytest.approx(sum(f.ttft_p95_s or 0 for f in frozen) / 2)
        assert row["place_cpu_s"] > 0 and row["route_cpu_ms"] > 0
    low, high = answer["interval"]
    assert low <= answer["combined_score"] <= high and 0.5 < answer["combined_score"] <= 1 + 1e-9
    assert "proposed on small: score" in text and "many" in text


def test_a_policy_without_a_placement_has_0_there_and_broke_no_rule(suite: Path) -> None:
    answer, text = score(suite, "whole-model")
    assert answer["valid"] and answer["combined_score"] == 0
    assert "whole-model needs a server that holds all 70 blocks" in answer["settings"][0]["why"]
    assert answer["settings"][0]["met_ratio"] is None and "whole-model needs" in text


def test_a_class_that_is_both_halves_is_a_policy_and_may_print(
    suite: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mine, _ = score(suite, "scored:Good", is_quick=True)
    printed = capfd.readouterr()
    assert "for whoever" not in printed.out and "for whoever reads this" in printed.err
    reference = read_suite(str(suite)).reference
    assert reference is not None
    frozen = reference.policies["few"]["proposed"][0]
    assert mine["settings"][0]["ttft_p95_s"] == frozen.ttft_p95_s and mine["combined_score"] > 0.5
    assert [row["name"] for row in mine["settings"]] == ["few"], "only the quick ones"
    assert mine["seeds"] == [0] and mine["interval"] is None


def test_a_policy_that_crashes_loses_that_setting_and_says_why(suite: Path) -> None:
    answer, text = score(suite, "scored:Crashes")
    few, many = answer["settings"]
    assert few["score"] > 0.5 and many["score"] == 0
    assert not answer["valid"] and "ValueError: no idea" in answer["why"] and "not valid" in text


def test_a_policy_that_never_returns_is_ended_by_its_limit(suite: Path) -> None:
    answer, _ = score(suite, "scored:Loops", is_quick=True)
    assert not answer["valid"] and answer["combined_score"] == 0
    assert "interrupted while it decided: a placement may take 0.5 s of CPU time" in answer["why"]


def test_what_took_too_long_beside_other_runs_is_timed_once_more_alone(suite: Path) -> None:
    answer, _ = score(suite, "scored:Hurries", is_quick=True, has_checks=False)
    assert answer["valid"] and answer["settings"][0]["place_cpu_s"] < 0.5
    again, text = score(suite, "scored:Hurries", is_quick=True, has_checks=False)
    assert again["settings"] == answer["settings"] and "0 computed" in text, "it is kept"
    answer, _ = score(suite, "scored:Dawdles", is_quick=True, has_checks=False)
    assert not answer["valid"] and "0.5 s are allowed" in answer["why"]


def test_a_policy_that_knows_what_nobody_can_know_is_found(suite: Path) -> None:
    answer, _ = score(suite, "scored:Peeks", is_quick=True)
    assert not answer["valid"] and answer["why"] == (
        "few: the placement depends on output lengths that nobody knows yet"
    )


def test_a_policy_that_ends_its_process_ends_nothing_else(suite: Path) -> None:
    answer, _ = score(suite, "scored:Exits", is_quick=True)
    assert not answer["valid"] and "its process ended twice" in answer["why"]


def test_a_policy_that_decides_by_more_than_what_it_is_given_is_found(suite: Path) -> None:
    answer, _ = score(suite, "scored:Changes", is_quick=True)
    assert not answer["valid"] and "other figures when it is repeated" in answer["why"]


def test_a_policy_that_remembers_the_runs_before_is_found(suite: Path) -> None:
    answer, _ = score(
        suite, "scored:Remembers", jobs=2
    )  # each setting has a process, which serves both seeds
    assert not answer["valid"] and "other figures when it is repeated" in answer["why"]


def test_the_time_of_programs_that_a_policy_begins_is_its_own(suite: Path) -> None:
    answer, _ = score(suite, "scored:Delegates", is_quick=True, has_checks=False)
    assert not answer["valid"] and "s of CPU time; at most 0.5 s are allowed" in answer["why"]


def test_fresh_seeds_are_scored_beside_the_frozen_ones_and_kept_runs_are_not_run_again(suite: Path) -> None:
    answer, text = score(suite, "proposed", out=Path("kept"), seeds="fresh", is_quick=True)
    (fresh,) = answer["fresh_seeds"]
    assert fresh >= 1000 and answer["seeds"] == [0]
    assert answer["fresh_score"] > 0.5 and "on fresh seeds" in text
    again, text = score(suite, "proposed", out=Path("kept"), seeds="fresh", is_quick=True)
    assert again == answer and "0 computed, 2 found" in text
    again, text = score(suite, "proposed", out=Path("kept"), seeds=f"{fresh},0", is_quick=True)
    assert len(Path("kept/score.jsonl").read_text().splitlines()) == 2 and "0 computed, 2 found" in text
    expected = (answer["combined_score"] + answer["fresh_score"]) / 2
    assert again["seeds"] == [fresh, 0] and again["combined_score"] == pytest.approx(expected)


def test_fresh_seeds_stay_until_the_policy_changes(suite: Path) -> None:
    Path("of_seeds.py").write_text(POLICIES)
    how = {"out": Path("kept"), "seeds": "fresh", "has_checks": False}
    first, _ = score(suite, "of_seeds:Good", **how, is_quick=True)
    both, _ = score(suite, "of_seeds:Good", **how)
    assert both["fresh_seeds"][:1] == first["fresh_seeds"] and len(set(both["fresh_seeds"])) == 2
    Path("kept/fresh.json").write_text(Path("kept/fresh.json").read_text()[:-9])
    torn, _ = score(suite, "of_seeds:Good", **how, is_quick=True)
    assert torn["fresh_seeds"] != first["fresh_seeds"]
    Path("of_seeds.py").write_text(POLICIES + "# as good\n")
    changed, _ = score(suite, "of_seeds:Good", **how, is_quick=True)
    assert changed["fresh_seeds"] != torn["fresh_seeds"]  # one time in a million they are


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seeds": "9" * 20}, "must be frozen, fresh, or different numbers of at most"),
        ({"seeds": "freesh"}, "must be frozen, fresh, or different numbers"),
        ({"seeds": "3,3"}, "must be frozen, fresh, or different numbers"),
        ({"jobs": 0}, "--jobs must be at least 1"),
    ],
)
def test_bad_options_get_a_sentence(suite: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        score(suite, "proposed", **options)


def test_bad_suites_and_policies_get_a_sentence(suite: Path) -> None:
    with pytest.raises(UserError, match='unknown suite "geo-9"'):
        read_suite("geo-9")
    with pytest.raises(UserError, match=r"policy nobody:Mine: .*no module nobody"):
        score(suite, "nobody:Mine")
    bare = Path("bare")
    bare.mkdir()
    (bare / "suite.toml").write_text((suite / "suite.toml").read_text().replace("own.toml", "clustered"))
    with pytest.raises(UserError, match="has no figures of few; make them with"):
        score(bare, "proposed")
    (bare / "reference.json").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"reference\.json: cannot be read: Input/output error"):
        read_suite("bare")
    (bare / "reference.json").unlink()
    (bare / "reference.json").write_text(10_000 * '{"a":')
    with pytest.raises(UserError, match=r"reference\.json: is no table of reference figures"):
        read_suite("bare")
    (bare / "suite.toml").write_text((suite / "suite.toml").read_text().replace('"small"', '"geo-4"'))
    with pytest.raises(UserError, match="geo-4 is a shipped suite, which is another one"):
        read_suite("bare")
    (bare / "suite.toml").write_text('name = "x"\n')
    with pytest.raises(UserError, match=r"suite\.toml"):
        read_suite("bare")


def test_the_leaderboard_has_all_references_and_what_is_given(suite: Path) -> None:
    options = Options(str(suite), is_quick=True, jobs=1, out=Path("board"))
    answer, text, code = leaderboard_command(["scored:Good"], options)
    assert code == 0 and [one["policy"] for one in answer["policies"]] == [
        *("proposed", "petals", "whole-model", "scored:Good")
    ]
    table = pq.read_table("board/leaderboard.parquet").to_pylist()
    assert len(table) == 4 and {row["setting"] for row in table} == {"few"}
    by_policy = {row["policy"]: row for row in table}
    assert by_policy["whole-model"]["status"] == "infeasible" and by_policy["whole-model"]["score"] == 0
    assert (
        by_policy["proposed"]["score"] == by_policy["scored:Good"]["score"] > by_policy["petals"]["score"] > 0
    )
    for document in (
        text,
        *(Path("board", name).read_text(encoding="utf-8") for name in ("leaderboard.md", "index.html")),
    ):
        places = [document.index(name) for name in ("proposed", "petals", "whole-model")]
        assert places == sorted(places), "the best first"


def test_a_bundled_leaderboard_is_checked_by_one_command(
    suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Here runs need no processes of their own, which take longer than all else.
    monkeypatch.setattr(command, "executor_of", lambda name, jobs, is_apart: Local(1))
    monkeypatch.setattr(command, "LimitedRunner", lambda setup, limits: Runner(setup, figures_of))
    options = Options(str(suite.absolute()), is_quick=True, jobs=1, out=Path("bundled"), has_checks=False)
    leaderboard_command(["scored:Good"], options)
    bundle_command(Path("bundled"), tmp_path / "bundle")
    answer, text, code = reproduce_bundle(tmp_path / "bundle", 1)
    assert (code, answer["kind"], answer["differences"]) == (0, "score", []), text
    assert "scored:Good on small (quick): score" in text and "the same figures: score.json" in text
    assert "on seeds 0, not checked, valid" in text
    inputs = read_inputs(Path("bundled"))
    assert inputs is not None and str(suite.absolute()) in inputs.renamed
    assert sorted(path.name for path in Path("bundled/inputs/files").rglob("*.*")) == sorted(
        ["reference.json", "scored.py", "suite.toml"]
    )


def test_a_part_of_the_leaderboard_is_scored_as_a_suite_of_its_own() -> None:
    settings = read_suite("geo-dev").settings
    groups = groups_of(settings)
    assert groups["clustered"] == {"clustered", "clustered-prompts"} and "homes" not in groups
    rows = [{"name": name, "score": score} for name, score in (("clustered", 0.5), ("homes", 0.1))]
    answer = {"policy": "a", "seeds": [1, 2], "combined_score": 0.3, "settings": rows}
    runs = [
        {"policy": policy, "setting": setting, "seed": seed, "score": score}
        for policy, setting, seed, score in (
            ("a", "clustered", 1, 0.4),
            ("a", "clustered", 2, 0.6),
            ("a", "clustered", 3, 0.0),
            ("a", "homes", 1, 0.0),
            ("b", "clustered", 1, 0.0),
        )
    ]
    (found,) = answers_of_group([answer], groups["clustered"], runs)
    assert found["combined_score"] == 0.5 and found["settings"] == rows[:1]


def test_programs_score_objects(suite: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Few:
        name = "few-sessions"

        def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
            return CgBp().place(problem, 1)

    told: list[tb.Progress] = []
    found = tb.score((Few, "ws-rr"), suite, quick=True, jobs=1, progress=told.append)
    assert found.valid and found["policy"] == "few-sessions+ws-rr" and found.score > 0.5
    assert [(one.n_done, one.n_total) for one in told] == [(1, 1)] and not capfd.readouterr().err
    assert dict(found)["combined_score"] == found.score and found["out"] is None
    assert found.settings[0]["name"] == "few" and "few-sessions+ws-rr on small" in found._repr_html_()
    with pytest.raises(tb.UserError, match="None is no policy"):
        tb.score(None, suite)
    with pytest.raises(tb.UserError, match="or a list of numbers, not 11"):
        tb.score((Few, "ws-rr"), suite, seeds=11)  # type: ignore[arg-type]
    listed = tb.score((Few, "ws-rr"), suite, quick=True, seeds=[0], jobs=1, checks=False)
    assert listed.score == found.score and (found["checks"], listed["checks"]) == (True, False)

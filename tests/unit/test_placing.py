"""Placing an experiment: users' policies are found, and held to the rules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from testbed.control.placing import place_experiment
from testbed.errors import UserError
from testbed.scenario import load_experiment

POLICY = """
from policies.problem import BlockRange, Placement

class EverywhereEverything:
    name = "everywhere"
    def place(self, problem, design_concurrency=None):
        n = problem.model.n_blocks
        return Placement(self.name, (BlockRange(0, n),) * problem.n_servers, (0.0,) * problem.n_servers)
"""


def test_a_policy_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "policy_beside_me.py").write_text(POLICY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings = ["policy.placement=policy_beside_me:EverywhereEverything", "model.block_size=0.1 GB"]
    placed = place_experiment(load_experiment("clustered", settings))
    assert {r.n_blocks for r in placed.placement.ranges} == {70}
    assert placed.decision_s >= 0


def test_a_policy_that_overbooks_memory_is_stopped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy_that_overbooks.py").write_text(POLICY, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings = ["policy.placement=policy_that_overbooks:EverywhereEverything"]
    with pytest.raises(UserError, match=r"policy_that_overbooks:EverywhereEverything overbooks mig-1g-0"):
        place_experiment(load_experiment("clustered", settings))


def test_a_policy_whose_method_takes_something_else_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = POLICY.replace("def place(self, problem", "def place(self, servers, links, problem")
    assert text != POLICY
    (tmp_path / "policy_with_other_arguments.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    settings = ["policy.placement=policy_with_other_arguments:EverywhereEverything"]
    with pytest.raises(
        UserError, match=r"does not take what policies are given: .*missing 1 required positional"
    ):
        place_experiment(load_experiment("clustered", settings))


def test_a_placement_that_searches_itself_is_not_searched_again() -> None:
    searched, own = (
        place_experiment(
            load_experiment("clustered", ["policy.name=foresight", f"policy.design_concurrency={value}"])
        ).placement
        for value in ("searched", "auto")
    )
    assert searched == own


def test_the_searched_design_concurrency_is_larger_where_that_is_free() -> None:
    formula, searched = (
        place_experiment(load_experiment("clustered", [f"policy.design_concurrency={value}"])).placement
        for value in ("auto", "searched")
    )
    assert (formula.design_concurrency or 0) < (searched.design_concurrency or 0)

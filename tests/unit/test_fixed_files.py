"""Placements and chains in files, named by ``fixed:``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from policies.problem import BlockRange
from testbed.control.fixed import fixed_placement, fixed_routing
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.sources import shipped_files

PAIRS = [[1, 40], [0, 0], [41, 30]]
RANGES = (BlockRange(0, 40), BlockRange(0, 0), BlockRange(40, 70))


def placement_of(folder: Path, document: Any) -> Any:
    path = folder / "placement.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), encoding="utf-8")
    return fixed_placement(f"fixed:{path}")


def complaint(folder: Path, document: Any) -> str:
    with pytest.raises(UserError) as caught:
        placement_of(folder, document)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}/")


def test_a_list_of_pairs_leaves_the_caches_what_the_blocks_do_not_take(tmp_path: Path) -> None:
    for document in (PAIRS, {"placement": PAIRS}, {"placement": PAIRS, "cache_bytes": None}):
        found = placement_of(tmp_path, document)
        assert (found.ranges, found.cache_bytes, found.from_one) == (RANGES, None, True)


def test_the_cache_room_beside_a_placement_is_read(tmp_path: Path) -> None:
    found = placement_of(tmp_path, {"id": "x", "placement": PAIRS, "cache_bytes": [1e9, 0, 2e9]})
    assert (found.ranges, found.cache_bytes) == (RANGES, (1e9, 0.0, 2e9))


def test_the_cache_room_in_the_plan_of_a_run_is_read(tmp_path: Path) -> None:
    plan = {"placement": {"ranges": [[0, 40], [0, 0], [40, 70]], "cache_bytes": [1e9, 0.0, 2e9]}}
    found = placement_of(tmp_path, plan)
    assert (found.ranges, found.cache_bytes, found.from_one) == (RANGES, (1e9, 0.0, 2e9), False)


@pytest.mark.parametrize("cache", [[1e9], 5, [1, 2, "3"], [1, 2, -1], [1, 2, float("nan")], [1, 2, 1e300]])
def test_cache_room_that_is_no_number_per_server_is_refused(tmp_path: Path, cache: Any) -> None:
    said = complaint(tmp_path, {"placement": PAIRS, "cache_bytes": cache})
    assert said.startswith("placement.json: cache_bytes must be 3 numbers of at least 0, one per server")


def test_several_lines_of_json_are_told_from_a_broken_file(tmp_path: Path) -> None:
    line = json.dumps({"placement": PAIRS})
    assert complaint(tmp_path, f"{line}\n{line}\n") == (
        "placement.json: has several lines of JSON, one result each, as `testbed simulate --json` prints them; "
        "keep one line"
    )
    assert complaint(tmp_path, "{").startswith("placement.json: is not JSON (")
    assert complaint(tmp_path, f"{line} and more").startswith("placement.json: is not JSON (Extra data")


def test_a_file_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path, "[" * 100_000).startswith(
        "placement.json: is nested too deeply; give after fixed:"
    )
    path = tmp_path / "chain.json"
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UserError, match=r"chain\.json: is nested too deeply"):
        fixed_routing(f"fixed:{path}")


@pytest.mark.parametrize("document", [5, {}, {"placement": None}, [[1]], [[1, 2.5]], [["1", "2"]]])
def test_a_file_without_a_placement_says_what_to_give(tmp_path: Path, document: Any) -> None:
    assert complaint(tmp_path, document).startswith("placement.json: holds no placement: give a plan.json")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json: cannot be read \(No such file"):
        fixed_placement(f"fixed:{tmp_path}/none.json")


def test_a_fixed_file_is_looked_for_beside_the_scenario_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = shipped_files()["clustered"].read_text(encoding="utf-8")
    (tmp_path / "study").mkdir()
    scenario = tmp_path / "study" / "mine.toml"
    named = shipped.replace('name = "proposed"', 'placement = "fixed:plan.json"\nrouting = "ws-rr"')
    assert named != shipped
    scenario.write_text(named, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_experiment("study/mine.toml").policy.placement == f"fixed:{tmp_path}/study/plan.json"
    given = load_experiment("study/mine.toml", ["policy.placement=fixed:plan.json"])
    assert given.policy.placement == f"fixed:{tmp_path}/plan.json"

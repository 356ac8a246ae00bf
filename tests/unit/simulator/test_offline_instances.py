"""Offline instances: the enumerated optimum, CG-BPRR's bound, and mistakes in the files."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.simulator.offline import (
    OFFLINE_POLICIES,
    load_offline_instance,
    offline_command,
    parse_offline_instance,
)
from testbed.simulator.text import offline_text

FILE = Path(__file__).parents[2] / "data" / "tiny_instances.json.gz"
TINY: list[dict[str, Any]] = json.loads(gzip.decompress(FILE.read_bytes()))
REL = 1e-9
ROUNDED_DOWN = "tiny16"
"""Here M - s_m = 3 s_c exactly, but (2.36 - 1.25) / 0.37 is just under 3 in float64: the reference counts two."""

each_tiny = pytest.mark.parametrize("tiny", TINY, ids=lambda t: t["id"])


def document_of(tiny: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": tiny["id"],
        "n_server": len(tiny["memory"]),
        "n_client": len(tiny["rtt_ms"]),
        "L": tiny["n_blocks"],
        "sm": tiny["block"],
        "sc": tiny["cache"],
        "M": tiny["memory"],
        "tau": tiny["decode_ms"],
        "RTT": tiny["rtt_ms"],
        "request_clients": tiny["clients"],
    }


def solved(tiny: dict[str, Any], policy: str, folder: Path) -> dict[str, Any]:
    path = folder / f"{tiny['id']}.json"
    path.write_text(json.dumps(document_of(tiny)), encoding="utf-8")
    (answer,) = offline_command([path], policy)
    assert (answer["id"], answer["policy"]) == (tiny["id"], policy)
    assert answer["decision_s"] >= 0
    return answer


def check_memory_and_chains(tiny: dict[str, Any], answer: dict[str, Any]) -> None:
    """The objective is that of routes which the placement allows and the memory bears."""
    used = [tiny["block"] * n for _, n in answer["placement"]]
    total_ms = 0.0
    for client, route in zip(tiny["clients"], answer["routes"], strict=True):
        position = 1
        for j in route:
            first, n_blocks = answer["placement"][j]
            assert first <= position < first + n_blocks
            k = first + n_blocks - position
            used[j] += tiny["cache"] * k
            total_ms += tiny["rtt_ms"][client][j] + tiny["decode_ms"][j] * k
            position += k
        assert position == tiny["n_blocks"] + 1
    assert all(n <= most * (1 + REL) for n, most in zip(used, tiny["memory"], strict=True))
    assert answer["objective_ms"] == pytest.approx(total_ms, rel=REL)


@pytest.mark.parametrize(
    ("policy", "tiny"),
    [("milp", tiny) for tiny in TINY] + [("milp-paper", tiny) for tiny in TINY if len(tiny["clients"]) < 3],
    ids=lambda value: value if isinstance(value, str) else value["id"],
)
def test_milp_finds_the_enumerated_optimum(policy: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    answer = solved(tiny, policy, tmp_path)
    if tiny["optimum_ms"] is None:
        assert not answer["feasible"]
        assert "no placement holds" in answer["error"]
        assert answer["objective_ms"] is answer["placement"] is answer["routes"] is None
        return
    assert answer["feasible"] and answer["proven_optimal"]
    assert answer["gap"] == 0.0
    assert answer["objective_ms"] == pytest.approx(tiny["optimum_ms"], rel=REL)
    check_memory_and_chains(tiny, answer)


@each_tiny
def test_the_bounds_lie_on_their_sides_of_the_optimum(tiny: dict[str, Any], tmp_path: Path) -> None:
    bounds = solved(tiny, "milp", tmp_path)["bounds"]
    if tiny["optimum_ms"] is None:
        assert tiny["lower_bound_ms"] is None
        assert set(bounds.values()) == {None}
        return
    assert bounds["lower_bound_ms"] == pytest.approx(tiny["lower_bound_ms"], rel=REL)
    assert bounds["lower_bound_knapsack_ms"] == pytest.approx(tiny["knapsack_ms"], rel=REL)
    assert bounds["lower_bound_ms"] <= bounds["lower_bound_knapsack_ms"] * (1 + REL)
    assert bounds["lower_bound_knapsack_ms"] <= tiny["optimum_ms"] * (1 + REL)
    assert bounds["lp_relaxation_ms"] <= tiny["optimum_ms"] * (1 + REL)
    assert tiny["optimum_ms"] <= bounds["theorem1_ms"] * (1 + REL)
    assert bounds["ratio"] == bounds["theorem1_ms"] / bounds["lower_bound_ms"]


@each_tiny
def test_cg_bprr_places_and_routes_as_the_reference_does_and_keeps_theorem_1s_bound(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    answer = solved(tiny, "cg-bprr", tmp_path)
    if "ranges" not in tiny and tiny["id"] != ROUNDED_DOWN:
        assert not answer["feasible"]
        assert "unplaced" in answer["error"]
        assert answer["bounds"]["theorem1_ms"] is None
        return
    check_memory_and_chains(tiny, answer)
    assert tiny["optimum_ms"] <= answer["objective_ms"] * (1 + REL)
    assert answer["objective_ms"] <= answer["bounds"]["theorem1_ms"] * (1 + REL)
    if tiny["id"] != ROUNDED_DOWN:
        held = [[first - 1, first - 1 + n] if n else [0, 0] for first, n in answer["placement"]]
        assert held == tiny["ranges"]
        assert answer["routes"] == tiny["chains"]
        assert answer["objective_ms"] == pytest.approx(tiny["objective_ms"], rel=REL)
        bound_ms = tiny["bound_ms"] * len(tiny["clients"])
        assert answer["bounds"]["theorem1_ms"] == pytest.approx(bound_ms, rel=REL)


@each_tiny
def test_lp_rounding_is_no_better_than_the_optimum_or_says_what_rounding_broke(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    answer = solved(tiny, "lp-rounding", tmp_path)
    if not answer["feasible"]:
        assert "rounding the LP relaxation" in answer["error"] or tiny["optimum_ms"] is None
        return
    check_memory_and_chains(tiny, answer)
    # It may leave a server empty, which the enumerated optimum may not: it can then be better than that.
    if all(n for (_, n), m in zip(answer["placement"], tiny["memory"], strict=True) if m >= tiny["block"]):
        assert answer["objective_ms"] >= tiny["optimum_ms"] * (1 - REL)


UNLIKE: dict[str, Any] = {
    "id": "unlike",
    "n_server": 2,
    "n_client": 2,
    "L": 1,
    "sm": 10.0,
    "sc": 1.0,
    "M": [11.0, 100.0],
    "tau": [500.0, 500.0],
    "RTT": [[500.0, 10_500.0], [500.0, 9_500.0]],
    "request_clients": [0, 1],
    "request_lengths": [[0, 20], [0, 100]],
}
"""The fast server has cache for one of two requests. Per token the short one gains most there: 10 s against 9."""


@pytest.mark.parametrize("policy", ["milp", "cg-bprr"])
def test_requests_of_unlike_lengths_count_with_their_tokens(policy: str, tmp_path: Path) -> None:
    path = tmp_path / "unlike.json"
    path.write_text(json.dumps(UNLIKE), encoding="utf-8")
    (answer,) = offline_command([path], policy)
    bounds = answer["bounds"]
    assert bounds["lower_bound_ms"] == pytest.approx(120e3)  # both on the fast server
    if policy == "milp":
        assert answer["objective_ms"] == pytest.approx(320e3)
        assert answer["routes"] == [[1], [0]]
        assert bounds["lp_relaxation_ms"] <= 320e3 * (1 + REL)
    else:  # CG-BP leaves cache for two of the longest: only the slow server holds the block
        assert answer["objective_ms"] == pytest.approx(20 * 11e3 + 100 * 10e3)
        assert bounds["theorem1_ms"] == pytest.approx(120 * 11e3)


def test_the_cache_in_a_file_is_that_of_its_longest_request() -> None:
    instance = parse_offline_instance(UNLIKE | {"request_lengths": [[30, 20], [0, 100]]}, "mine")
    caches = [instance.problem.model.cache_bytes(request.n_tokens) for request in instance.requests]
    assert caches == pytest.approx([0.5, 1.0])
    assert instance.problem.design_cache_bytes == pytest.approx(1.0)


def test_the_table_says_what_is_proven(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(document_of(TINY[0])), encoding="utf-8")
    (answer,) = offline_command([path], "milp")
    assert "proven" in offline_text([answer])
    assert "within 12.5%" in offline_text([answer | {"proven_optimal": False, "gap": 0.125}])
    assert "proven" not in offline_text(offline_command([path], "cg-bprr"))


def test_several_instances_are_answered_in_the_order_given(tmp_path: Path) -> None:
    paths = []
    for tiny in (TINY[3], TINY[0]):
        paths.append(tmp_path / f"{tiny['id']}.json")
        paths[-1].write_text(json.dumps(document_of(tiny)), encoding="utf-8")
    assert [a["id"] for a in offline_command(paths, "cg-bprr")] == [TINY[3]["id"], TINY[0]["id"]]


def changed(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda d: d.pop("L"), "L: is missing"),
        (changed("M", [12.71, 3.94]), "M: has 2 values but needs 3, one for each server"),
        (changed("tau", [1.0] * 4), "tau: has 4 values but needs 3, one for each server"),
        (changed("RTT", [[1.0] * 3]), "RTT: has 1 rows but needs 2, one for each client"),
        (changed("RTT", [[1.0] * 3, [1.0] * 2]), r"RTT\.1: has 2 values but needs 3"),
        (changed("M", [12.71, -1.0, 5.55]), r"M\.1: must be at least 0, not -1\.0"),
        (changed("M", [12.71, 1e308, 5.55]), r"M\.1: must be at most 1e\+18, not 1e\+308"),
        (changed("tau", [1.0, float("nan"), 1.0]), r"tau\.1: must be a finite number, not nan"),
        (changed("RTT", [[1e308] * 3] * 2), r"RTT\.0\.0: must be at most 1e\+12, not 1e\+308"),
        (changed("L", 10**30), "L: must be at most 10,000, not 1000000000000"),
        (changed("L", "6"), 'L: must be a whole number, not "6"'),
        (changed("n_server", 10**9), "n_server: must be at most 100,000"),
        (changed("sc", 1e-300), "sc: must be at least 1e-15, not 1e-300"),
        (changed("request_clients", [0, 2]), r"request_clients\.1: is 2, but clients are numbered 0 to 1"),
        (
            changed("request_lengths", [[1, 2]]),
            "request_lengths: has 1 entries but needs 2, one for each request",
        ),
        (changed("request_lengths", [[1, 2], [3]]), r"request_lengths\.1: needs at least 2 entries"),
        (
            changed("request_lengths", [[1, 2], [3, 0]]),
            r"request_lengths\.1\.1: must be at least 1 output token",
        ),
        (changed("request_lengths", [[1, 2], [-1, 2]]), r"request_lengths\.1\.0: must be at least 0, not -1"),
        (changed("request_length", [[1, 2]] * 2), 'unknown key; did you mean "request_lengths"'),
        (changed("request_clients", []), "request_clients: needs at least 1 entry"),
        (changed("sc", 0.0), r"sc: must be more than 0, not 0\.0"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_its_key(
    change: Callable[[dict[str, Any]], None], sentence: str, tmp_path: Path
) -> None:
    document = copy.deepcopy(document_of(TINY[0]))
    change(document)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(UserError, match=sentence) as caught:
        offline_command([path], "milp")
    assert str(caught.value).startswith(str(path))


def test_what_is_no_instance_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_offline_instance(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="is not JSON"):
        load_offline_instance(tmp_path / "broken.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not JSON"):
        load_offline_instance(tmp_path / "binary.json")
    (tmp_path / "list.json").write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match=r"the file: must be a table, not \[\]"):
        load_offline_instance(tmp_path / "list.json")
    (tmp_path / "deep.json").write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(UserError, match=r"deep\.json: is nested too deeply; give an offline instance file"):
        load_offline_instance(tmp_path / "deep.json")


@pytest.mark.parametrize("workload", [None, 5, [], "inter_arrival_ms"])
def test_a_workload_that_describes_an_offline_instance_is_left_alone(workload: Any) -> None:
    assert parse_offline_instance(document_of(TINY[0]) | {"workload": workload}, "mine").id == TINY[0]["id"]


def test_an_online_instance_is_told_from_an_offline_one() -> None:
    with pytest.raises(UserError, match="mine: is not an offline instance; use `testbed simulate`"):
        parse_offline_instance({"workload": {"inter_arrival_ms": [0.0]}}, "mine")


def test_an_unknown_policy_is_answered_with_the_nearest_valid_one() -> None:
    with pytest.raises(UserError, match=r"did you mean 'cg-bprr'\? valid: milp, milp-paper, cg-bprr, lp-"):
        offline_command([], "cgbprr")
    assert list(OFFLINE_POLICIES) == ["milp", "milp-paper", "cg-bprr", "lp-rounding"]


def test_too_many_requests_for_the_papers_program_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "many.json"
    path.write_text(json.dumps(document_of(TINY[0]) | {"request_clients": [0] * 17}), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"3 servers and 17 requests would have 1026 variables, more .* use milp"
    ):
        offline_command([path], "milp-paper")


@pytest.mark.parametrize("policy", ["milp", "lp-rounding"])
def test_a_too_large_instance_is_refused_with_its_file_and_size(policy: str, tmp_path: Path) -> None:
    document = document_of(TINY[0]) | {"L": 200, "M": [1e6] * 3}
    path = tmp_path / "large.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"200 blocks, 3 servers and 2 kinds of request .* use cg-bp"
    ) as caught:
        offline_command([path], policy)
    assert str(caught.value).startswith(str(path))
    (answer,) = offline_command([path], "cg-bprr")
    assert answer["feasible"]

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies import BlockRange, Hop, Placement, PolicyError, Route
from policies.checks import check_placement, check_route
from tests.support.problems import make_problem, placed

PROBLEM = make_problem([44.0, 30.0])
GOOD = placed(PROBLEM, [(0, 3), (2, 4)], [14.0, 10.0])


def test_placements_and_routes_that_keep_the_rules_pass() -> None:
    check_placement(PROBLEM, GOOD)
    check_placement(PROBLEM, placed(PROBLEM, [(0, 4), (0, 0)], [4.0, 0.0]))
    check_route(PROBLEM, GOOD, Route((Hop(0, 0, 3), Hop(1, 3, 4)), 0.0, 1.0), "mine")


@pytest.mark.parametrize(
    ("placement", "rule"),
    [
        (placed(PROBLEM, [(0, 4)], [0.0, 0.0]), "one range for each of the 2 servers, not 1"),
        (placed(PROBLEM, [(0, 4), (0, 0)], [0.0]), "one cache size for each of the 2 servers, not 1"),
        (placed(PROBLEM, [(0, 5), (0, 0)], [0.0, 0.0]), r"blocks \[0, 5\) on s0; the model has \[0, 4\)"),
        (placed(PROBLEM, [(3, 1), (0, 0)], [0.0, 0.0]), r"blocks \[3, 1\) on s0"),
        (
            placed(PROBLEM, [(0, 3), (2, 4)], [14.1, 0.0]),
            "overbooks s0: 30 bytes of blocks and 14.1 bytes of caches in 44 bytes",
        ),
        (placed(PROBLEM, [(0, 3), (2, 4)], [-1.0, 0.0]), "-1.0 bytes for caches on s0"),
        (placed(PROBLEM, [(0, 5), (2, 4)], [-6.0, 0.0]), r"blocks \[0, 5\) on s0"),
        (
            placed(PROBLEM, [(0, 3), (0, 4)], [14.0, -10.0]),
            "overbooks s1: 40 bytes of blocks and 0 bytes of caches in 30 bytes",
        ),
        (placed(PROBLEM, [(0, 3), (2, 4)], [float("nan"), 0.0]), "nan bytes for caches on s0"),
        (placed(PROBLEM, [(0, 1), (2, 3)], [0.0, 0.0]), "leaves blocks 1, 3 on no server"),
        (Placement("by hand", (None, BlockRange(0, 4)), (0.0, 0.0)), "returns None for s0"),  # type: ignore[arg-type]
    ],
)
def test_a_placement_that_breaks_a_rule_is_refused_with_the_policys_name_and_the_rule(
    placement: Placement, rule: str
) -> None:
    with pytest.raises(PolicyError, match=f"placement policy by hand .*{rule}"):
        check_placement(PROBLEM, placement)
    with pytest.raises(PolicyError, match=f"placement policy mine .*{rule}"):
        check_placement(PROBLEM, placement, "mine")


@pytest.mark.parametrize(
    ("hops", "rule"),
    [
        ((Hop(0, 0, 3),), "stops before block 3; the model has 4"),
        ((), "stops before block 0"),
        ((Hop(1, 2, 4),), "but block 0 is next"),
        ((Hop(0, 0, 3), Hop(1, 2, 4)), "but block 3 is next"),
        ((Hop(0, 0, 2), Hop(1, 2, 4)), "must go on to the end of the server's range"),
        ((Hop(0, 0, 4),), "must stay inside the server's range"),
        ((Hop(0, 0, 0), Hop(0, 0, 3)), "must stay inside the server's range"),
        ((Hop(2, 0, 4),), "names server 2, which does not exist"),
    ],
)
def test_a_route_that_breaks_a_rule_is_refused_with_the_policys_name_and_the_rule(
    hops: tuple[Hop, ...], rule: str
) -> None:
    with pytest.raises(PolicyError, match=f"routing policy mine .*{rule}"):
        check_route(PROBLEM, GOOD, Route(hops, 0.0, 1.0), "mine")


def test_answers_of_another_kind_are_refused() -> None:
    other: Any = [(0, 4)]
    with pytest.raises(PolicyError, match="placement policy mine must return a Placement, not list"):
        check_placement(PROBLEM, other, "mine")
    with pytest.raises(PolicyError, match="must return a Route or None, not list"):
        check_route(PROBLEM, GOOD, other, "mine")
    negative = Route((Hop(0, 0, 3), Hop(1, 3, 4)), -1.0, 1.0)
    with pytest.raises(PolicyError, match=r"a wait of -1\.0 s"):
        check_route(PROBLEM, GOOD, negative, "mine")


@pytest.mark.parametrize("wrong", ["soon", None, [1.0], np.array([0.0, 1.0])])
@pytest.mark.parametrize("key", ["wait_s", "cost_s"])
def test_a_route_whose_seconds_are_no_number_is_refused(key: str, wrong: Any) -> None:
    route = Route((Hop(0, 0, 3), Hop(1, 3, 4)), 0.0, 1.0)._replace(**{key: wrong})
    with pytest.raises(PolicyError, match=rf"(?s)routing policy mine .* {key} is .*; it must be a number"):
        check_route(PROBLEM, GOOD, route, "mine")


def test_a_placements_numbers_become_pythons_own() -> None:
    numbers: dict[str, Any] = {
        "cache_bytes": (np.float32(14), True),
        "design_concurrency": np.int64(2),
        "bounds": {"least_s": np.float64(0.5), "is_best": True, "unknown": None},
    }
    found = check_placement(PROBLEM, replace(GOOD, **numbers))
    assert list(map(repr, found.cache_bytes)) == ["14.0", "1.0"]
    assert repr(found.design_concurrency) == "2"
    assert repr(found.bounds) == "{'least_s': 0.5, 'is_best': True, 'unknown': None}"


@pytest.mark.parametrize(
    ("stated", "rule"),
    [
        ({"bounds": None}, "states bounds = None; they must be a dict"),
        ({"bounds": {"least_s": float("nan")}}, "states the bound least_s = nan; it must be a finite number"),
        ({"policy": 7}, "states policy = 7; it must be a text"),
    ],
)
def test_what_a_placement_states_beside_its_ranges_is_checked(stated: dict[str, Any], rule: str) -> None:
    with pytest.raises(PolicyError, match=f"placement policy mine {rule}"):
        check_placement(PROBLEM, replace(GOOD, **stated), "mine")

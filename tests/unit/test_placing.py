"""Placing an experiment: users' policies are found, and checked against the rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import testbed as tb
from policies.cgbp import CgBp
from policies.problem import Hop, InfeasiblePlacement, Placement, PolicyError, Problem, RequestSpec, Route
from policies.registry import PLACEMENTS, resolve_placement
from policies.state import SystemState
from policies.wsrr import WsRr
from testbed import terminal
from testbed.control.placing import CheckedRouter, RememberedPlacements, place, place_experiment, policy_code
from testbed.errors import UserError
from testbed.experiments import load_experiment
from tests.support.own_modules import write_module
from tests.support.problems import make_problem, placed

POLICY = """
from policies.problem import BlockRange, Placement

class EverywhereEverything:
    name = "everywhere"
    def place(self, problem, design_concurrency=None):
        n = problem.model.n_blocks
        return Placement(self.name, (BlockRange(0, n),) * problem.n_servers, (0.0,) * problem.n_servers)
"""


def test_a_policy_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, monkeypatch, "policy_beside_me", POLICY)
    settings = ["policy.placement=policy_beside_me:EverywhereEverything", "model.block_size=0.1 GB"]
    placed = place_experiment(load_experiment("clustered", settings))
    assert {r.n_blocks for r in placed.placement.ranges} == {70}
    assert placed.decision_s >= 0


def test_a_policy_that_overbooks_memory_is_stopped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(tmp_path, monkeypatch, "policy_that_overbooks", POLICY)
    settings = ["policy.placement=policy_that_overbooks:EverywhereEverything"]
    with pytest.raises(UserError, match=r"policy_that_overbooks:EverywhereEverything overbooks mig-1g-0"):
        place_experiment(load_experiment("clustered", settings))


def test_a_policy_whose_method_takes_something_else_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = POLICY.replace("def place(self, problem", "def place(self, servers, links, problem")
    assert text != POLICY
    write_module(tmp_path, monkeypatch, "policy_with_other_arguments", text)
    settings = ["policy.placement=policy_with_other_arguments:EverywhereEverything"]
    with pytest.raises(UserError, match=r"cannot be called as policies are: .*missing 1 required positional"):
        place_experiment(load_experiment("clustered", settings))


def test_what_a_search_of_the_design_concurrency_tries_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class Nothing:\n    name = 'nothing'\n    def place(self, problem, design_concurrency=None): return None\n"
    write_module(tmp_path, monkeypatch, "policy_that_returns_nothing", text)
    settings = ["policy.placement=policy_that_returns_nothing:Nothing", "policy.design_concurrency=searched"]
    with pytest.raises(UserError, match="Nothing must return a Placement, not NoneType"):
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


@pytest.mark.parametrize("name", [name for name in PLACEMENTS if not name.startswith("petals")])
def test_the_order_in_which_servers_join_is_petals_alone(name: str) -> None:
    problem = make_problem(
        [60.0, 33.0, 90.0, 45.0, 90.0], decode_s=[0.01, 0.02, 0.03, 0.01, 0.02], input_rtt_s=0.1
    )
    others = [replace(problem, join_order=order) for order in ((4, 3, 2, 1, 0), (2, 0, 4, 1, 3))]
    assert others[0] != others[1]
    assert resolve_placement(name).place(others[0]) == resolve_placement(name).place(others[1])


def test_a_placement_that_is_known_is_the_one_that_would_be_decided() -> None:
    known = RememberedPlacements()
    few = ("workload.n_requests=2", "model.n_blocks=14")
    changes = ("seed=1", "seed=2", "clients.site=Cluster1", "policy.design_concurrency=3")
    # Foresight searches for long.
    for policy, tried in (("petals", changes), ("proposed", changes), ("foresight", changes[:3:2])):
        for change in tried:
            experiment = load_experiment("clustered", [f"policy.name={policy}", *few, change])
            assert place(experiment, placements=known).placement == place(experiment).placement


def test_what_a_placement_policy_raises_is_known_too() -> None:
    known, said = RememberedPlacements(), []
    for seed in (1, 2):
        experiment = load_experiment("clustered", ["servers.1.count=0", f"seed={seed}"])
        with pytest.raises(InfeasiblePlacement) as caught:
            place(experiment, placements=known)
        said.append(caught.value)
    assert said[0] is said[1]


SLOW = """
import time
from policies.cgbp import CgBp

class Slow(CgBp):
    def place(self, problem, design_concurrency=None):
        time.sleep(0.3)
        return super().place(problem, design_concurrency)
"""


@pytest.mark.parametrize(
    ("somebody_looks", "policy", "said"),
    [(True, "policy_that_is_slow:Slow", 1), (True, "cg-bp", 0), (False, "policy_that_is_slow:Slow", 0)],
)
def test_a_policy_that_decides_for_long_is_named_once_to_whom_looks(
    somebody_looks: bool,
    policy: str,
    said: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_module(tmp_path, monkeypatch, "policy_that_is_slow", SLOW)
    monkeypatch.setattr(terminal, "LONG_S", 0.2)
    monkeypatch.setattr(terminal, "_tells_of_what_takes_long", False)
    if somebody_looks:
        terminal.tell_of_what_takes_long()
    place_experiment(load_experiment("clustered", [f"policy.placement={policy}"]))
    assert capsys.readouterr().err.count(f"placement policy {policy} decides which blocks go where") == said


class _Crashes(WsRr):
    name = "crashes"

    def bind(self, problem: Problem, placement: Placement) -> Any:
        return self

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        raise ZeroDivisionError("boom")


class _HasNone(_Crashes):
    name = "has-none"

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        return None


@pytest.mark.parametrize(
    ("routing", "reason"),
    [
        (_Crashes(), r"routing policy object:crashes failed at .* with ZeroDivisionError: boom"),
        (_HasNone(), r"\(the last: request 0 of 148 tokens has no chain with room for it\)"),
    ],
)
def test_a_search_says_what_is_wrong_with_the_routing(routing: WsRr, reason: str) -> None:
    searched = tb.scenario("clustered", {"policy.design_concurrency": "searched", "workload.n_requests": 2})
    with pytest.raises(tb.UserError, match=reason):
        tb.simulate(searched, policy=(CgBp(), routing))


class _Replays:
    """A router that returns the given routes, one after another."""

    def __init__(self, routes: list[Any]) -> None:
        self._routes = iter(routes)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Any:
        return next(self._routes)


def checked(*routes: Any) -> list[Route | None]:
    problem = make_problem([44.0, 30.0])
    placement = placed(problem, [(0, 3), (2, 4)], [14.0, 10.0])
    router = CheckedRouter(_Replays(list(routes)), problem, placement, "mine")
    return [router.route(RequestSpec(0, 1, 1), SystemState((1.0, 1.0)), 0.0) for _ in routes]


CHAIN = (Hop(0, 0, 3), Hop(1, 3, 4))


def test_a_chain_that_equals_a_checked_one_is_the_checked_one() -> None:
    equal: list[Any] = [
        ((0, 0, 3), (1, 3, 4)),
        (Hop(0.0, 0, 3), Hop(1, 3, 4)),  # type: ignore[arg-type]
        (Hop(np.int64(0), 0, 3), Hop(1, 3, 4)),  # type: ignore[arg-type]
    ]
    found = checked(*(Route(hops, 0.0, 1.0) for hops in (CHAIN, *equal)))
    assert [repr(route) for route in found] == [repr(Route(CHAIN, 0.0, 1.0))] * 4


def test_a_routes_seconds_become_pythons_own_numbers() -> None:
    waits: list[Any] = [np.float64(0.5), np.float32(0.5), 0.5]
    assert [repr(route) for route in checked(*(Route(CHAIN, wait, wait) for wait in waits))] == [
        repr(Route(CHAIN, 0.5, 0.5))
    ] * 3


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (Route(CHAIN, "soon", 0.0), "wait_s is 'soon'"),  # type: ignore[arg-type]
        (Route(CHAIN, 10**30, 0.0), "wait_s is 1000000"),
        (Route(CHAIN, 0.0, None), "cost_s is None"),  # type: ignore[arg-type]
        (Route(CHAIN, -1.0, 0.0), r"a wait of -1\.0 s"),
        (Route(([0, 0, 3], [1, 3, 4]), 0.0, 0.0), "hops are a tuple of Hop"),  # type: ignore[arg-type]
        (Route(list(CHAIN), 0.0, 0.0), "hops are a tuple of Hop"),  # type: ignore[arg-type]
        (CHAIN, "must return a Route or None, not tuple"),
    ],
)
def test_a_wrong_route_after_a_good_one_is_refused(wrong: Any, reason: str) -> None:
    with pytest.raises(PolicyError, match=f"routing policy mine .*{reason}"):
        checked(Route(CHAIN, 0.0, 1.0), wrong)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InfeasiblePlacement(""), "raises InfeasiblePlacement without a text; have it name the reason"),
        (ValueError(), r"failed at test_placing\.py:\d+ with ValueError, which has no text"),
    ],
)
def test_a_policy_that_refuses_without_a_reason_is_named(error: Exception, reason: str) -> None:
    with (
        pytest.raises(
            InfeasiblePlacement if isinstance(error, PolicyError) else PolicyError,
            match=f"^placement policy mine {reason}$",
        ),
        policy_code("placement", "mine"),
    ):
        raise error

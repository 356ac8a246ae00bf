"""Traits of policies: what a class states decides, however its module and itself are called."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from policies import Placement, Problem
from policies.fixed import FixedPlacement
from policies.interfaces import PlacementPolicy, RoutingPolicy, queue_of, session_setup_of, trait
from policies.problem import PolicyError
from policies.registry import PLACEMENTS, ROUTINGS, shipped_policy
from testbed import terminal
from testbed.cli.main import app
from testbed.control import placing
from testbed.control.placing import load_to_run, place_experiment
from testbed.errors import UserError
from testbed.experiments import dump_toml, load_experiment

MINE = """
from pathlib import Path

from policies.cgbp import CgBp
from policies.composition import Jffc
from policies.petals import PetalsPlacement
from policies.wsrr import WsRr

Path("it-ran").touch()


class Queued(Jffc):
    name = "queued"


class Petals(PetalsPlacement):
    name = "of-petals"


class Own:
    name = "own"

    def place(self, problem, design_concurrency=None):
        assert problem.join_order
        return CgBp().place(problem, design_concurrency)

    def bind(self, problem, placement):
        return WsRr().bind(problem, placement)


class Forwards(WsRr):
    name = "forwards"
    communication = "server-to-server"


class Wrong(WsRr):
    name = "wrong"
    queue = "lifo"
"""
MODULES = ("petals_mine", "mine")
BUSY = ("--set", "workload.n_requests=30", "--set", "workload.rate=5")
CHAINS = ("--placement", "cg-bp", "--set", "policy.design_concurrency=3")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the same module under a name that begins as PETALS' does, and under another."""
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(terminal, "_SAID", set())
    for name in MODULES:
        sys.modules.pop(name, None)
    yield tmp_path
    for name in MODULES:
        sys.modules.pop(name, None)


def outcome(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code in (0, 1), result.output
    return result.stdout


def simulated(*options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(outcome("simulate", "clustered", *options, "--json"))
    return found


def resolved(run: Path) -> dict[str, Any]:
    policy: dict[str, Any] = tomllib.loads((run / "scenario.toml").read_text("utf-8"))["policy"]
    return policy


def test_a_subclass_of_jffc_waits_in_the_queue_that_jffc_states() -> None:
    shipped = simulated(*CHAINS, "--routing", "jffc", *BUSY)
    own = simulated(*CHAINS, "--routing", "mine:Queued", *BUSY)
    assert own["requests"] == shipped["requests"]
    without = simulated(*CHAINS, "--routing", "mine:Queued", *BUSY, "--set", "policy.queue=none")
    assert without["requests"] != shipped["requests"], "a queue that makes no difference shows nothing"


def test_a_routing_policy_without_traits_has_no_queue() -> None:
    own = simulated("--routing", "petals_mine:Own", *BUSY)
    assert own["requests"] == simulated("--routing", "ws-rr", *BUSY)["requests"]


@pytest.mark.parametrize("command", ["up", "simulate"])
def test_a_run_states_what_the_traits_of_its_policies_decided(folder: Path, command: str) -> None:
    names = (*CHAINS, "--routing", "mine:Queued", "--set", "workload.n_requests=2")
    network = ("--network", "memory") if command == "up" else ()
    outcome(command, "clustered", *names, *network, "--out", "run")
    assert resolved(folder / "run")["queue"] == "fifo"
    again = load_experiment(str(folder / "run" / "scenario.toml"))
    assert again.policy.queue is not None and again.policy.queue.kind == "fifo" and again.policy.unread == ()


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(("policy", "setup_s"), [("Own", 60), ("Petals", 250)])
def test_the_session_setup_is_that_of_the_class_whatever_its_module_is_called(
    module: str, policy: str, setup_s: int
) -> None:
    published = ("--set", "calibration.set=petals-clustered", "--session-setup", "reference")
    one = ("--set", "workload.n_requests=1")
    found = simulated("--placement", f"{module}:{policy}", *published, *one)
    assert found["session_setup_ms"] == setup_s * 1e3
    stated = ("--set", "policy.session_setup=petals")
    assert (
        simulated("--placement", f"{module}:{policy}", *published, *one, *stated)["session_setup_ms"] == 250e3
    )


def test_a_new_placement_of_a_resolved_scenario_has_its_own_session_setup(folder: Path) -> None:
    published = ["calibration.set=petals-clustered", "calibration.session_setup=true"]
    path = folder / "resolved.toml"
    path.write_text(dump_toml(load_experiment("clustered", published)), encoding="utf-8")
    assert load_experiment(str(path)).calibration.session_setup_s == 60
    assert load_experiment(str(path), ["policy.name=petals"]).calibration.session_setup_s == 250
    stated = ["policy.name=petals", "policy.session_setup=proposed"]
    assert load_experiment(str(path), stated).calibration.session_setup_s == 60


def test_a_routing_policy_can_state_that_servers_forward() -> None:
    assert load_to_run("clustered", ["policy.routing=mine:Forwards"]).problem.forwarding
    kept = ["policy.routing=mine:Forwards", "policy.communication=hub-spoke"]
    assert not load_to_run("clustered", kept).problem.forwarding


def test_reading_a_scenario_leaves_open_what_a_policy_of_the_file_would_decide(folder: Path) -> None:
    shown = outcome("show", "clustered", "--set", "policy.routing=mine:Queued")
    assert not (folder / "it-ran").exists()
    path = folder / "shown.toml"
    path.write_text(shown, encoding="utf-8")
    policy = tomllib.loads(shown)["policy"]
    assert "queue" not in policy and "communication" not in policy
    assert policy["session_setup"] == "proposed"
    read = load_experiment(str(path))
    assert read.policy.unread == ("mine:Queued",) and read.policy.queue is None
    outcome("validate", str(path))
    assert not (folder / "it-ran").exists()
    run = load_to_run(str(path))
    assert run.policy.queue is not None and run.policy.unread == ()
    assert (folder / "it-ran").exists()


def test_a_policy_of_the_file_is_announced_before_its_traits_are_read(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "mine.toml"
    path.write_text(dump_toml(load_experiment("clustered", ["policy.routing=mine:Own"])), encoding="utf-8")
    place_experiment(load_to_run(str(path)))
    notice = "notice: the scenario file runs code of mine:Own as its policy"
    assert caplog.messages == [notice]


def test_what_is_placed_without_having_read_a_trait_that_matters_is_refused() -> None:
    with pytest.raises(UserError, match="queue = 'fifo', which was not read"):
        place_experiment(load_experiment("clustered", ["policy.routing=mine:Queued"]))


def test_a_trait_of_an_unknown_value_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(
        UserError, match=r"the policy wrong has queue = 'lifo'; .* 'none', 'fifo', 'backfill'"
    ):
        load_to_run("clustered", ["policy.routing=mine:Wrong"])


def test_given_placements_and_routes_have_the_traits_of_their_classes() -> None:
    assert shipped_policy("placement", "fixed:plan.json") is FixedPlacement
    assert trait(FixedPlacement, PlacementPolicy, "sees_absent_servers")
    experiment = load_experiment("clustered", ["policy.routing=fixed:a100-0"])
    assert experiment.policy.queue is None and experiment.policy.unread == ()


def test_shipped_policies_have_the_traits_that_are_known_of_them() -> None:
    assert {name for name, policy in ROUTINGS.items() if queue_of(policy) != "none"} == {"jffc"}
    of_petals = {name for name, policy in PLACEMENTS.items() if session_setup_of(policy) == "petals"}
    assert of_petals == {"petals", "petals-optimized-order", "petals-optimized-number"}
    ordered = {name for name, policy in PLACEMENTS.items() if policy.sees_join_order}
    assert ordered == {"petals", "petals-optimized-number"}


def test_a_placement_that_states_not_to_see_the_join_order_sees_none() -> None:
    seen: list[tuple[int, ...]] = []

    class Blind(FixedPlacement):
        sees_join_order = False

        def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
            seen.append(problem.join_order)
            raise PolicyError("seen")

    class Sighted(Blind):
        sees_join_order = True

    experiment = load_experiment("clustered")
    for policy in (Blind(()), Sighted(())):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match="seen"):
            patch.setattr(placing, "placement_policy", lambda name, found=policy: found)
            place_experiment(experiment)
    assert seen == [(), experiment.problem.join_order]


def test_a_class_that_states_nothing_has_the_defaults_of_the_protocol() -> None:
    class Nothing:
        name = "nothing"

    assert queue_of(Nothing()) == RoutingPolicy.queue == "none"
    assert session_setup_of(Nothing) == PlacementPolicy.session_setup == "proposed"

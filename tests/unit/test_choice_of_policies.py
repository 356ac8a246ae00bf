"""``--policy``: which names commands accept, and the sentence that all of them have for a wrong one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from testbed.cli.main import app
from testbed.control.choice import chosen
from testbed.errors import ScenarioError, UserError
from testbed.experiments import load_experiment
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.sources import Document
from tests.unit.simulator.test_links_used import BASE

MINE = """
from policies.cgbp import CgBp
from policies.wsrr import WsRr
class A(CgBp):
    name = "a"
class B(WsRr):
    name = "b"
"""
FEW = ("--set", "workload.n_requests=3", "--set", "workload.n_output_tokens=4")
COMMANDS = {
    "up": ("--out", "run", "--no-report", "--network", "memory"),
    "serve": ("--port", "0"),
    "simulate": (),
    "sweep": ("--out", "study", "--jobs", "1"),
    "capacity": ("--slo", "tpot_mean=1ms", "--runs", "1", "--jobs", "1"),
    "advise": ("--budget", "1", "--candidates", "a100@Cluster1=1", "--runs", "1", "--jobs", "1"),
    "explain": ("--request", "1"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policies.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "my_policies", raising=False)


def run(command: str, *options: str) -> int:
    try:
        return int(
            app([command, "clustered", *COMMANDS[command], *FEW, *options], standalone_mode=False) or 0
        )
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "serve"])
@pytest.mark.parametrize("policy", ["cg-bp+petals-code", "my_policies:A+my_policies:B"])
def test_a_policy_is_a_placement_and_a_routing_in_every_command(command: str, policy: str) -> None:
    assert run(command, "--policy", policy) == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("petalz", "there is no policy pair 'petalz'; did you mean 'petals'?"),
        ("my_policies:A", "it has no method bind(); pair it with one: my_policies:A+ROUTING"),
        ("cg-bp+", "there is no routing policy ''; valid: petals, "),
        ("+ws-rr", "there is no placement policy ''; valid: petals, "),
        ("cg-bp+ws-rr+x", "there is no routing policy 'ws-rr+x'; did you mean 'ws-rr'?"),
        ("my_policies:C+ws-rr", "there is no C in "),
        ("fixed:none.json+ws-rr", "none.json: cannot be read"),
    ],
)
def test_a_wrong_policy_is_one_sentence_that_all_commands_share(command: str, policy: str, said: str) -> None:
    with pytest.raises(UserError) as wrong:
        run(command, "--policy", policy)
    sentence = str(wrong.value)
    assert sentence.startswith(f"policy {policy}: ") and said in sentence and "\n" not in sentence
    with pytest.raises(UserError) as alone:
        chosen(policy)
    assert str(alone.value) == sentence


def test_a_pair_and_its_halves_are_the_same_choice() -> None:
    assert PolicyChoice.of("proposed").halves == PolicyChoice.of("cg-bp+ws-rr").halves == ("cg-bp", "ws-rr")
    assert PolicyChoice.of(None) == PolicyChoice()
    with pytest.raises(UserError, match=r"the policy cg-bp\+ws-rr is given twice"):
        run("simulate", "--policy", "proposed", "--policy", "cg-bp+ws-rr")
    assert run("simulate", "--policy", "cg-bp+petals", "--policy", "cg-bp+ws-rr") == 0


def test_other_keys_of_policy_leave_the_default_pair() -> None:
    document = {key: value for key, value in BASE.items() if key != "policy"}
    named = load_experiment(Document(document | {"policy": {"name": "proposed", "design_concurrency": 2}}))
    assert load_experiment(Document(document | {"policy": {"design_concurrency": 2}})) == named
    with pytest.raises(ScenarioError, match=r"policy\.routing: is missing"):
        load_experiment(Document(document | {"policy": {"placement": "cg-bp"}}))

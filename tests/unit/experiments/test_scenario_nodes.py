"""``[[node]]``: programs of the user's on nodes of their own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from policies.links import Link
from testbed.errors import UserError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment, Program
from testbed.runtime.programs import check_programs
from testbed.runtime.stage import choose_stage
from testbed.runtime.wiring import network_spec

Load = Callable[..., Experiment]
Complain = Callable[..., str]

WEB = """
[[node]]
name = "web"
site = "B"
command = "python3 -m http.server '80 80'"
environment = { GREETING = "hello" }
restart = "on-failure"
[[node]]
name = "empty"
site = "A"
"""
PAIRS = (("A", "A", 5), ("A", "B", 100), ("B", "B", 2))
ROWS = ",".join(f"{{sites=['{a}','{b}'],rtt='{rtt} ms',rate='1 Gbit/s'}}" for a, b, rtt in PAIRS)
INSIDE_B = f"network.pairs=[{ROWS}]"


def with_nodes(load: Load) -> Experiment:
    return load(INSIDE_B, replace=("", WEB))


def test_a_node_has_a_command_an_environment_and_links_to_all_others(load: Load) -> None:
    e = with_nodes(load)
    words = ("python3", "-m", "http.server", "80 80")
    assert e.programs == (Program("web", words, {"GREETING": "hello"}, True), Program("empty"))
    assert e.sites["web"] == "B" and "web" not in e.nodes
    spec = network_spec(e, "run")
    assert spec.nodes == (*e.nodes, "web", "empty")
    assert set(permutations(spec.nodes, 2)) == set(spec.links)
    assert e.network.links["web", "empty"] == Link(0.05, 1e9)


def test_a_stored_scenario_has_the_same_nodes(load: Load, tmp_path: Path) -> None:
    e = with_nodes(load)
    stored = tmp_path / "stored.toml"
    stored.write_text(dump_toml(e), encoding="utf-8")
    again = load_experiment(str(stored))
    assert (again.programs, again.network.links, again.sites) == (e.programs, e.network.links, e.sites)


def test_words_that_begin_with_a_dot_and_a_slash_are_files_beside_the_scenario(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    text = Path("scenarios/petals-real.toml").read_text(encoding="utf-8")
    file.write_text(text.replace("swarm.py dht", "swarm.py dht .hidden a./b"), encoding="utf-8")
    words = load_experiment(str(file)).programs[0].command
    assert words[1:] == (str(tmp_path / "petals" / "swarm.py"), "dht", ".hidden", "a./b")
    by_hand = load_experiment(str(file), ["node.0.command='./run it'"]).programs
    assert by_hand[0].command == (str(Path("run").absolute()), "it")
    assert by_hand[1].command[1] == str(tmp_path / "petals" / "swarm.py")


def test_in_virtual_time_these_nodes_are_not_there_and_the_others_are_as_without_them(load: Load) -> None:
    spec = network_spec(with_nodes(load), "run", is_virtual=True)
    without = network_spec(load(INSIDE_B), "run", is_virtual=True)
    assert (spec.nodes, spec.links) == (without.nodes, without.links)


def test_a_run_with_programs_is_in_real_time(load: Load) -> None:
    e = with_nodes(load)
    assert choose_stage(e).clock == "real"
    with pytest.raises(
        UserError, match=r"the clock cannot be virtual, since programs of \[\[node\]\] run in real time"
    ):
        choose_stage(load("clock=virtual", INSIDE_B, replace=("", WEB)))


def test_programs_are_announced_before_they_run(load: Load) -> None:
    said: list[str] = []
    check_programs(with_nodes(load), said.append)
    assert said == ["node web will run python3 -m http.server '80 80'"]


def test_a_program_that_is_not_there_is_named(load: Load) -> None:
    e = load(INSIDE_B, replace=("", WEB.replace("python3", "no-such-program")))
    with pytest.raises(UserError, match="node web: there is no program 'no-such-program'"):
        check_programs(e, lambda _: None)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('name = "web"\nsite = "C"', "node.0.site"),
        ('name = "web"\nsite = "B"', "no row for B to B"),
        ('name = "a100-0"\nsite = "A"', 'makes a second node "a100-0"'),
        ('name = "fabric"\nsite = "A"', "is the name of a testbed process"),
        ('name = "web"\nsite = "A"\ncommand = []', "is empty; give the program to run"),
        ('name = "web"\nsite = "A"\ncommand = "a \'b"', "cannot be split into words"),
        ('name = "web"\nsite = "A"\ncommand = 3', "node.0.command"),
        ('name = "web"\nsite = "A"\nrestart = "always"', "on-failure"),
        ('name = "web"\nsite = "A"\nenvironment = { "A=B" = "c" }', "cannot be an environment variable"),
        ('name = "web"\nsite = "A"\ncomand = "x"', 'did you mean "command"'),
    ],
)
def test_a_node_that_cannot_be_is_refused(complaint: Complain, table: str, expected: str) -> None:
    assert expected in complaint(replace=("", f"[[node]]\n{table}\n"))

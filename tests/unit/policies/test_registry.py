from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from policies import PolicyError, registry
from policies.cgbp import CgBp
from policies.petals import PetalsPlacement
from policies.petals_routing import PetalsRouting
from policies.registry import (
    PAIRS,
    PrintsToStderr,
    list_policies,
    resolve_pair,
    resolve_placement,
    resolve_routing,
)
from policies.wsrr import WsRr
from testbed.experiments import load_experiment

OWN = '''
class Mine:
    """Puts everything on the first server."""
    name = "mine"
    def place(self, problem, design_concurrency=None): ...
    def bind(self, problem, placement): ...

class Picky(Mine):
    def __init__(self, speed): ...

class Useless:
    name = "useless"

class Nameless:
    def place(self, problem, design_concurrency=None): ...
'''


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_policies.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_policies"
    sys.modules.pop("own_policies", None)


def test_shipped_policies_and_pairs_go_by_their_names() -> None:
    assert isinstance(resolve_placement("cg-bp"), CgBp)
    assert isinstance(resolve_placement("petals"), PetalsPlacement)
    assert isinstance(resolve_routing("ws-rr"), WsRr)
    assert isinstance(resolve_routing("petals"), PetalsRouting)
    assert resolve_pair("proposed") == ("cg-bp", "ws-rr")
    assert resolve_pair("petals") == ("petals", "petals")


def test_an_unknown_name_is_answered_with_the_nearest_valid_one() -> None:
    with pytest.raises(
        PolicyError, match=r"no placement policy 'cgbp'; did you mean 'cg-bp'\? valid: petals, .*cg-bp"
    ):
        resolve_placement("cgbp")
    with pytest.raises(PolicyError, match="did you mean 'ws-rr'"):
        resolve_routing("WS-RR")
    with pytest.raises(PolicyError, match=r"no policy pair 'best'; valid: petals, .*proposed"):
        resolve_pair("best")


def test_a_class_of_ones_own_goes_by_module_and_name(own_module: str) -> None:
    assert resolve_placement(f"{own_module}:Mine").name == "mine"
    assert resolve_routing(f"{own_module}:Mine").name == "mine"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "no_such_module:Mine",
            "loaded: there is no module no_such_module in the current folder or on PYTHONPATH$",
        ),
        ("./mine.py:Mine", "loaded: ./mine.py is a file; name its module, mine:Mine, and begin"),
        ("mine.py:Mine", "loaded: mine.py is a file; name its module, mine:Mine, and begin"),
        (
            "own_policies:Missing",
            r"there is no Missing in .*own_policies.py; its classes are Mine, Picky, Useless",
        ),
        (
            "own_policies:Picky",
            "Picky without arguments failed with TypeError: .*'speed'; correct its constructor",
        ),
        ("own_policies:", "loaded: write module:Class$"),
        (":Mine", "loaded: write module:Class$"),
        ("own_policies:Useless", r"has no method place\(\)"),
        ("own_policies:Nameless", "has no name"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_with_its_name_and_the_reason(
    own_module: str, name: str, reason: str
) -> None:
    with pytest.raises(PolicyError, match=reason) as caught:
        resolve_placement(name)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "def bind(:",
            r"its module failed with SyntaxError: invalid syntax \(own_broken.py, line 1\); correct that$",
        ),
        (
            "\n1 / 0",
            "its module failed at own_broken.py:2 with ZeroDivisionError: division by zero; correct that$",
        ),
        ("exit(3)", "its module failed at .* with SystemExit: 3; correct that$"),
        (
            "import no_such_module",
            "own_broken.py:1 with ModuleNotFoundError: .*; install that, or correct the import$",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_line_to_correct(
    own_module: str, tmp_path: Path, code: str, reason: str
) -> None:
    (tmp_path / "own_broken.py").write_text(code, encoding="utf-8")
    with pytest.raises(PolicyError, match=reason):
        resolve_routing("own_broken:Mine")


def test_installed_policies_are_found_and_listed_with_their_summaries(
    own_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [
        EntryPoint("mine", f"{own_module}:Mine", "testbed.placement"),
        EntryPoint("broken", "no_such_module:X", "testbed.placement"),
        EntryPoint("cg-bp", f"{own_module}:Mine", "testbed.placement"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if p.group == group])
    assert resolve_placement("mine").name == "mine"
    assert isinstance(resolve_placement("cg-bp"), CgBp)
    rows = {(row["kind"], row["name"]): row["summary"] for row in list_policies()}
    assert rows["placement", "mine"] == "Puts everything on the first server."
    assert "there is no module no_such_module" in rows["placement", "broken"]
    assert ("routing", "mine") not in rows


def test_every_listed_policy_has_a_summary_of_one_line() -> None:
    rows = list_policies()
    assert [r["name"] for r in rows if r["kind"] == "pair"] == list(PAIRS)
    assert all(r["summary"] and "\n" not in r["summary"] for r in rows)


@pytest.mark.parametrize("name", [name for name in registry.PLACEMENTS if name != "petals"])
@pytest.mark.parametrize("batching", ["none", "continuous"])
def test_a_design_concurrency_below_one_is_refused_by_every_placement_that_has_one(
    name: str, batching: str
) -> None:
    problem = load_experiment("clustered", [f"compute.batching={batching}"]).problem
    with pytest.raises(PolicyError, match="design concurrency must be at least 1, not 0"):
        registry.PLACEMENTS[name]().place(problem, 0)


def test_two_threads_that_print_to_stderr_leave_stdout_as_it_was() -> None:
    stdout, one, other = sys.stdout, PrintsToStderr(), PrintsToStderr()
    one.__enter__()
    other.__enter__()
    one.__exit__()
    other.__exit__()
    assert sys.stdout is stdout

"""The rules of CONTRIBUTING.md about imports, and its map."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from netem.networks import NETWORKS

ROOT = Path(__file__).resolve().parents[2]
_CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
OURS = {"policies", "netem", "nodes", "scenarios", "testbed", "tests", "benchmarks"}
MAY_IMPORT = {
    "policies": {"policies"},
    "netem": {"netem", "policies"},
    "nodes": {"nodes", "policies"},
    "scenarios": set(),
    "testbed": {"testbed", "policies", "netem", "nodes", "scenarios"},
}


def imported(path: Path) -> set[str]:
    """Return the top-level names of all imports of a module, with those inside functions."""
    return {name.partition(".")[0] for name in imported_modules(path)}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_its_place_allows(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    assert modules
    for module in modules:
        others = imported(module) & OURS
        assert others <= MAY_IMPORT[package], f"{module.relative_to(ROOT)} imports {others}"


def test_a_command_changes_an_experiment_only_through_its_tables() -> None:
    """``replace(experiment, ...)`` would leave behind what is saved, and what the twin is made from."""
    found = []
    for path in sorted((*(ROOT / "testbed").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"))):
        if (ROOT / "testbed" / "experiments") in path.parents:
            continue
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "replace" in source else ():
            if not isinstance(node, ast.Call) or "replace" not in ast.unparse(node.func):
                continue
            text = ast.unparse(node)
            if re.match(r"[\w.]*replace\((\w+\.)*_?(experiment|twin),", text):
                found.append(f"{path.relative_to(ROOT)}: {text}")
    assert not found, "use testbed.experiments.changed"


LAYERS = (
    *(
        "cli",
        "api",
        "inspect",
        "studies",
        "simulator",
        "runs",
        "serving",
        "page",
        "results",
        "runtime",
        "fast",
        "control",
        "experiments",
        "records",
    ),
    *("rundir", "cluster", "codeversion", "faultkinds", "terminal", "garbage", "errors"),
)
"""The folders of ``testbed``, in order: each may import those after it."""


def test_a_folder_of_testbed_imports_only_those_below_it() -> None:
    modules = (path.relative_to(ROOT / "testbed") for path in (ROOT / "testbed").rglob("*.py"))
    assert {path.with_suffix("").parts[0] for path in modules} == {"__init__", "__main__", *LAYERS}
    for layer in LAYERS:
        folder = ROOT / "testbed" / layer
        for module in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
            below = LAYERS[LAYERS.index(layer) :]
            for name in imported_modules(module):
                package, _, rest = name.partition(".")
                assert package != "testbed" or rest.partition(".")[0] in below, (
                    f"{module.relative_to(ROOT)} imports {name}"
                )


def test_no_module_of_testbed_needs_itself() -> None:
    """Not even indirectly. ``TopologicalSorter`` reports the cycle."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "testbed").rglob("*.py")
    }
    needs = {
        name: {
            known
            for used in imported_modules(path)
            for known in (used, used.rpartition(".")[0])
            if known in modules
        }
        for name, path in modules.items()
    }
    assert len(list(TopologicalSorter(needs).static_order())) == len(modules)


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """Return the full names of all imports of a module, with those inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_policies_know_neither_clock_nor_files_nor_network() -> None:
    for module in (ROOT / "policies").rglob("*.py"):
        foreign = imported(module) & {"asyncio", "time", "os", "pathlib", "socket", "aiohttp", "torch"}
        assert not foreign, f"{module.name} imports {foreign}"


def test_only_the_blocks_backend_may_import_torch() -> None:
    for package in MAY_IMPORT:
        for module in (ROOT / package).rglob("*.py"):
            # What runs in PETALS' own environment is no part of the testbed.
            if not module.is_relative_to(ROOT / "nodes" / "blocks") and module.parent.name != "petals":
                assert not imported(module) & {"torch", "transformers"}, module


def test_nothing_outside_of_netem_asks_which_network_it_is() -> None:
    """Callers ask ``netem.networks.Network`` what it can do: never its name, never its class."""
    classes = {network.implementation.partition(":")[2] for network in NETWORKS.values()} | {"Backend"}
    asked = []
    for package in ("testbed", "nodes", "policies"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                match node:
                    case ast.Constant():
                        is_named = node.value in ("fabric", "loopback")
                    case ast.Compare():  # the other names are words for other things, too
                        words = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
                        is_named = bool(words & NETWORKS.keys()) and bool(
                            re.search("network|backend", ast.unparse(node))
                        )
                    case ast.Call(ast.Name("isinstance")):
                        is_named = bool(set(re.findall(r"\w+", ast.unparse(node))) & classes)
                    case _:
                        is_named = False
                if is_named:
                    asked.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert asked == []


def test_only_the_launcher_of_nodes_in_one_process_imports_a_networks_own_module() -> None:
    own = {network.implementation.partition(":")[0] for network in NETWORKS.values()}
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "testbed").rglob("*.py")
        if own & {name for used in imported_modules(path) for name in (used, used.rpartition(".")[0])}
    }
    assert importing == {"testbed/runtime/virtual/memory.py"}


def test_every_package_says_what_its_modules_are_for() -> None:
    for package in MAY_IMPORT:
        source = (ROOT / package / "__init__.py").read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(source)), f"{package} has no map"


def test_the_files_where_contributing_says_that_changes_begin_are_there() -> None:
    table = _CONTRIBUTING.partition("### Where a change goes")[2].partition("###")[0]
    rows = [re.findall(r"`([^`]+\.\w+)`", line) for line in table.splitlines()]
    named = [row for row in rows if row]
    assert len(named) >= 13
    assert [row for row in named if not 2 <= len(row) <= 4] == []
    assert [name for row in named for name in row if not (ROOT / name).exists()] == []


def test_contributing_names_only_what_is_there() -> None:
    """Files and folders (below the root or ``testbed``; modules alone below the folder of their line), and names."""
    missing = []
    for line in _CONTRIBUTING.splitlines():
        named = re.findall(r"`([\w./]+)`", line)
        folders = [ROOT, ROOT / "testbed"]
        folders += [folder / name for folder in folders for name in named if (folder / name).is_dir()]
        for name in named:
            is_path = "/" in name or name.endswith((".py", ".md"))
            if is_path and not any((folder / name).exists() for folder in folders):
                missing.append(name)
            elif re.fullmatch(r"(testbed|nodes|netem|policies)(\.\w+)+", name):
                module, _, attribute = name.rpartition(".")
                if not hasattr(importlib.import_module(module), attribute):
                    missing.append(name)
    assert missing == []


def test_contributing_lists_the_folders_of_testbed_in_their_order() -> None:
    table = _CONTRIBUTING.partition("| folder | holds |")[2].partition("###")[0]
    folders = [layer for layer in LAYERS if (ROOT / "testbed" / layer).is_dir()]
    assert re.findall(r"^\| `(\w+)/`", table, re.MULTILINE) == folders


def test_contributing_lists_the_studies() -> None:
    [line] = [line for line in _CONTRIBUTING.splitlines() if line.startswith("| `studies/`")]
    folders = {path.parent.name for path in (ROOT / "testbed/studies").glob("*/__init__.py")}
    assert set(re.findall(r"`(\w+)`", line)) == folders


def test_readme_and_classifiers_name_the_pythons_that_ci_tests() -> None:
    ci, readme = ((ROOT / name).read_text(encoding="utf-8") for name in (".ci/run", "README.md"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    tested = re.findall(r'^pythons="([\d. ]+)"$', ci, re.MULTILINE)[0].split()
    prefix = "Programming Language :: Python :: "
    assert [c.removeprefix(prefix) for c in project["classifiers"] if c.startswith(prefix)] == tested
    assert f"(tested: {', '.join(tested)})" in readme
    assert project["requires-python"] == f">={tested[0]}"


def test_no_two_files_of_tests_have_the_same_name() -> None:
    """They are modules of their bare names: where both can be imported, pytest refuses one of them."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, n in names.items() if n > 1] == []

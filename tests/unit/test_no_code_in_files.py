"""No file that the tool reads can make it run code, but for a policy that is named ``module:Class``."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.json_files import read_json
from testbed.experiments.problems import KeyedError
from testbed.experiments.topology_files import read_foreign, unique_names
from testbed.experiments.traces import read_trace

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("policies", "netem", "nodes", "scenarios", "testbed")
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "joblib", "marshal", "shelve", "yaml", "code", "runpy", "imp"}  # fmt: skip
FORBIDDEN_NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
FORBIDDEN_CALLS = {("torch", "load"), ("torch", "hub"), ("jit", "load"), ("np", "load"), ("numpy", "load"), ("pd", "read_pickle")}  # fmt: skip
PRIVATE_PIPES = {
    "testbed/runtime/real/launcher.py",
    "testbed/runtime/real/handle.py",
    "testbed/studies/sweep/pool.py",
}
"""These unpickle only what the testbed's processes send each other over private socket pairs and pipes."""
IMPORTS_BY_NAME = {"policies/registry.py", "netem/networks.py", "testbed/__init__.py"}
"""Modules that import by name: but for policies, the names are constants of ours."""


@functools.cache
def _modules() -> list[tuple[str, ast.Module]]:
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return [(str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


def _faults(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            yield from (name for name in names if name.partition(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in FORBIDDEN_NAMES:
                yield f"{function.id}()"
            elif isinstance(function, ast.Attribute):
                base = function.value
                owner = base.id if isinstance(base, ast.Name) else getattr(base, "attr", "")
                keywords = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                if (owner, function.attr) in FORBIDDEN_CALLS and keywords.get("weights_only") is not True:
                    yield f"{owner}.{function.attr}()"
                if keywords.get("allow_pickle") is True or keywords.get("shell") is True:
                    yield f"{function.attr}({', '.join(map(str, keywords))})"
                if keywords.get("trust_remote_code") is True:
                    yield f"{function.attr}(trust_remote_code=True)"


def test_nothing_in_the_packages_can_turn_data_into_code() -> None:
    modules = dict(_modules())
    assert len(modules) > 100
    found = {path: faults for path, tree in modules.items() if (faults := list(_faults(tree)))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from yaml import load",
        "eval(x)",
        "import torch\ntorch.load(p)",
        "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
    ],
)
def test_the_search_for_code_in_data_finds_each_kind(source: str) -> None:
    assert list(_faults(ast.parse(source)))


def test_only_processes_of_ours_exchange_objects_and_only_the_registries_import_by_name() -> None:
    for path, tree in _modules():
        if not re.search(
            "multiprocessing|ProcessPool|import_module|__loader__", (ROOT / path).read_text("utf-8")
        ):
            continue
        text = ast.unparse(tree)  # without comments
        if "multiprocessing" in text or "concurrent.futures.ProcessPool" in text:
            assert path in PRIVATE_PIPES, path
        if "import_module" in text or "__loader__" in text:
            assert path in IMPORTS_BY_NAME, path


def test_a_policy_that_a_scenario_names_is_not_imported_by_reading_the_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(
        "clustered", ['policy.placement="evil:Policy"', 'policy.routing="evil:Policy"']
    )
    assert experiment.policy.placement == "evil:Policy"


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;">]>'
    '<graphml xmlns="http://graphml.graphdrawing.org/xmlns"><graph edgedefault="undirected">'
    '<node id="&b;"/></graph></graphml>'
)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_xml_that_defines_entities_is_refused_before_they_are_expanded(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "bomb.graphml"
    path.write_bytes(BOMB.encode(encoding))
    with pytest.raises(UserError, match=r"has a document type .* remove it"):
        read_foreign(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.graphml", '<graphml xmlns="http://graphml.graphdrawing.org/xmlns">' + "<a>" * 100_000),
        ("deep.gml", "graph [ " + "a [ " * 50_000 + "] " * 50_000 + "]"),
        ("many.graph", "NODES " + "9" * 5000 + "\nx\n"),
        ("few.graph", "NODES 99999999999\nx\n"),
    ],
)
def test_topology_files_of_absurd_depth_or_numbers_are_refused_in_a_sentence(
    tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=name):
        read_foreign(tmp_path / name)


def test_names_that_repeat_a_hundred_thousand_times_are_told_apart() -> None:
    names = unique_names(["a"] * 100_000)
    assert len(set(names)) == 100_000
    assert names[:3] == ["a", "a-2", "a-3"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_json_of_absurd_depth_or_numbers_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match="do something else"):
        read_json(path, "do something else")


@pytest.mark.parametrize("text", ["a = " + "[" * 50_000, "seed = " + "9" * 5000])
def test_scenarios_of_absurd_depth_or_numbers_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"mine\.toml"):
        load_experiment(str(path), [])


def test_a_small_parquet_file_of_millions_of_rows_is_refused_before_they_are_read(tmp_path: Path) -> None:
    n = 11_000_000
    columns = {name: pa.repeat(1, n) for name in ("arrival_at_s", "n_input_tokens", "n_output_tokens")}
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table(columns), path)
    assert path.stat().st_size < 1_000_000
    with pytest.raises(KeyedError, match="holds 11,000,000 requests"):
        read_trace(path)


@pytest.mark.parametrize("value", ["text", None, 1e400])
def test_parquet_columns_of_other_kinds_are_refused_with_their_line(tmp_path: Path, value: object) -> None:
    path = tmp_path / "odd.parquet"
    columns = {"arrival_at_s": [value], "n_input_tokens": [1], "n_output_tokens": [1]}
    pq.write_table(pa.table(columns), path)
    with pytest.raises(KeyedError, match="line 1 cannot be read"):
        read_trace(path)


def test_a_csv_field_of_absurd_length_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f'Timestamp,Request tokens,Response tokens\n0,"{"x" * 200_000}",3\n', encoding="utf-8")
    with pytest.raises(KeyedError, match="cannot be read as CSV"):
        read_trace(path)

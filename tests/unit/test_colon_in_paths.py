"""Folders whose names have a colon, which pyarrow takes for URIs where they are relative paths."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from testbed.cli.main import app
from testbed.page.simulated import read_simulation
from testbed.page.waterfall import request_hops

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "o-mine:x"
FEW = ("--set", "workload.n_requests=3", "--set", "workload.n_output_tokens=4")


def run(*arguments: str) -> None:
    try:
        code = app([*arguments], standalone_mode=False)
    except SystemExit as exit:
        code = exit.code
    assert not code


def test_tables_are_written_to_and_read_from_a_folder_with_a_colon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("simulate", "clustered", *FEW, "--out", FOLDER)
    with open(f"{FOLDER}/requests.parquet", "rb") as file:
        assert pq.read_table(file).num_rows == 3
    run("compare", FOLDER, FOLDER, "--out", "differences:x")
    run("explain", FOLDER, "--request", "1")
    run("workload", "show", f"{FOLDER}/requests.parquet")
    assert read_simulation(Path(FOLDER))[1] is not None
    assert request_hops(Path(FOLDER), 1)
    run("sweep", "clustered", *FEW, "--keep", "requests", "--out", "sweep:x", "--jobs", "1")
    with open("sweep:x/requests.parquet", "rb") as file:
        assert pq.read_table(file).num_rows == 3


def test_parquet_files_are_opened_only_by_whole_paths() -> None:
    found = []
    for path in sorted((ROOT / "testbed").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            calls = isinstance(node, ast.Call) and re.fullmatch(r"pq\.\w+", ast.unparse(node.func))
            if calls and not any("parquet_path(" in ast.unparse(argument) for argument in node.args):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == [], "use testbed.rundir.parquet_path"

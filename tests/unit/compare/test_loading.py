"""What is no run, or one without tables, is refused with what to do about it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from testbed.errors import UserError
from testbed.rundir import claim
from testbed.studies.compare import compare_command
from tests.support.run_tables import MakeRun, request


def refusal(a: Path, b: Path) -> str:
    with pytest.raises(UserError) as caught:
        compare_command(a, b, None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_that_is_not_there_is_named(make_run: MakeRun, tmp_path: Path) -> None:
    assert f"there is no run {tmp_path / 'none'}" in refusal(make_run("a", [request(0)]), tmp_path / "none")


def test_comparing_a_file_instead_of_a_run_is_refused(make_run: MakeRun) -> None:
    a = make_run("a", [request(0)])
    assert "is not a folder" in refusal(a / "plan.json", a)


def test_a_folder_of_runs_is_answered_with_the_name_of_one(make_run: MakeRun, tmp_path: Path) -> None:
    a = make_run("a", [request(0)])
    assert f"holds a run; give {a}" in refusal(tmp_path, a)
    make_run("b", [request(0)])
    assert f"holds 2 runs; name one of them, such as {a}" in refusal(tmp_path, a)
    (tmp_path / "empty").mkdir()
    assert "is not a run directory (no plan.json in it)" in refusal(tmp_path / "empty", a)


@pytest.mark.parametrize("name", ("requests.parquet", "summary.json", "hops.parquet"))
def test_an_emulation_without_a_table_is_answered_with_report(make_run: MakeRun, name: str) -> None:
    a, b = make_run("a", [request(0)]), make_run("b", [request(0)])
    (b / name).unlink()
    assert refusal(a, b) == f"{b} has no {name}: write its tables with `testbed report {b}`"


def test_a_simulation_without_tables_is_to_be_simulated_again(make_run: MakeRun) -> None:
    a, b = make_run("a", [request(0)]), make_run("b", [request(0)], engine="simulation")
    (b / "requests.parquet").unlink()
    assert refusal(a, b) == f"{b} has no requests.parquet: simulate it again with --out"


def test_a_run_that_goes_on_is_to_be_awaited(make_run: MakeRun) -> None:
    a, b = make_run("a", [request(0)]), make_run("b", [request(0)])
    (b / "requests.parquet").unlink()
    claim(b)
    assert "is still running" in refusal(a, b)


def cut_short(path: Path) -> None:
    os.truncate(path / "requests.parquet", 50)


def no_object(path: Path) -> None:
    (path / "summary.json").write_text("[]")


def without_chain(path: Path) -> None:
    table = pq.read_table(path / "requests.parquet")
    pq.write_table(table.drop_columns(["chain"]), path / "requests.parquet")


def of_text(path: Path) -> None:
    table = pq.read_table(path / "hops.parquet")
    parts = pa.array(["much"] * table.num_rows)
    number = table.schema.get_field_index("hop_compute_s")
    pq.write_table(table.set_column(number, "hop_compute_s", parts), path / "hops.parquet")


@pytest.mark.parametrize("damage", (cut_short, no_object, without_chain, of_text))
def test_a_damaged_table_is_named_and_written_anew_by_report(
    make_run: MakeRun, damage: Callable[[Path], None]
) -> None:
    a, b = make_run("a", [request(0)]), make_run("b", [request(0)])
    damage(b)
    assert refusal(a, b).startswith(f"cannot read {b}/")
    assert f"`testbed report {b}` writes it again" in refusal(a, b)


def test_a_damaged_scenario_is_named(make_run: MakeRun) -> None:
    a, b = make_run("a", [request(0)]), make_run("b", [request(0)], scenario="seed = ")
    assert f"cannot read {b / 'scenario.toml'}" in refusal(a, b)


def test_real_blocks_have_no_overhead_beside_a_stubs(make_run: MakeRun) -> None:
    paths = [make_run(name, [request(0)]) for name in ("stub", "blocks")]
    for path in paths:
        summary = json.loads((path / "summary.json").read_text())
        summary |= {"compute": path.name, "overhead_per_hop_s": -0.00121}
        (path / "summary.json").write_text(json.dumps(summary))
    answer, text = compare_command(*paths, None)
    assert [answer[side]["overhead_per_hop_s"] for side in "ab"] == [-0.00121, None]
    assert text.count("own overhead") == 1

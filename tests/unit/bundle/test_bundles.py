"""Results with all that they were computed from: bundles, wherever they are, and whatever is wrong in them."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import testbed as tb
from policies.cgbp import CgBp
from policies.wsrr import WsRr
from testbed.cli.main import app
from testbed.errors import RunError, UserError
from testbed.experiments.filesread import FilesRead
from testbed.experiments.inputs import INPUTS, keep_inputs, read_inputs, sources_of
from testbed.studies.bundle import command
from testbed.studies.bundle.again import unpacked
from testbed.studies.bundle.command import bundle_command
from testbed.studies.bundle.differences import differences_of
from testbed.studies.bundle.manifest import BUNDLE, RESULT, digests_of, read_manifest
from testbed.studies.bundle.reproduce import reproduce_bundle
from testbed.studies.sweep.command import sweep_command
from testbed.studies.sweep.study import Options, call_of, called
from testbed.studies.sweep.table import RESULTS
from tests.support.full_disk import files_no_longer_than

SCENARIO = """
seed = 3
model = {{ profile = "bloom-176b", n_blocks = 6 }}
servers = [
    {{ hardware = "mig-1g", site = "Here", count = 2 }},
    {{ hardware = "a100", site = "There" }},
]
clients = [{{ site = "Here" }}]
[network]
kind = "matrix"
file = "{matrix}"
rate = "1 Gbit/s"
[workload]
arrivals = "trace"
file = "../logs/trace.csv"
"""
POLICY = """
from bundled_helper import PLACED

class Own:
    name = "own"

    def place(self, problem, design_concurrency=None):
        from policies.registry import resolve_placement
        return resolve_placement(PLACED).place(problem, design_concurrency)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a sweep in ``work/out``, of a scenario beside files that it names in three ways; not to be changed.

    One is in a folder that is called as one of a run's processes.
    """
    folder = tmp_path_factory.mktemp("project é")
    work, data = folder / "work", folder / "logs"
    for made in (work, data):
        made.mkdir()
    (data / "rtt.csv").write_text("site,Here,There\nHere,5 ms,60 ms\nThere,60 ms,5 ms\n")
    (data / "trace.csv").write_text("Timestamp,Request tokens,Response tokens\n0,5,3\n0.5,8,2\n2,6,2\n")
    (work / "mine.toml").write_text(SCENARIO.format(matrix=data / "rtt.csv"))
    (work / "bundled_policy.py").write_text(POLICY)
    (work / "blocks.json").write_text("[[1, 6], [1, 6], [1, 6]]")
    (work / "bundled_helper.py").write_text('PLACED = "cg-bp"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        options = Options(
            over=("workload.n_requests=2,3",), policies=("proposed", "bundled_policy:Own+ws-rr")
        )
        sweep_command("mine.toml", options, Path("out"), "local", 1)
    yield folder
    _forget()


def _forget() -> None:
    for name in ("bundled_policy", "bundled_helper"):
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if "project" not in path]


@pytest.fixture
def bundle(project: Path, tmp_path: Path) -> Path:
    """A bundle of the sweep, to be changed."""
    bundle_command(project / "work" / "out", tmp_path / "bundle")
    return tmp_path / "bundle"


def _sealed(bundle: Path) -> Path:
    """The bundle with a manifest of what it holds now."""
    manifest = json.loads((bundle / BUNDLE).read_text())
    (bundle / BUNDLE).write_text(json.dumps({**manifest, "files": digests_of(bundle)}))
    return bundle


def test_a_bundle_gives_the_same_bytes_where_nothing_of_the_original_is_left(
    project: Path, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = project.with_name("away")
    project.rename(away)
    _forget()
    moved = bundle.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    try:
        answer, text, code = reproduce_bundle(Path("moved"), 1)
    finally:
        away.rename(project)
    assert (code, answer["same"], answer["differences"], answer["versions"]) == (0, True, [], []), text
    assert text.startswith("the same bytes: results.parquet")
    assert sys.modules["bundled_helper"].__file__ not in {None, str(project / "work" / "bundled_helper.py")}
    assert Path.cwd() == tmp_path and digests_of(moved) == json.loads((moved / BUNDLE).read_text())["files"]


def test_what_differs_is_named_with_its_column_rows_and_size(bundle: Path) -> None:
    path = bundle / RESULT / RESULTS
    table = pq.read_table(path)
    values = table["ttft_s_mean"].to_pylist()
    place = table.column_names.index("ttft_s_mean")
    column = pa.array([values[0] + 0.25, *values[1:]])
    pq.write_table(table.set_column(place, "ttft_s_mean", column).drop(["status"]), path)
    provenance = bundle / RESULT / "provenance.json"
    provenance.write_text(json.dumps({**json.loads(provenance.read_text()), "code": "of before"}))
    answer, text, code = reproduce_bundle(_sealed(bundle), 1)
    assert (code, answer["same"]) == (1, False)
    assert answer["differences"] == [
        "results.parquet: has the new column status",
        "results.parquet: ttft_s_mean differs in 1 of 4 rows, by at most 0.25",
    ]
    assert "the same bytes: table.csv, table.tex" in text and "code: of before then, testbed" in text


@pytest.mark.parametrize("harm", ["changed", "removed", "added", "linked", "a pipe"])
def test_a_damaged_bundle_names_the_file(harm: str, bundle: Path) -> None:
    path = bundle / RESULT / INPUTS / "files" / "logs" / "trace.csv"
    if harm == "changed":
        path.write_text("other")
    elif harm == "removed":
        path.unlink()
    else:
        path = path.with_name("new.csv")
        if harm == "added":
            path.write_text("new")
        elif harm == "linked":
            path.symlink_to("/usr")
        else:
            os.mkfifo(path)
    with pytest.raises(UserError, match=rf"logs/{path.name} (was|is) [^;(]*; "):
        reproduce_bundle(bundle, 1)


def test_copies_of_inputs_can_be_written_and_the_commands_folder_is_there(
    bundle: Path, tmp_path: Path
) -> None:
    """Of a bundle that cannot be written, from git, which keeps no empty folders."""
    inputs, copies = read_inputs(bundle / RESULT), tmp_path / "copies"
    assert inputs is not None
    for path in bundle.rglob("*"):
        path.chmod(0o555)
    with unpacked(bundle / RESULT, msgspec.structs.replace(inputs, folder="empty"), copies):
        assert Path.cwd() == copies / "empty"
    assert (copies / "work" / "mine.toml").is_file()
    assert all(path.stat().st_mode & 0o200 for path in copies.rglob("*"))


def test_what_is_no_bundle_or_no_result_is_refused_and_leaves_nothing(project: Path, tmp_path: Path) -> None:
    results, out = project / "work" / "out", tmp_path / "out"
    with pytest.raises(UserError, match="there is no folder"):
        app(["reproduce", str(tmp_path / "none")], standalone_mode=False)
    with pytest.raises(UserError, match="is not a bundle"):
        app(["reproduce", str(results)], standalone_mode=False)
    with pytest.raises(UserError, match=r"not a run directory .*, or the folder of a sweep or a score"):
        bundle_command(project, out)
    with pytest.raises(UserError, match="holds something already"):
        bundle_command(results, results)
    with pytest.raises(UserError, match="is in"):
        bundle_command(results, results / "new")
    with (
        files_no_longer_than(100),
        pytest.raises(RunError, match=r"cannot write the bundle \S+: \[Errno 27\] File too large"),
    ):
        bundle_command(results, out)
    shutil.copytree(results, tmp_path / "older", ignore=lambda *_: {INPUTS})
    with pytest.raises(UserError, match="does not hold what it was computed from"):
        bundle_command(tmp_path / "older", out)
    assert [path.name for path in tmp_path.iterdir()] == ["older"]


def test_a_bundle_is_untouched_by_another_command_that_writes_the_same_one(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, out, digests = project / "work" / "out", tmp_path / "bundle", command.digests_of
    monkeypatch.setattr(os, "getpid", lambda: os.getppid())

    def meanwhile(folder: Path) -> dict[str, str]:
        monkeypatch.undo()
        bundle_command(results, out)
        return digests(folder)

    monkeypatch.setattr(command, "digests_of", meanwhile)
    with pytest.raises(RunError, match=f"cannot write the bundle {out}: Directory not empty"):
        bundle_command(results, out)
    assert read_manifest(out).kind == "sweep"
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize(
    "options",
    [
        ("simulate", "--policy", "bundled_policy:Own+ws-rr"),
        ("simulate", "--mode", "reference", "--placement", "fixed:blocks.json"),
        ("simulate", "--clock", "virtual"),
        ("up", "--network", "memory", "--no-report"),
    ],
    ids=" ".join,
)
def test_a_run_of_every_engine_gives_the_same_bytes(
    options: tuple[str, ...], project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "work")
    command, *rest = options
    assert app([command, "mine.toml", *rest, "--out", str(tmp_path / "run")], standalone_mode=False) == 0
    bundle_command(tmp_path / "run", tmp_path / "bundle")
    shutil.rmtree(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    answer, text, code = reproduce_bundle(tmp_path / "bundle", 1)
    assert (code, answer["kind"], answer["differences"]) == (0, "run", []), text
    assert {"requests.parquet", "hops.parquet"} <= set(answer["files"])


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        (
            "summary.json",
            {"n_interrupted": 1},
            "the run was interrupted, and nothing repeats the moment of that",
        ),
        (
            "plan.json",
            {"clock": {"name": "real", "why": "asked for"}},
            r"in virtual time, and it has none \(--no-twin, or no request came\)",
        ),
    ],
    ids=["interrupted", "real time without a twin"],
)
def test_a_run_that_cannot_be_computed_again_is_bundled_and_that_is_said(
    file: str, change: dict[str, Any], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("--set", "workload.n_requests=2", "--set", "workload.n_output_tokens=2")
    up = ["up", "clustered", "--network", "memory", "--no-report", *short, "--out", "run"]
    assert app(up, standalone_mode=False) == 0
    path = tmp_path / "run" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    _, text = bundle_command(Path("run"), Path("bundle"))
    assert re.search(f"; it is not computed again: .*{why}$", text), text
    with pytest.raises(UserError, match=f"{why}$"):
        reproduce_bundle(Path("bundle"), 1)


def test_a_run_whose_twin_was_interrupted_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ("--set", "workload.n_requests=2", "--set", "workload.n_output_tokens=2", "--no-report")
    for name in ("run", "run/twin"):
        assert (
            app(["up", "clustered", "--network", "memory", *short, "--out", name], standalone_mode=False) == 0
        )
    for file, change in (
        ("twin/summary.json", {"n_interrupted": 1}),
        ("plan.json", {"clock": {"name": "real", "why": ""}}),
    ):
        path = tmp_path / "run" / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    _, text = bundle_command(Path("run"), Path("bundle"))
    assert text.endswith(
        "it is not computed again: the run was interrupted, and nothing repeats the moment of that"
    )


def test_a_call_is_read_back_as_it_was_given(project: Path) -> None:
    options = Options(over=("a=1",), axes=(), policies=("x",), n_runs=3, slo="ttft=1s")
    assert called(json.loads(json.dumps(call_of("clustered", options)))) == ("clustered", options)
    inputs = read_inputs(project / "work" / "out")
    assert inputs is not None and inputs.folder == "work" and inputs.path == ["work"]
    assert inputs.renamed == {str(project / "logs" / "rtt.csv"): "logs/rtt.csv"}


def test_sources_are_what_a_module_imports_from_its_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "bundled_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("import json, numpy\nfrom . import two\n")
    (package / "two.py").write_text("def later():\n    import bundled_beside\n")
    (tmp_path / "bundled_beside.py").write_text("")
    (tmp_path / "bundled_other.py").write_text("")
    root, files = sources_of("bundled_package.one")
    assert root == tmp_path
    names = {str(path.relative_to(tmp_path)) for path in files}
    assert names == {
        "bundled_beside.py",
        *(f"bundled_package/{name}.py" for name in ("__init__", "one", "two")),
    }
    assert sources_of("json.decoder")[0] is None and sources_of("no_such_module_here") == (None, set())


def test_values_within_the_tolerance_and_measured_ones_are_the_same(tmp_path: Path) -> None:
    def write(name: str, **columns: Any) -> Path:
        (tmp_path / name).mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), tmp_path / name / "t.parquet")
        (tmp_path / name / "o.json").write_text(json.dumps(columns))
        return tmp_path / name

    one = write("one", at_s=[1.0, 2.0], cpu_s=[1.0, 1.0], gaps=[[1.0], [2.0, 3.0]])
    other = write("other", at_s=[1.0, 2.0 + 1e-7], cpu_s=[3.0, 1.0], gaps=[[1.0], [2.0, 3.0]])
    assert differences_of("t.parquet", one, other, 1e-6, ("cpu_s",)) == []
    assert differences_of("t.parquet", one, other, 0.0, ("cpu_s",)) == [
        "t.parquet: at_s differs in 1 of 2 rows, by at most 1e-07"
    ]
    assert len(differences_of("o.json", one, other)) == 2
    write("other", at_s=[1.0])
    assert differences_of("t.parquet", one, other)[-1] == "t.parquet: has 1 row, and not 2"


def test_files_that_have_other_names_in_the_bundle_are_no_difference(tmp_path: Path) -> None:
    for name, file in (("one", "/home/me/a.toml"), ("other", "a.toml")):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"scenario": [file]}), tmp_path / name / "t.parquet")
        (tmp_path / name / "t.csv").write_text(f"scenario\n{file}\n")
        (tmp_path / name / "t.json").write_text(json.dumps({"scenario": file}))
    for ending in ("parquet", "csv", "json"):
        given = f"t.{ending}", tmp_path / "one", tmp_path / "other", 0.0, ()
        assert differences_of(*given)
        assert not differences_of(*given, lambda text: text.replace("/home/me/", ""))


def test_a_run_with_a_programs_objects_is_not_bundled(tmp_path: Path) -> None:
    few = tb.scenario("clustered", {"workload.n_requests": 1, "workload.n_output_tokens": 1})
    tb.simulate(few, policy=(CgBp(), WsRr()), out=tmp_path / "run")
    with pytest.raises(UserError, match="policies that are its objects, which nothing can make again"):
        bundle_command(tmp_path / "run", tmp_path / "bundle")


def test_a_sweep_that_went_on_with_a_programs_objects_is_not_bundled(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(project / "work" / "out", tmp_path / "out")
    monkeypatch.chdir(project / "work")
    tb.sweep(
        "mine.toml", {"workload.n_requests": [2]}, policies=[(CgBp(), WsRr())], out=tmp_path / "out", jobs=1
    )
    with pytest.raises(UserError, match="a program made it with objects"):
        bundle_command(tmp_path / "out", tmp_path / "bundle")


def test_a_score_that_has_not_ended_is_not_bundled(tmp_path: Path) -> None:
    (tmp_path / "score.jsonl").touch()
    with pytest.raises(UserError, match=r"has no score.json yet; bundle it when the score has ended"):
        bundle_command(tmp_path, tmp_path / "bundle")


def test_a_command_of_another_version_is_one_sentence(bundle: Path) -> None:
    path = bundle / RESULT / INPUTS / "inputs.json"
    inputs = json.loads(path.read_text())
    path.write_text(json.dumps({**inputs, "call": {"command": "sweep"}}))
    with pytest.raises(UserError, match="none of this version"):
        reproduce_bundle(_sealed(bundle), 1)
    path.write_text("{}")
    with pytest.raises(UserError, match="holds no inputs that this version reads"):
        reproduce_bundle(_sealed(bundle), 1)


def test_a_full_disk_leaves_the_earlier_inputs_and_no_part_of_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scenario, out = Path("mine.toml"), Path("out")
    out.mkdir()
    read = FilesRead(files={scenario})
    scenario.write_text("before")
    keep_inputs(out, {}, read)
    scenario.write_text(2_000 * "after ")
    with files_no_longer_than(5_000), pytest.raises(OSError, match="File too large"):
        keep_inputs(out, {}, read)
    assert list(out.iterdir()) == [out / INPUTS]
    assert (out / INPUTS / "files" / scenario).read_text() == "before"


def test_a_link_that_somebody_puts_among_the_inputs_is_not_followed(project: Path, tmp_path: Path) -> None:
    results = project / "work" / "out"
    (tmp_path / "away").mkdir()
    (results / INPUTS / "elsewhere").symlink_to(tmp_path / "away")
    bundle_command(results, tmp_path / "bundle")
    assert not (tmp_path / "bundle" / RESULT / INPUTS / "elsewhere").exists()

"""Run directories that others may have written: links in them are not followed, and pipes not read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.probe import probe_rootless
from testbed import rundir
from testbed.errors import RunError, UserError
from testbed.experiments import load_experiment
from testbed.page import view
from testbed.page.report import write_report
from testbed.records.events import EVENTS, goes_on
from testbed.records.plan import is_simulated
from testbed.results import finish_run, load_run
from testbed.rundir import (
    OWNER,
    PAGE,
    check_new_folder,
    owner_alive,
    process_start,
    remove_scratch_of,
    replacing,
    scratch,
    scratch_folders,
    write_json,
    write_text,
)
from testbed.runs import clean, session
from testbed.runs.clean import clean_command
from tests.support.runs import require
from tests.unit.results.conftest import SyntheticRun, make_experiment


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    made = SyntheticRun(tmp_path / "run", make_experiment())
    made.serve(0, 0.0, [(0, 0, 4)])
    return made


@pytest.fixture
def only_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has ``clean`` look at folders of runs alone, not at the processes and temporary folders of other tests."""
    monkeypatch.setattr(clean, "_orphans", dict)
    monkeypatch.setattr(clean, "scratch_folders", list)


def test_tables_and_report_of_a_run_are_written_through_no_link(run: SyntheticRun, tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    names = ("summary.json", "requests.parquet", "hops.parquet", "trace.json", "report.html")
    for name in names:
        (run.path / name).symlink_to(outside)
        (run.path / f"{name}.part").symlink_to(outside)
    finish_run(run.path, run.experiment)
    write_report(run.path, run.experiment)
    assert outside.read_text() == "mine"
    assert not any((run.path / name).is_symlink() for name in names)


def test_figures_go_into_no_folder_that_is_a_link(run: SyntheticRun, tmp_path: Path) -> None:
    finish_run(run.path, run.experiment)
    outside = tmp_path / "outside"
    outside.mkdir()
    (run.path / "figures").symlink_to(outside)
    with pytest.raises(RunError, match="it is a link"):
        write_report(run.path, run.experiment)
    assert list(outside.iterdir()) == []


def test_a_run_that_has_lost_its_logs_is_not_called_a_simulation(run: SyntheticRun) -> None:
    (run.path / "scenario.toml").write_text("")
    shutil.rmtree(run.path / "events")
    assert not is_simulated(run.path)
    with pytest.raises(
        UserError, match="is not whole: its tables and page are made from events, which is missing"
    ):
        load_run(run.path)


@pytest.mark.parametrize(
    "text", ["[]", "null", "{}", '{"pid": "x", "started": 1}', '{"pid": [], "started": ""}', "{", ""]
)
def test_an_owner_that_is_none_is_not_alive(text: str, tmp_path: Path) -> None:
    (tmp_path / OWNER).write_text(text)
    assert owner_alive(tmp_path) is False


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    check_new_folder(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(
        UserError, match="file is a file, but a folder belongs there; choose another as --out"
    ):
        check_new_folder(tmp_path / "file" / "b")
    # Not even root can make a file here, which its permissions do not say.
    with pytest.raises(UserError, match=r"b: nothing can be written to /proc .* choose another as --out"):
        check_new_folder(Path("/proc/a/b"))


def test_a_kill_while_a_folder_is_tried_leaves_nothing_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "rmdir", lambda *_, **__: None)  # what is to be removed after a kill, is not
    monkeypatch.setattr(os, "unlink", lambda *_, **__: None)
    check_new_folder(tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / OWNER)
    assert owner_alive(tmp_path) is False


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["answer.json"]


def test_processes_that_write_one_file_at_once_write_each_its_own_and_what_ended_ones_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = tmp_path / "a.txt", tmp_path / f"a.txt.{2**30}.part"
    left.touch()
    monkeypatch.setattr(os, "getpid", lambda: os.getppid())
    with replacing(path) as temporary:
        temporary.write_text("half of the other")
        monkeypatch.undo()
        write_text(path, "mine")
        assert path.read_text() == "mine" and not left.exists()
        temporary.write_text("the other")
    assert path.read_text() == "the other" and list(tmp_path.iterdir()) == [path]


def test_clean_leaves_the_files_that_a_report_writes_now(
    run: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean, "_orphans", dict)
    (run.path / OWNER).write_text('{"pid": 1, "started": "never"}')
    now, left = (run.path / f"requests.parquet.{pid}.part" for pid in (os.getppid(), 2**30))
    now.touch()
    left.touch()
    assert clean_command(tmp_path)["files"] == [str(left)]
    assert now.exists()


@pytest.mark.parametrize("name", ["events/client-0.log", EVENTS])
def test_a_log_that_cannot_be_read_is_named(name: str, run: SyntheticRun) -> None:
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).mkdir()
    with pytest.raises(UserError, match=rf"^cannot read \S+/{name} \(Is a directory\); copy the whole run"):
        session.finish(run.path, run.experiment)


def test_temporary_folders_of_others_are_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, linked = tmp_path / "testbed-links-theirs", tmp_path / "testbed-links-linked"
    theirs.mkdir()
    linked.symlink_to(tmp_path)
    user = theirs.stat().st_uid
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(clean.os, "geteuid", lambda: user + 1)
    monkeypatch.setattr(clean, "_orphans", dict)
    assert clean_command(tmp_path / "none")["folders"] == []
    monkeypatch.setattr(clean.os, "geteuid", lambda: user)
    of_study, begun = tmp_path / "testbed-study-x", tmp_path / f"testbed-study-{os.getpid()}-x"
    of_study.mkdir()
    begun.mkdir()  # by this process, which has not noted yet that it owns it
    assert clean_command(tmp_path / "none")["folders"] == [str(theirs), str(of_study)]
    assert linked.is_symlink() and begun.is_dir()


def test_temporary_folders_of_a_container_are_left_to_it_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("rootless", probe_rootless())
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(clean, "_orphans", dict)
    inside = "from pathlib import Path; from testbed.rundir import claim; claim(Path('.')); print(flush=True); input()"
    folder = tmp_path / "testbed-agent-x"
    folder.mkdir()
    container = subprocess.Popen(
        ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", inside],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with container:
        assert container.stdin is not None and container.stdout is not None
        assert container.stdout.readline()
        here = str(Path("/proc/self/ns/pid").readlink())
        monkeypatch.setattr(rundir, "_FIRST_NAMESPACE", here)
        assert json.loads((folder / OWNER).read_text())["pid_namespace"] != here
        assert not owner_alive(folder)  # no process of this namespace
        assert clean_command(tmp_path / "none")["folders"] == []
        container.stdin.close()
    monkeypatch.setattr(rundir, "_FIRST_NAMESPACE", "another, whose processes cannot be seen")
    assert clean_command(tmp_path / "none")["folders"] == []
    monkeypatch.setattr(rundir, "_FIRST_NAMESPACE", here)
    assert clean_command(tmp_path / "none")["folders"] == [str(folder)]


@pytest.mark.usefixtures("only_runs")
@pytest.mark.parametrize(("changed", "is_elsewhere"), [({"host": "paris"}, True), ({}, False)])
def test_clean_leaves_a_run_of_another_machine_to_it_but_not_one_of_this_machine_before_it_started_again(
    run: SyntheticRun, changed: dict[str, str], is_elsewhere: bool
) -> None:
    """Machines share folders, and see no processes of each other."""
    rundir.claim(run.path)
    owner = json.loads((run.path / OWNER).read_text())
    owner |= {"started": "1", "boot": "another", **changed}
    (run.path / OWNER).write_text(json.dumps(owner), encoding="utf-8")
    page = run.path / PAGE
    page.touch()
    answer = clean_command(run.path)
    assert answer["files"] == ([] if is_elsewhere else [str(page)])
    said = f"{run.path} was started on paris, where it may still run"
    assert any(problem.startswith(said) for problem in answer["problems"]) == is_elsewhere


@pytest.mark.usefixtures("only_runs")
def test_clean_says_nothing_of_whole_runs_of_other_machines(run: SyntheticRun) -> None:
    finish_run(run.path, run.experiment)
    owner = {"pid": 1, "started": "1", "pid_namespace": "", "host": "paris", "boot": "another"}
    (run.path / OWNER).write_text(json.dumps(owner), encoding="utf-8")
    assert not any(clean_command(run.path).values())


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ignores SIGTERM, and that ``testbed clean`` takes for one that a run left."""
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        run = Path("/gone")
        monkeypatch.setattr(clean, "_orphans", lambda: {process.pid: run})
        monkeypatch.setattr(clean, "_run_left_by", lambda pid: run if process.poll() is None else None)
        monkeypatch.setattr(clean, "_TERM_WAIT_S", 0.1)
        yield process
        process.kill()


def test_a_process_that_does_not_end_when_asked_is_killed(
    deaf: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    answer = clean_command(tmp_path / "none")
    assert (answer["processes"], answer["problems"]) == ([{"pid": deaf.pid, "run": "/gone"}], [])
    assert deaf.poll() == -signal.SIGKILL


def test_a_killed_process_that_has_not_ended_is_named_as_a_problem(
    deaf: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean, "_run_left_by", lambda pid: Path("/gone"))
    monkeypatch.setattr(clean, "_KILL_WAIT_S", 0.1)
    (problem,) = clean_command(tmp_path / "none")["problems"]
    assert problem.startswith(f"process {deaf.pid} of /gone was killed and has not ended yet")


TINY = ["network.backend=memory", "workload.n_requests=1", "workload.n_output_tokens=2"]


@pytest.mark.usefixtures("only_runs")
def test_clean_removes_inputs_that_a_kill_left_half_copied(run: SyntheticRun) -> None:
    finish_run(run.path, run.experiment)
    (run.path / OWNER).write_text('{"pid": 1, "started": "never"}', encoding="utf-8")
    half = run.path / "inputs.part"
    (half / "files").mkdir(parents=True)
    (half / "inputs.json.part").touch()
    assert str(half) in clean_command(run.path.parent)["files"]
    assert not half.exists()


@pytest.mark.usefixtures("only_runs")
@pytest.mark.parametrize("folder", ["run-1", "runs/seed-3"])
def test_clean_removes_what_a_kill_left_of_noting_whose_a_folder_is(tmp_path: Path, folder: str) -> None:
    run = tmp_path / folder
    run.mkdir(parents=True)
    now, left = (run / f"{OWNER}.{pid}.part" for pid in (os.getppid(), 2**30))
    now.touch()
    left.touch()
    assert clean_command(tmp_path)["files"] == [str(left)]
    assert now.exists()


def test_a_folder_that_another_clean_removes_meanwhile_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clean, "_orphans", dict)
    monkeypatch.setattr(clean, "scratch_folders", lambda: [tmp_path / "gone"])
    assert not any(clean_command(tmp_path).values())


@pytest.mark.parametrize("content", [b"", b"{}", b"[[", b"\xbf\x00"])
def test_a_plan_that_no_run_wrote_is_refused_and_keeps_no_other_run_from_being_completed(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = load_experiment("clustered", TINY)
    for name in ("broken", "whole"):
        session.run_quietly(experiment, tmp_path / name)
        (tmp_path / name / "summary.json").unlink()
        (tmp_path / name / OWNER).write_text('{"pid": 1, "started": "never"}', encoding="utf-8")
    (tmp_path / "broken" / "plan.json").write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read .*plan\.json"):
        finish_run(tmp_path / "broken", experiment)
    monkeypatch.setattr(clean, "_orphans", dict)  # those of other tests
    answer = clean_command(tmp_path)
    assert answer["completed"] == [str(tmp_path / "whole")]
    (problem,) = answer["problems"]
    assert "plan.json" in problem


def test_a_run_that_finds_no_cluster_leaves_its_folder_to_the_corrected_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(UserError, match=r"RAY_ADDRESS must be HOST:PORT|the package ray"):
        session.run_quietly(load_experiment("clustered", ["hosts=ray"]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_interrupt_while_tables_are_made_names_what_completes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "finish", interrupted)
    experiment = load_experiment("clustered", TINY)
    with pytest.raises(KeyboardInterrupt, match=rf"`testbed report {tmp_path}/run` completes"):
        session.RunSession(experiment, tmp_path / "run").run()


def test_a_run_that_goes_on_is_not_reported_but_one_that_ended_in_a_living_process_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    session.run_quietly(load_experiment("clustered", TINY), run)
    assert owner_alive(run) and not goes_on(run)  # as in a notebook
    assert session.report_command(run).n_interrupted == 0
    lines = (run / EVENTS).read_text(encoding="utf-8").splitlines(keepends=True)
    (run / EVENTS).write_text("".join(line for line in lines if '"stopped"' not in line), encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with pytest.raises(UserError, match=rf"{run} is still running: watch it with `testbed view {run}`"):
        session.report_command(run)
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def test_a_killed_process_s_temporary_folders_are_removed_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sleeper = subprocess.Popen(["sleep", "60"])
    folders = [tmp_path / f"testbed-virtual-{name}" for name in ("killed", "here", "unknown")]
    for folder, pid in zip(folders, (sleeper.pid, os.getpid(), None), strict=True):
        (folder / "run").mkdir(parents=True)
        if pid is not None:
            owner = {"pid": pid, "started": process_start(pid)}
            (folder / OWNER).write_text(json.dumps(owner), encoding="utf-8")
    remove_scratch_of(sleeper.pid)
    assert all(folder.exists() for folder in folders), "it is still running"
    sleeper.kill()
    sleeper.wait()
    remove_scratch_of(sleeper.pid)
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_clean_finds_the_folder_with_a_pages_secret_of_a_killed_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened: list[str] = []
    monkeypatch.setattr(view, "_open", opened.append)
    with view._shown("http://127.0.0.1/#token=x"):
        assert opened == [(folder / "page.html").as_uri() for folder in scratch_folders()]
    assert not scratch_folders()


def test_a_temporary_folder_that_cannot_be_removed_costs_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with scratch("study"):
        monkeypatch.setattr(os, "rmdir", fails)
    assert scratch_folders(), "`testbed clean` removes it"

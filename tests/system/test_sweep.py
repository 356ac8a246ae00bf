"""A sweep that is killed or interrupted midway loses nothing that it measured, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from testbed.studies.sweep.command import PAGE, RUNS
from testbed.studies.sweep.store import Lines
from testbed.studies.sweep.table import RESULTS
from tests.support.runs import below, wait_until

STUDY = [
    *("clustered", "--over", "workload.rate=0.2:1:0.2", "--over", "policy=petals,proposed", "--runs", "8"),
    *("--set", "workload.n_requests=60"),
]
N_RUNS = 80


def command(out: Path, jobs: int = 2) -> list[str]:
    return [sys.executable, "-m", "testbed", "sweep", *STUDY, "--jobs", str(jobs), "--out", str(out)]


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nobody ended, of one worker."""
    out = tmp_path_factory.mktemp("whole") / "out"
    subprocess.run(command(out, 1), check=True, capture_output=True, timeout=110)
    return out


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_ends_midway_goes_on_to_the_same_bytes(
    tmp_path: Path, whole: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen(command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: n_lines(out / RUNS) > 5 or process.poll() is not None, "some results", 60)
        children = below(process.pid)
        assert len(children) >= 2
        os.kill(process.pid, number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    wait_until(lambda: not any(map(is_there, children)), "the end of the workers", 20)
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "runs are left: the same command goes on" in said
    n_kept = len(list(Lines(out / RUNS).read()))
    assert 5 < n_kept < N_RUNS, "it was stopped midway"
    assert not (out / RESULTS).exists()
    again = subprocess.run(command(out), check=True, capture_output=True, text=True, timeout=110)
    assert f"{N_RUNS} runs: {N_RUNS - n_kept} computed" in again.stdout and f"{n_kept} found" in again.stdout
    for name in (RESULTS, PAGE):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name
    assert pq.read_table(out / RESULTS).num_rows == N_RUNS


def test_a_mistake_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    for arguments, said in (
        (["clustered", "--over", "workload.rate=2:1:1"], "is empty"),
        (["clustered", "--over", "workload.rat=1"], "unknown key"),
        (["nothing"], "no such file or shipped scenario"),
    ):
        run = subprocess.run(
            [sys.executable, "-m", "testbed", "sweep", *arguments, "--out", str(tmp_path / "out")],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 2 and run.stdout == ""
        assert run.stderr.startswith("testbed: ") and run.stderr.count("\n") == 1 and said in run.stderr
    assert not (tmp_path / "out").exists()

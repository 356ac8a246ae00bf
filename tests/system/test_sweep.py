"""A sweep that is killed or interrupted midway loses nothing that it measured, and leaves no process behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from testbed.studies.sweep.command import PAGE, RUNS
from testbed.studies.sweep.store import Lines
from testbed.studies.sweep.table import RESULTS
from tests.support.runs import Running, assert_one_sentence, below, wait_until

STUDY = [
    *("clustered", "--over", "workload.rate=0.2:1:0.2", "--over", "policy=petals,proposed", "--runs", "6"),
    *("--set", "workload.n_requests=12", "--set", "workload.n_output_tokens=32"),
]
N_RUNS = 60


def sweep(out: Path, jobs: int = 2) -> Running:
    """The study, in progress."""
    said = out.with_name(f"{out.name}-said")
    return Running(["sweep", *STUDY, "--jobs", str(jobs), "--out", str(out)], said)


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nobody ended, of one worker."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert sweep(out, 1).wait().code == 0
    return out


def end_midway(out: Path, number: signal.Signals) -> int:
    """Begin or go on, and end by a signal after some more runs; how many are kept."""
    found = list(Lines(out / RUNS).read()) if out.exists() else []
    command = sweep(out)
    try:
        wait_until(lambda: n_lines(out / RUNS) > len(found) + 5 or command.ended(), "some results")
        children = below(command.process.pid)
        assert len(children) >= 2
        os.kill(command.process.pid, number)
        ended = command.wait()
    finally:
        command.kill()
    wait_until(lambda: not any(map(is_there, children)), "the end of the workers")
    if number != signal.SIGKILL:
        assert ended.code == 130 and "runs are left: the same command goes on" in ended.stderr
    kept = list(Lines(out / RUNS).read())
    n_kept = len(kept)
    assert kept[: len(found)] == found and len(found) + 5 < n_kept < N_RUNS, "it was stopped midway"
    assert (out / RESULTS).exists() == (number != signal.SIGKILL)
    if number != signal.SIGKILL:
        assert pq.read_table(out / RESULTS).num_rows == n_kept
        assert f"{N_RUNS - n_kept} of {N_RUNS} runs are left" in (out / PAGE).read_text(encoding="utf-8")
    return n_kept


def test_a_sweep_that_ends_midway_goes_on_to_the_same_bytes(tmp_path: Path, whole: Path) -> None:
    """It is ended three times: what a kill leaves is gone on with first by a sweep that is interrupted."""
    out = tmp_path / "out"
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        n_kept = end_midway(out, number)
    again = sweep(out, 1).wait()
    assert again.code == 0, again.stderr
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
        assert_one_sentence(Running(["sweep", *arguments, "--out", "out"], tmp_path / "said").wait(), said)
    assert not (tmp_path / "said" / "out").exists()

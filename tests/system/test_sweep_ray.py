"""Sweeps and scores on a Ray cluster of two machines: the same bytes as on one, with a machine lost midway, too."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.studies.sweep.command import RUNS
from testbed.studies.sweep.table import RESULTS
from tests.support.forked import COMMAND
from tests.support.ray_cluster import Lasting, Machine, need_ray
from tests.support.runs import Running, assert_one_sentence, below, wait_until
from tests.support.small_suite import POLICIES, write_suite

need_ray()
pytestmark = pytest.mark.timeout(600)

STUDY = (
    *("clustered", "--over", "workload.rate=0.1:1:0.1", "--over", "policy=waits:Petals,waits:Proposed"),
    *("--runs", "5", "--set", "workload.n_requests=4", "--set", "workload.n_output_tokens=2"),
)
N_RUNS = 100
WAITS = f"""
import time
from pathlib import Path

from policies.cgbp import CgBp
from policies.petals import PetalsPlacement
from policies.petals_routing import PetalsRouting
from policies.wsrr import WsRr


class Waits:
    def bind(self, problem, placement):
        runs, most = Path("out/{RUNS}"), Path("most")
        while runs.exists() and runs.read_bytes().count(b"\\n") > most.stat().st_size:
            time.sleep(0.05)
        return super().bind(problem, placement)


class Petals(Waits, PetalsPlacement, PetalsRouting):
    name = "petals-that-waits"


class Proposed(Waits, CgBp, WsRr):
    name = "proposed-that-waits"
"""
"""Policies whose runs wait while a sweep has more results than the file ``most`` has bytes."""
_LOST = """
from testbed.studies.sweep.on_ray import OnRay
from tests.support.mortal import mortal
groups = [[0, 1, 2, 3, 4, 5], list(range(6, 60))]
found = dict(OnRay(2).results(mortal, None, groups, lambda task: -task))
assert found == {task: -3 if task == 3 else task for task in range(60)}, found
"""
STALLS = '''


class Stalls(Loops):
    """Stops to decide where there is much load."""

    def place(self, problem, design_concurrency=None):
        return (Loops if problem.request_rate > 1 else Good).place(self, problem, design_concurrency)
'''
_OTHER = """
from testbed.errors import UserError
from testbed.studies.sweep import on_ray
from tests.support.mortal import mortal
import testbed.cluster
testbed.cluster.code_version = lambda: "testbed 0.0"
try:
    list(on_ray.OnRay().results(mortal, None, [[1, 2]]))
except UserError as error:
    print(error)
"""
_IDLE = """
import ray, time
ray.init(logging_level="ERROR", log_to_driver=False)
while ray.available_resources().get("CPU", 0) < ray.cluster_resources()["CPU"]:
    time.sleep(0.1)
"""


def sweep(executor: str) -> list[str]:
    return ["sweep", *STUDY, "--executor", executor, "--out", "out"]


def wait_beyond(n: int) -> None:
    """Have runs wait as soon as there are more results than ``n``."""
    Path("most").write_bytes(bytes(n))


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def other_lines(said: str) -> list[str]:
    """What a sweep printed beside its progress and, on a slow machine, that no worker has begun yet."""
    return [
        line
        for line in said.splitlines()
        if not line.endswith("s left") and not line.startswith("no worker of the Ray cluster has begun in")
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands of a test run, with policies that wait when told to."""
    (tmp_path / "waits.py").write_text(WAITS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    wait_beyond(N_RUNS)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What this machine computes alone."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "waits.py").write_text(WAITS, encoding="utf-8")
    (folder / "most").write_bytes(bytes(N_RUNS))
    assert Running(sweep("local"), folder).wait().code == 0
    return (folder / "out" / RESULTS).read_bytes()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Lasting]:
    with contextlib.closing(Lasting()) as found:
        yield found


def begin(machine: Machine) -> subprocess.Popen[str]:
    return machine.begin(COMMAND, *sweep("ray"))


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], what: str) -> None:
    """Until it holds, while the command runs."""
    wait_until(lambda: condition() or process.poll() is not None, what, 180)
    assert process.poll() is None, process.communicate()


def test_a_score_has_the_same_figures_and_limits_on_a_cluster(
    lasting: Lasting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    write_suite(suite)
    monkeypatch.chdir(tmp_path)
    Path("scored.py").write_text(POLICIES + STALLS, encoding="utf-8")

    def figures(code: int, said: str) -> tuple[bool, str, list[dict[str, Any]]]:
        assert code == 1
        answer = json.loads(said)
        rows = [{k: v for k, v in row.items() if "cpu" not in k} for row in answer["settings"]]
        return answer["valid"], answer["why"].partition(" and was")[0], rows

    def score(executor: str) -> list[str]:
        given = ["--suite", str(suite), "--executor", executor, "--out", executor, "--json"]
        return ["score", "scored:Stalls", *given]

    there = lasting.two()[0].begin(COMMAND, *score("ray"))
    said, _ = there.communicate(timeout=240)
    here = Running(score("local"), tmp_path).wait()
    is_valid, why, (few, many) = found = figures(there.returncode, said)
    assert found == figures(here.code, here.stdout)
    assert not is_valid and "may take 0.5 s of CPU time" in why
    assert (few["score"], few["why"], many["score"]) == (1.0, "", 0.0)


def test_a_task_that_ends_its_worker_twice_is_lost_and_other_versions_are_refused(lasting: Lasting) -> None:
    for program, said in ((_LOST, ""), (_OTHER, "has testbed 0.1.0")):
        run = lasting.two()[0].begin("-", said=program)
        stdout, stderr = run.communicate(timeout=240)
        assert run.returncode == 0, stderr
        assert said in stdout and stderr == ""


def test_the_same_bytes_after_a_stop_and_with_a_machine_lost_midway(
    whole: bytes, lasting: Lasting, folder: Path
) -> None:
    head, node = lasting.two()
    runs = folder / "out" / RUNS
    wait_beyond(10)
    process = begin(head)
    try:
        wait_for(lambda: n_lines(runs) > 10, process, "some results")
        (driver,) = below(process.pid)
        os.kill(driver, signal.SIGINT)
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and "the same command goes on" in said
    n_kept = n_lines(runs)
    assert 10 < n_kept < N_RUNS - 50, "it was stopped midway"
    idle = head.begin("-", said=_IDLE)
    idle.communicate(timeout=180)
    assert idle.returncode == 0  # nothing of ours is in the cluster

    wait_beyond(n_kept + 10)
    process = begin(head)
    try:
        wait_for(lambda: n_lines(runs) > n_kept + 10 and node.workers(), process, "more results")
        node.kill()
        wait_beyond(N_RUNS)
        answer, said = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert f"{N_RUNS} runs: {N_RUNS - n_kept} computed" in answer
    assert not other_lines(said), "Ray's own messages stay away"
    assert (folder / "out" / RESULTS).read_bytes() == whole


def test_a_machine_that_joins_works_and_a_killed_command_or_a_lost_head_costs_only_runs_under_way(
    whole: bytes, lasting: Lasting, folder: Path
) -> None:
    runs = folder / "out" / RUNS
    lone = lasting.alone()
    head = lone.head
    wait_beyond(0)
    process = begin(head)
    try:
        wait_for(lambda: n_lines(runs) > 0, process, "a result")
        node = lone.begin_other()
        wait_for(node.workers, process, "a worker on the new machine")
        (driver,) = below(process.pid)
        os.kill(driver, signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
    wait_until(lambda: not head.workers() and not node.workers(), "no worker of ours", 90)
    n_kept = n_lines(runs)
    assert n_kept < N_RUNS - 50, "it was killed midway"

    wait_beyond(n_kept + 10)
    process = begin(node)
    try:
        wait_for(lambda: n_lines(runs) > n_kept + 10, process, "more results")
        head.kill()
        said = process.communicate(timeout=90)[1]
    finally:
        process.kill()
    assert process.returncode == 1, said
    (sentence,) = other_lines(said)
    assert sentence.startswith(
        "testbed: the head of the Ray cluster at 10.77.0.1:6379 has not answered for 10 s"
    )
    n_kept = n_lines(runs)
    wait_beyond(N_RUNS)
    done = Running(sweep("local"), folder).wait()
    assert f"{N_RUNS} runs: {N_RUNS - n_kept} computed" in done.stdout
    assert (folder / "out" / RESULTS).read_bytes() == whole
    wait_until(lambda: not node.workers(), "no worker of ours on the machine that is left", 90)


def test_no_cluster_is_one_sentence(tmp_path: Path) -> None:
    for address, expected in (("127.0.0.1:1", "ray start --head"), ("ray://nowhere:1", "HOST:PORT")):
        asked = Running(
            ["sweep", "clustered", "--executor", "ray", "--out", "out"],
            tmp_path,
            env={"RAY_ADDRESS": address},
        )
        assert_one_sentence(asked.wait(), expected)

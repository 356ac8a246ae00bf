"""Sweeps and scores on a Ray cluster of two machines: the same bytes as on one, with a machine lost midway, too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testbed.studies.sweep.command import RUNS
from testbed.studies.sweep.table import RESULTS
from tests.support.ray_cluster import Machine, cluster, head_alone, need_ray
from tests.support.runs import below, wait_until
from tests.support.small_suite import POLICIES, write_suite

need_ray()
pytestmark = pytest.mark.timeout(600)

STUDY = (
    *("clustered", "--over", "workload.rate=0.1:1:0.1", "--over", "policy=petals,proposed", "--runs", "10"),
    *("--set", "workload.n_requests=20", "--set", "workload.n_output_tokens=8"),
)
"""Runs of some 20 ms."""
N_RUNS = 200
_LOST = """
from testbed.studies.sweep.on_ray import OnRay
from tests.support.mortal import mortal
groups = [[0, 1, 2, 3, 4, 5], list(range(6, 60))]
found = dict(OnRay(2).results(mortal, None, groups, lambda task: -task))
assert found == {task: -3 if task == 3 else task for task in range(60)}, found
"""
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
_USED = """
import ray
ray.init(logging_level="ERROR", log_to_driver=False)
print(ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0))
"""


def command(out: Path, executor: str = "ray", *more: str) -> list[str]:
    arguments = [*STUDY, "--executor", executor, "--out", str(out), *more]
    return [sys.executable, "-m", "testbed", "sweep", *arguments]


def n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def other_lines(said: str) -> list[str]:
    """What a sweep printed beside its progress and, on a slow machine, that no worker has begun yet."""
    return [
        line
        for line in said.splitlines()
        if not line.endswith("s left") and not line.startswith("no worker of the Ray cluster has begun in")
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this machine computes alone."""
    out = tmp_path_factory.mktemp("whole") / "out"
    subprocess.run(command(out, "local"), check=True, capture_output=True, timeout=400)
    return out


@pytest.fixture
def two_machines() -> Iterator[list[Machine]]:
    # Ray's sockets are below it: their paths may have 107 characters.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, cluster(Path(folder)) as two:
        yield two


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """A cluster of one, with two CPUs, for tests that leave it as it is."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        cluster(Path(folder), 2, 1) as one,
    ):
        yield one[0]


def test_the_same_bytes_after_a_stop_and_with_a_machine_lost_midway(
    whole: Path, two_machines: list[Machine], tmp_path: Path
) -> None:
    head, node = two_machines
    out = tmp_path / "out"

    def begin() -> subprocess.Popen[str]:
        return subprocess.Popen(
            head.inside(command(out)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def used() -> float:
        asked = head.inside([sys.executable, "-c", _USED])
        return float(subprocess.run(asked, check=True, capture_output=True, text=True, timeout=180).stdout)

    process = begin()
    try:
        wait_until(lambda: n_lines(out / RUNS) > 10 or process.poll() is not None, "some results", 180)
        (driver,) = below(process.pid)
        os.kill(driver, signal.SIGINT)
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and "the same command goes on" in said
    n_kept = n_lines(out / RUNS)
    assert 10 < n_kept < N_RUNS - 80, "it was stopped midway"
    wait_until(lambda: used() == 0, "nothing of ours in the cluster", 90)

    process = begin()
    try:
        wait_until(
            lambda: n_lines(out / RUNS) > n_kept + 40 or process.poll() is not None, "more results", 180
        )
        assert process.poll() is None, process.communicate()
        node.kill()
        answer, said = process.communicate(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert f"{N_RUNS} runs: {N_RUNS - n_kept} computed" in answer
    assert not other_lines(said), "Ray's own messages stay away"
    assert (out / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


def test_a_machine_that_joins_works_and_a_killed_command_or_a_lost_head_costs_only_runs_under_way(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    def has(n: int) -> bool:
        return n_lines(out / RUNS) > n

    def begin(machine: Machine) -> subprocess.Popen[str]:
        inside = machine.inside(command(out))
        return subprocess.Popen(inside, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        head_alone(Path(folder)) as lone,
    ):
        head = lone.head
        process = begin(head)
        try:
            wait_until(lambda: has(0) or process.poll() is not None, "a result", 180)
            node = lone.begin_other()
            wait_until(
                lambda: node.workers() or process.poll() is not None, "a worker on the new machine", 180
            )
            assert process.poll() is None, process.communicate()
            (driver,) = below(process.pid)
            os.kill(driver, signal.SIGKILL)
            process.communicate(timeout=60)
        finally:
            process.kill()
        wait_until(lambda: not head.workers() and not node.workers(), "no worker of ours", 90)
        n_kept = n_lines(out / RUNS)
        assert n_kept < N_RUNS - 40, "it was killed midway"

        process = begin(node)
        try:
            wait_until(lambda: has(n_kept + 10) or process.poll() is not None, "more results", 180)
            assert process.poll() is None, process.communicate()
            head.kill()
            said = process.communicate(timeout=90)[1]
        finally:
            process.kill()
        assert process.returncode == 1, said
        (sentence,) = other_lines(said)
        assert sentence.startswith(
            "testbed: the head of the Ray cluster at 10.77.0.1:6379 has not answered for 10 s"
        )
        wait_until(lambda: not node.workers(), "no worker of ours on the machine that is left", 90)
    n_kept = n_lines(out / RUNS)
    done = subprocess.run(command(out, "local"), check=True, capture_output=True, text=True, timeout=240)
    assert f"{N_RUNS} runs: {N_RUNS - n_kept} computed" in done.stdout
    assert (out / RESULTS).read_bytes() == (whole / RESULTS).read_bytes()


def test_a_task_that_ends_its_worker_twice_is_lost_and_other_versions_are_refused(machine: Machine) -> None:
    for program, said in ((_LOST, ""), (_OTHER, "has testbed 0.1.0")):
        inside = machine.inside([sys.executable, "-c", program])
        run = subprocess.run(inside, capture_output=True, text=True, timeout=240)
        assert run.returncode == 0, run.stderr
        assert said in run.stdout and run.stderr == ""


def test_no_cluster_is_one_sentence(tmp_path: Path) -> None:
    for address, expected in (("127.0.0.1:1", "ray start --head"), ("ray://nowhere:1", "HOST:PORT")):
        run = subprocess.run(
            command(tmp_path / "out"),
            env=os.environ | {"RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert run.returncode == 2 and run.stdout == ""
        assert run.stderr.startswith("testbed: ") and run.stderr.count("\n") == 1 and expected in run.stderr


def test_a_score_has_the_same_figures_and_limits_on_a_cluster(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = tmp_path / "suite"
    suite.mkdir()
    write_suite(suite)
    monkeypatch.chdir(tmp_path)
    Path("scored.py").write_text(POLICIES, encoding="utf-8")

    def score(policy: str, executor: str) -> list[str]:
        given = [policy, "--suite", str(suite), "--executor", executor, "--out", f"{executor}-{policy[7:]}"]
        return [sys.executable, "-m", "testbed", "score", *given, "--json"]

    def figures(policy: str, command: list[str]) -> tuple[bool, str, list[dict[str, Any]]]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == (0 if policy == "scored:Good" else 1), done.stderr
        answer = json.loads(done.stdout)
        rows = [{k: v for k, v in row.items() if "cpu" not in k} for row in answer["settings"]]
        return answer["valid"], answer["why"].partition(" and was")[0], rows

    for policy in ("scored:Good", "scored:Loops"):
        found = figures(policy, machine.inside(score(policy, "ray")))
        assert found == figures(policy, score(policy, "local"))

"""Which namespaces count as left behind by a run. A folder of the test stands in for /proc."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from testbed.control.faults import leaks

RUN = Path("/runs/mine")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    add(tmp_path, "self", b"", "net:[1]")
    return tmp_path


@pytest.fixture
def on_pause(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Carries out one change in each pause; pauses take no time."""
    steps: list[Callable[[], None]] = []

    def pause(_: float) -> None:
        if steps:
            steps.pop(0)()

    monkeypatch.setattr(leaks.time, "sleep", pause)
    return steps


def add(proc: Path, pid: str, environ: bytes, net: str | None, *descriptors: str) -> None:
    process = proc / pid
    for folder in ("ns", "fd"):
        (process / folder).mkdir(parents=True)
    (process / "environ").write_bytes(environ)
    if net is not None:
        (process / "ns/net").symlink_to(net)
    for number, target in enumerate(descriptors):
        (process / "fd" / str(number)).symlink_to(target)


def mark(run: str) -> bytes:
    return f"HOME=/root\0TESTBED_RUN={run}\0LANG=C\0".encode()


@pytest.mark.usefixtures("on_pause")
def test_only_namespaces_of_this_run_that_are_not_ours_count(proc: Path) -> None:
    add(proc, "10", mark("/runs/mine"), "net:[1]", "/dev/null", "socket:[77]")
    add(proc, "11", mark("/runs/mine"), "net:[2]")
    add(proc, "12", mark("/runs/mine"), "net:[2]")
    add(proc, "13", mark("/runs/mine"), "net:[3]")
    assert leaks.namespaces_left(RUN, proc) == 2


@pytest.mark.usefixtures("on_pause")
def test_a_namespace_that_is_only_held_open_counts(proc: Path) -> None:
    add(proc, "10", mark("/runs/mine"), "net:[1]", "net:[4]", "mnt:[5]", "net:[1]")
    assert leaks.namespaces_left(RUN, proc) == 1


@pytest.mark.parametrize("run", ["/runs/mine-1", "/runs/min", "/runs/mine/mine", "/other/runs/mine"])
def test_other_runs_at_the_same_time_do_not_count_and_are_not_waited_for(
    proc: Path, on_pause: list[Callable[[], None]], run: str
) -> None:
    add(proc, "10", mark(run), "net:[2]")
    add(proc, "11", b"NOTE=TESTBED_RUN=/runs/mine\0", "net:[3]")
    on_pause.append(lambda: pytest.fail("waited for another run's process"))
    assert leaks.namespaces_left(RUN, proc) == 0


def test_a_process_that_is_just_ending_does_not_count(proc: Path, on_pause: list[Callable[[], None]]) -> None:
    add(proc, "10", mark("/runs/mine"), "net:[2]")
    add(proc, "11", mark("/runs/mine"), None)  # the process has left its namespaces already
    add(proc, "12", b"", "net:[3]")  # the process has no memory any more
    on_pause += [lambda: None, lambda: shutil.rmtree(proc / "10")]
    assert leaks.namespaces_left(RUN, proc) == 0
    assert not on_pause


def test_a_process_that_stays_counts_in_the_end(proc: Path, on_pause: list[Callable[[], None]]) -> None:
    add(proc, "10", mark("/runs/mine"), "net:[2]")
    add(proc, "11", mark("/runs/mine"), "net:[3]")
    on_pause.append(lambda: shutil.rmtree(proc / "11"))
    assert leaks.namespaces_left(RUN, proc) == 1


def test_this_machines_own_processes_are_found_and_counted_without_one_of_the_run() -> None:
    assert leaks.namespaces_left(RUN / "that never was") == 0

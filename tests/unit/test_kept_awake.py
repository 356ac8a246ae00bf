"""Which CPUs are kept awake: all in a virtual machine, one per core on hardware."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.runtime.real import awake
from testbed.runtime.real.awake import cpus_to_keep_awake, hurry, kept_awake
from tests.support.children import ending
from tests.support.runs import wait_until


def machine(folder: Path, flags: str, siblings: dict[int, str]) -> tuple[Path, Path]:
    """Write a folder of CPUs and a cpuinfo, as the kernel has them."""
    about = folder / "cpuinfo"
    about.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    for cpu, listed in siblings.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(listed + "\n")
    return folder, about


TWO_CORES = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}


@pytest.mark.parametrize(
    ("flags", "cpus", "expected"),
    [
        ("fpu ht", {0, 1, 2, 3}, [0, 1]),
        ("fpu ht", {2, 3, 1}, [1, 2]),
        ("fpu ht hypervisor", {0, 1, 2, 3}, [0, 1, 2, 3]),
        ("fpu ht", {0, 7}, [0, 7]),
    ],
    ids=["one-per-core", "those-allowed", "virtual-machine", "unknown-topology"],
)
def test_a_core_is_kept_awake_by_one_of_its_threads(
    flags: str, cpus: set[int], expected: list[int], tmp_path: Path
) -> None:
    assert cpus_to_keep_awake(cpus, *machine(tmp_path, flags, TWO_CORES)) == expected


SESSIONS_SHARE = Path("/proc/self/autogroup").exists()
"""Whether the kernel can share CPUs among sessions first."""


def session_nice(pid: int) -> str | None:
    """The niceness of a process's session; None if it has none, as what runs in no session since the machine started."""
    words = Path(f"/proc/{pid}/autogroup").read_text().split() if SESSIONS_SHARE else []
    return words[-1] if words else None


@pytest.mark.skipif(os.geteuid() != 0, reason="raising a priority needs root")
def test_a_spinner_goes_last_among_all_sessions_until_it_is_to_end() -> None:
    first = session_nice(os.getpid())
    spinner = subprocess.Popen([sys.executable, "-c", "from testbed.runtime.real.awake import spin; spin(0)"])
    try:
        wait_until(lambda: os.sched_getscheduler(spinner.pid) == os.SCHED_IDLE, "idle priority")
        assert os.getsid(spinner.pid) == spinner.pid
        assert session_nice(spinner.pid) == ("19" if SESSIONS_SHARE else None)
        assert session_nice(os.getpid()) == first
        hurry([spinner.pid, 2**22 + 1])  # no process has that number
        assert os.sched_getscheduler(spinner.pid) == os.SCHED_OTHER
        assert session_nice(spinner.pid) == ("0" if SESSIONS_SHARE else None)
    finally:
        spinner.kill()
        spinner.wait()


def unprivileged_spinner() -> int:
    pid = os.fork()
    if pid == 0:
        with ending():
            os.setuid(65534)
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a user's own processes: /proc/self belongs to it
            awake.spin(0)
    return pid


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.skipif(not SESSIONS_SHARE, reason="the kernel shares CPUs among processes alone")
def test_without_privileges_too_every_spinner_goes_last() -> None:
    """There the kernel lets the machine's sessions change their share one at a time, 0.1 s apart."""
    pids = [unprivileged_spinner() for _ in range(3)]
    try:
        wait_until(lambda: [session_nice(pid) for pid in pids] == ["19"] * 3, "the least share")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def spinners(ancestor: int) -> dict[int, int]:
    """Return the CPU, by pid, of the running spinners that descend from ``ancestor``."""
    found, waiting = {}, [ancestor]
    while waiting:
        pid = waiting.pop()
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            waiting += map(int, children)
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            if not name.startswith("tb:awake-") or os.sched_getscheduler(pid) != os.SCHED_IDLE:
                continue
            cpu = int(name.removeprefix("tb:awake-"))
            if os.sched_getaffinity(pid) == {cpu}:
                found[pid] = cpu
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_is_calibrated_has_the_spinners_of_a_run_and_they_go_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(awake, "why_cpus_may_sleep", lambda: None)
    cpus = cpus_to_keep_awake(os.sched_getaffinity(0))
    with kept_awake(True) as about:
        wait_until(lambda: sorted(spinners(os.getpid()).values()) == cpus, "a spinner for each CPU")
        pids = spinners(os.getpid())
        assert about == "CPUs were kept awake"
    wait_until(lambda: not any(map(is_alive, pids)), "their end")


def test_spinning_processes_end_with_a_process_that_is_killed() -> None:
    code = (
        "import sys, testbed.runtime.real.awake as awake\n"
        "awake.why_cpus_may_sleep = lambda: None\n"
        "with awake.kept_awake(True):\n    print('begun', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        assert held.stdout is not None and held.stdout.readline() == b"begun\n"
        wait_until(lambda: spinners(held.pid), "a spinner")
        pids = spinners(held.pid)
        held.kill()
    wait_until(lambda: not any(map(is_alive, pids)), "their end")


@pytest.mark.parametrize(("wanted", "words"), [(True, "a quota of 1.5 CPUs"), (False, "as asked for")])
def test_they_do_not_spin_under_a_quota_or_where_nobody_wants_it(
    wanted: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.runtime.quota.cpu_quota", lambda: 1.5)
    with kept_awake(wanted) as about:
        assert spinners(os.getpid()) == {}
        assert about.startswith("CPUs may sleep") and words in about


def test_spinning_processes_that_cannot_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awake, "why_cpus_may_sleep", lambda: None)
    monkeypatch.setattr(awake.sys, "executable", "/bin/false")
    with kept_awake(True) as about:
        assert spinners(os.getpid()) == {}
        assert about.startswith("CPUs may sleep") and "did not start" in about


def test_spinning_processes_that_end_meanwhile_are_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(awake, "why_cpus_may_sleep", lambda: None)
    with kept_awake(True):
        wait_until(lambda: spinners(os.getpid()), "a spinner")
        pid = next(iter(spinners(os.getpid())))
        keeper = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[1])
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_alive(keeper), "its keeper's end")
    assert "that kept CPUs awake has ended" in caplog.text

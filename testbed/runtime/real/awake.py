"""Keeps CPUs awake.

Waking one takes 0.1 ms on hardware and up to 15 ms in a virtual machine, which would distort
what a run measures.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from netem.syscalls import set_death_signal, set_process_name
from testbed.runtime.quota import why_cpus_may_sleep

log = logging.getLogger(__name__)

_BEGUN = b"begun\n"
_LAST = 19
"""The niceness whose weight is 15 where the usual one is 1,024."""
_AGAIN_S = 0.03


def spin(cpu: int) -> None:
    """Keep one CPU from sleeping, at idle priority: every other process goes first.

    It has a session of its own: where Linux shares CPUs among sessions first (``_set_session_nice``), an idle priority
    counts only within its session, whose other processes shall keep their share.
    """
    if os.getsid(0) != os.getpid():
        os.setsid()
    while not _set_session_nice(os.getpid(), _LAST):
        time.sleep(_AGAIN_S)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


def hurry(pids: Iterable[int]) -> None:
    """Give processes of ``spin`` the usual priority: at idle priority one that is killed needs many seconds of a busy
    machine to end.
    """
    for pid in pids:
        with contextlib.suppress(
            OSError
        ):  # it has ended, or this process may not: then it is as slow as that
            if os.getsid(pid) == pid:
                _set_session_nice(pid, 0)
            os.sched_setscheduler(pid, os.SCHED_OTHER, os.sched_param(0))


def _set_session_nice(pid: int, nice: int) -> bool:
    """Set the niceness of the process's session among all sessions, where the kernel has one (``sched_autogroup_enabled``).

    Returns False if it must be tried again: without privileges one session of the machine may change it in 0.1 s.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_bytes(b"%d" % nice)
    except OSError as error:  # else it has none, or it has ended, or this process may not
        return not isinstance(error, BlockingIOError)
    return True


def cpus_to_keep_awake(
    cpus: Collection[int],
    system: Path = Path("/sys/devices/system/cpu"),
    about: Path = Path("/proc/cpuinfo"),
) -> list[int]:
    """Return which of ``cpus`` to spin on: all of them in a virtual machine, else one per core.

    On hardware a core is awake if one of its threads is, and spinning on both would slow down work on the
    core. A virtual machine's host lets each virtual CPU sleep separately.
    """
    flags = (line for line in about.read_text(encoding="utf-8").splitlines() if line.startswith("flags"))
    if any("hypervisor" in line.split() for line in flags):
        return sorted(cpus)
    chosen: dict[str, int] = {}
    for cpu in sorted(cpus):
        siblings = system / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        core = siblings.read_text() if siblings.exists() else str(cpu)
        chosen.setdefault(core, cpu)
    return list(chosen.values())


@contextlib.contextmanager
def kept_awake(wanted: bool) -> Iterator[str]:
    """Keep CPUs awake while the body runs, if ``wanted`` and without a quota; yields what is done, in words.

    The spinning processes are forked by a small process of their own, since this one may have threads or use
    a GPU.
    """
    why_not = why_cpus_may_sleep() if wanted else "CPUs may sleep, as asked for"
    if why_not is not None:
        yield why_not
        return
    command = [sys.executable, "-P", "-m", "testbed.runtime.real.awake", str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    ) as keeper:
        assert keeper.stdout is not None
        try:
            has_begun = keeper.stdout.readline() == _BEGUN
            yield (
                "CPUs were kept awake"
                if has_begun
                else "CPUs may sleep: the process that keeps them awake did not start"
            )
            if has_begun and keeper.poll() is not None:
                log.warning(
                    "the process that kept CPUs awake has ended: later times may include waking a CPU"
                )
        finally:
            keeper.kill()


def _dies_with(parent: int) -> bool:
    """Arrange to be killed when ``parent`` ends. Returns whether it still runs."""
    set_death_signal(signal.SIGKILL)
    return os.getppid() == parent


def main() -> None:
    """Entry point:

    ``python -m testbed.runtime.real.awake PARENT``; ends with its parent, and the spinners with it.
    """
    if not _dies_with(int(sys.argv[1])):
        return
    own = os.getpid()
    for cpu in cpus_to_keep_awake(os.sched_getaffinity(0)):
        if os.fork() == 0:
            set_process_name(f"tb:awake-{cpu}")
            if _dies_with(own):
                spin(cpu)
            os._exit(0)
    sys.stdout.buffer.write(_BEGUN)
    sys.stdout.flush()
    os.wait()


if __name__ == "__main__":
    main()

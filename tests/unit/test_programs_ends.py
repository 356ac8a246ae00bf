"""How a program on a node that a signal has ended is told from one whose testbed has ended."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.rundir import OWNER, owner_alive, process_start, write_json
from testbed.runs.inside import NodeNamespaces, _until_ended


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def ended_by(number: int, holder: subprocess.Popen[bytes], run_dir: Path) -> int:
    """What ``testbed exec`` returns for a program that a signal has ended on a testbed of this process."""
    write_json(run_dir / OWNER, {"pid": os.getpid(), "started": process_start(os.getpid())})
    program = subprocess.Popen(["sleep", "1000"])
    program.send_signal(number)
    os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    namespaces = NodeNamespaces(run_dir, "a100-0", 0, None, os.pidfd_open(holder.pid))
    status = _until_ended(program.pid, namespaces)
    program.returncode = -number  # it has been waited for
    return status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_program_that_somebody_ends_says_nothing_of_its_testbed(
    number: int, holder: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended_by(number, holder, tmp_path) == 128 + number
    assert capsys.readouterr().err == ""


def test_a_testbed_that_ends_after_its_programs_is_named(
    holder: subprocess.Popen[bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen(["sh", "-c", f"sleep 0.1; kill {holder.pid}"]):
        assert ended_by(signal.SIGTERM, holder, tmp_path) == 128 + signal.SIGTERM
    assert "has ended, and with it a100-0" in capsys.readouterr().err


def test_a_process_that_has_ended_owns_nothing_though_nobody_has_waited_for_it(tmp_path: Path) -> None:
    owner = subprocess.Popen(["sleep", "1000"])
    write_json(tmp_path / OWNER, {"pid": owner.pid, "started": process_start(owner.pid)})
    assert owner_alive(tmp_path)
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    assert not owner_alive(tmp_path)
    owner.wait()

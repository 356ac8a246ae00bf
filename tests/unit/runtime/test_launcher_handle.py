"""What the orchestrator is told by a launcher that is gone."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.errors import RunError
from testbed.runtime.real import handle


def silent(_: list[str], *, pass_fds: list[int], **options: Any) -> subprocess.Popen[bytes]:
    """A launcher that answers nothing."""
    return subprocess.Popen(["sleep", "1000"], pass_fds=pass_fds)


async def test_whoever_asks_a_launcher_that_ends_or_has_ended_is_told_so_whoever_has_stopped_asking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(handle, "subprocess", SimpleNamespace(Popen=silent, DEVNULL=subprocess.DEVNULL))
    launcher = handle.LauncherHandle(tmp_path)
    ended: list[tuple[str, int]] = []
    launcher.attach(lambda name, status: ended.append((name, status)))
    given_up = asyncio.ensure_future(launcher.stalls())
    await asyncio.sleep(0.01)
    given_up.cancel()
    waiting = asyncio.ensure_future(launcher.stalls())
    await asyncio.sleep(0.01)
    launcher._process.kill()
    for asked in (waiting, launcher.stalls(), launcher.signal_program(1, signal.SIGTERM)):
        with pytest.raises(RunError, match="the launcher ended unexpectedly"):
            await asyncio.wait_for(asked, 10)
    assert ended == [("launcher", -signal.SIGKILL)]
    launcher.close()

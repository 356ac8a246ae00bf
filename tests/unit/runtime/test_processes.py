"""What ends a run when a process dies: its name, also where its control connection is seen to end first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from nodes.control import ControlError
from testbed.errors import RunError
from testbed.runtime import processes
from testbed.runtime.launching import Launcher
from testbed.runtime.processes import Processes


def made(folder: Path, interrupted: asyncio.Event) -> Processes:
    return Processes(cast(Launcher, None), folder, dict, lambda name, status: False, interrupted)


async def unconnected() -> None:
    raise ControlError("the control connection was closed")


async def unreachable() -> None:
    raise RunError("client-0 cannot reach the servers") from ControlError("ClientConnectorError")


@pytest.mark.parametrize("work", [unconnected, unreachable])
async def test_a_death_is_named_though_its_connections_ended_before_the_launcher_said_so(
    tmp_path: Path, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    nodes = made(tmp_path, asyncio.Event())
    asyncio.get_running_loop().call_later(0.05, nodes.give_up, RunError("a100-0 ended unexpectedly"))
    with pytest.raises(RunError, match="a100-0 ended unexpectedly"):
        await nodes.guard(work())


async def test_an_answer_that_is_an_error_is_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted: Any = asyncio.Event()
    with pytest.raises(ControlError, match="was closed"):
        monkeypatch.setattr(processes, "_REPORT_S", 0.01)
        await made(tmp_path, interrupted).guard(unconnected())
    monkeypatch.setattr(processes, "_REPORT_S", 60.0)
    interrupted.set()
    with pytest.raises(ControlError, match="was closed"):
        await made(tmp_path, interrupted).guard(unconnected())

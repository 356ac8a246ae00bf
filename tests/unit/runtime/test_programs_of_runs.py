"""Programs of a run whose launcher does not say, or never will, which process they are."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from testbed.errors import UserError
from testbed.experiments.experiment import Program
from testbed.records.events import EventWriter
from testbed.runtime.programs import Programs


@pytest.mark.parametrize("fails", [False, True])
async def test_a_program_that_was_being_started_does_not_hold_up_the_end_of_the_run(
    tmp_path: Path, fails: bool
) -> None:
    async def run_program(*_: Any) -> int:
        if fails:
            raise UserError("there is no such program")
        await asyncio.Event().wait()
        return 1

    experiment: Any = SimpleNamespace(program_nodes={"web": Program("web", ("true",))})
    launcher: Any = SimpleNamespace(run_program=run_program)
    events = EventWriter(tmp_path)
    programs = Programs(experiment, launcher, tmp_path, events, lambda: None)
    starting = asyncio.ensure_future(programs.start())
    await asyncio.sleep(0.01)
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, UserError):
        await starting
    await asyncio.wait_for(programs.end(), 2.0)
    events.close()

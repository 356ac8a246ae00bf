"""Background work of a run that nobody awaits: its errors end the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from nodes.control import ControlError
from policies.problem import PolicyError
from testbed.control.placing import PolicyInterrupted
from testbed.errors import RunError, TestbedError, UserError

log = logging.getLogger(__name__)


def guarded(work: Coroutine[Any, Any, None], broke: Callable[[TestbedError], None]) -> asyncio.Task[None]:
    """Begin ``work`` and return its task; it calls ``broke`` with the exception of ``work``, if any, as a ``TestbedError``."""
    task = asyncio.create_task(_guarded(work, broke))
    task.add_done_callback(lambda _: work.close())  # a task that is cancelled before it begins awaits nothing
    return task


async def _guarded(work: Coroutine[Any, Any, None], broke: Callable[[TestbedError], None]) -> None:
    try:
        await work
    except PolicyInterrupted:  # whatever interrupted the policy ends the run itself
        return
    except PolicyError as error:
        broke(UserError(str(error)))
    except TestbedError as error:
        broke(error)
    except ControlError as error:
        broke(RunError(f"a node did not answer: {error}"))
    except Exception as error:
        broke(unexpected(error))


def unexpected(error: Exception) -> RunError:
    """Returns a ``RunError`` for an unexpected exception.

    Logs its traceback, unless it is an ``OSError`` (such as a full disk).
    """
    if isinstance(error, OSError):
        return RunError(f"the run ended: {error}")
    log.error("unexpected", exc_info=error)
    return RunError(f"the testbed itself has failed: {type(error).__name__}: {error}")

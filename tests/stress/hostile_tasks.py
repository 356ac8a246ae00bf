"""What a target in this process leaves running."""

from __future__ import annotations

import asyncio
import time

_LINGER_S = 15.0
"""Tasks that are ending may take 10 s."""


def n_tasks_left(loop: asyncio.AbstractEventLoop, n_resident: int) -> int:
    """Return the number of tasks on ``loop``, after waiting for those that are ending.

    ``n_resident`` tasks always run.
    """
    deadline = time.monotonic() + _LINGER_S
    while len(asyncio.all_tasks(loop)) > n_resident and time.monotonic() < deadline:
        loop.run_until_complete(asyncio.sleep(0.02))
    return len(asyncio.all_tasks(loop))

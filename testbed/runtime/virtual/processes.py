"""What stands for a process where all nodes live in one: whose code runs, and what can be done to it."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import WeakSet


@dataclass(eq=False)
class Process:
    """One life of a node. A kill ends it; the node's next life is another process."""

    number: int
    name: str
    address: str
    tasks: WeakSet[asyncio.Task[object]] = field(default_factory=WeakSet)
    parked: list[asyncio.Handle] | None = None
    """What waits while it is stopped (SIGSTOP); ``None`` while it runs."""
    has_ended: bool = False


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process that code runs in; ``None``: what runs the testbed."""

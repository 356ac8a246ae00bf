"""Stands for a node's process where all nodes are in one process: its tasks and its state."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from dataclasses import dataclass, field
from weakref import WeakSet


@dataclass(eq=False)
class Process:
    """A node from its start to its end. A node that is begun again is another ``Process``."""

    number: int
    name: str
    address: str
    tasks: WeakSet[asyncio.Task[object]] = field(default_factory=WeakSet)
    parked: list[asyncio.Handle] | None = None
    """Callbacks that wait while it is stopped (SIGSTOP); ``None`` while it runs."""
    has_ended: bool = False


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process that code runs in; ``None``: the orchestrator."""

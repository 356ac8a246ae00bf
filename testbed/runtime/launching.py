"""What an emulation asks of whoever has its network and its nodes: a launcher of processes, or one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from netem.spec import LinkProfile, NetworkSpec
from nodes import control

OnExit = Callable[[str, int], None]
"""Called with a node's name and its process's exit status (negative: the signal that ended it)."""


Endpoints = tuple[Mapping[str, tuple[str, int]], bytes]
"""Of a network over several machines: where each reaches the others' parts of it, by name, and the run's key."""


@dataclass(frozen=True)
class OpenNetwork:
    """What carries a run, why it was chosen, and the address of every node."""

    name: str
    why: str
    addresses: Mapping[str, str]
    delays_in_client: bool = False
    """Nodes delay messages themselves."""
    any_port: bool = False
    """Nodes listen on any free port."""
    shares_links: bool = True
    """Pairs whose paths share a link compete for it."""
    namespaces: Mapping[str, int] = field(default_factory=dict)
    """Descriptors of the nodes' network namespaces in the process ``holder``; empty if they have none."""
    holder: int | None = None


@dataclass(frozen=True)
class MachineState:
    """Another machine of a run, and what is known of its clock; seconds."""

    name: str
    address: str
    n_nodes: int
    rtt_s: float
    """The smallest of the last ones."""
    offset_s: float
    """Its monotonic clock less this machine's."""
    drift: float
    """Seconds that its clock gains per second."""
    uncertainty_s: float
    """How far its nodes' instants were off at most, at any time of the run; no less than ``offset_s`` is."""
    is_lost: bool = False


class OnOneMachine:
    """Of a launcher whose nodes are all on this machine."""

    def instant_at(self, node: str, instant: float) -> float:
        """As ``Launcher.instant_at``."""
        return instant

    def machines(self) -> list[MachineState]:
        """As ``Launcher.machines``."""
        return []


class Listener(Protocol):
    """As ``nodes.control.Listener``."""

    def close(self) -> None: ...

    async def ended(self) -> None: ...


class Launcher(Protocol):
    """``testbed.runtime.real.handle`` for processes, ``testbed.runtime.virtual.memory`` for all nodes in one.

    Coroutines raise ``UserError`` for what the user can change, ``RunError`` for what broke.
    """

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """An event loop that keeps the clock of this launcher's nodes."""
        ...

    def attach(self, on_exit: OnExit) -> None:
        """Belong to the running loop from now on."""
        ...

    async def listen(self, path: Path, accept: Callable[[control.Peer], Awaitable[None]]) -> Listener:
        """Take control connections of nodes: see ``nodes.control.listen``."""
        ...

    async def open(self, wanted: str, spec: NetworkSpec, logs: Path, keep_awake: bool) -> OpenNetwork:
        """Build the network."""
        ...

    async def spawn(self, kind: str, config: Any, log: Path) -> int:
        """Begin a node; returns its process's number."""
        ...

    async def run_program(
        self, node: str, command: Sequence[str], environment: Mapping[str, str], hosts: Path, log: Path
    ) -> int:
        """Begin a program of the user's on ``node``, in a process group of its own; returns its process's number.

        ``hosts`` are the names that it knows.
        """
        ...

    async def signal_program(self, process: int, signal: int) -> None:
        """Send a signal to a program's process group."""
        ...

    async def kill(self, process: int, signal: int) -> None:
        """Send a signal to a node's process."""
        ...

    async def update(self, links: Mapping[tuple[str, str], LinkProfile]) -> float:
        """Change links; returns the instant at which that was done, before anybody can notice it."""
        ...

    async def stats(self) -> dict[str, float] | None:
        """The forwarder's counters, if the network has one."""
        ...

    async def stalls(self) -> list[tuple[float, float]]:
        """From when to when the whole machine stood still (``time.monotonic``); nothing in virtual time."""
        ...

    async def keep_awake(self, on: bool) -> None:
        """Have what keeps CPUs awake rest, or go on."""
        ...

    def instant_at(self, node: str, instant: float) -> float:
        """The instant from which ``node`` counts by its machine's clock, where this one counts from ``instant``."""
        ...

    def machines(self) -> list[MachineState]:
        """The other machines of the run; empty if all of it is on this one."""
        ...

    def descriptors(self, processes: Mapping[str, int]) -> dict[str, int]:
        """What these nodes have open (descriptors, or connections), by name; without those that have ended."""
        ...

    def busy(self) -> list[str]:
        """In virtual time: the names of those who have something to do; nobody's, if all wait."""
        ...

    def close(self) -> None:
        """End every node and remove the network."""
        ...

    async def end(self) -> None:
        """As ``close``, for nodes that have been told to stop."""
        ...

    def dispose(self) -> None:
        """Give up what the event loop needed, after it has ended."""
        ...

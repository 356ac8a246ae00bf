"""The interface between an emulation and its launcher, which builds the network and starts the nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from netem.networks import Network
from netem.spec import Endpoint, NetworkSpec, Windows
from nodes import control
from policies.links import Link
from testbed.records.summary import MachineState

OnExit = Callable[[str, int], None]
"""Called with a node's name and its process's exit status (negative: the signal that ended it)."""


Endpoints = tuple[Mapping[str, Endpoint], bytes]
"""For a network over several machines: each machine's (address, port) by name, and the run's key."""


@dataclass(frozen=True)
class OpenNetwork:
    """An open network: what it can do, why it was chosen, and the address of every node."""

    network: Network
    why: str
    addresses: Mapping[str, str]
    namespaces: Mapping[str, int] = field(default_factory=dict)
    """By node: descriptor of its network namespace in the process ``holder``; empty without namespaces."""
    holder: int | None = None

    @property
    def name(self) -> str:
        return self.network.name


class OnOneMachine:
    """Methods of a launcher whose nodes are all on this machine."""

    def instant_at(self, node: str, instant: float) -> float:
        """See ``Launcher.instant_at``: both clocks are the same."""
        return instant

    def machines(self) -> list[MachineState]:
        """See ``Launcher.machines``: there are no others."""
        return []


class Listener(Protocol):
    """See ``nodes.control.Listener``."""

    def close(self) -> None: ...

    async def ended(self) -> None: ...


class Launcher(Protocol):
    """``testbed.runtime.real.handle`` for processes, ``testbed.runtime.virtual.memory`` for all nodes in one.

    Coroutines raise ``UserError`` for what the user can change, ``RunError`` for what broke.
    """

    def new_loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop that follows the clock of this launcher's nodes."""
        ...

    def attach(self, on_exit: OnExit) -> None:
        """Use the running event loop from now on; ``on_exit`` is called for every process that ends."""
        ...

    async def listen(self, path: Path, accept: Callable[[control.Peer], Awaitable[None]]) -> Listener:
        """Accept control connections of nodes; see ``nodes.control.listen``."""
        ...

    async def open(self, wanted: str, spec: NetworkSpec, logs: Path, keep_awake: bool) -> OpenNetwork:
        """Build the network called ``wanted``, or for "auto" the first that works here; with ``keep_awake`` no CPU sleeps while it is open."""
        ...

    async def spawn(self, kind: str, config: Any, log: Path) -> int:
        """Start a node; returns the id of its process."""
        ...

    async def run_program(
        self, node: str, command: Sequence[str], environment: Mapping[str, str], hosts: Path, log: Path
    ) -> int:
        """Start a user's program on ``node``, in a process group of its own; returns the id of its process.

        ``hosts`` is the file of host names that the program sees.
        """
        ...

    async def signal_program(self, process: int, signal: int) -> None:
        """Send a signal to a program's process group."""
        ...

    async def kill(self, process: int, signal: int) -> None:
        """Send a signal to a node's process."""
        ...

    async def update(self, links: Mapping[tuple[str, str], Link]) -> float:
        """Change links; returns the instant of the change, which is before any effect of it can be seen."""
        ...

    async def begin_with(self, windows: Windows) -> None:
        """Have connections begin with these windows from now on; see ``netem.backend.Backend.begin_with``."""
        ...

    async def stats(self) -> dict[str, float] | None:
        """Return the forwarder's counters; ``None`` if the network has none."""
        ...

    async def stalls(self) -> list[tuple[float, float]]:
        """Return (begin, end) of each stall of this machine, by ``time.monotonic``; empty in virtual time."""
        ...

    async def keep_awake(self, on: bool) -> None:
        """Keep CPUs awake from now on, or let them sleep."""
        ...

    def instant_at(self, node: str, instant: float) -> float:
        """Convert ``instant`` of this machine's clock to the clock of the machine that ``node`` is on."""
        ...

    def machines(self) -> list[MachineState]:
        """Return the other machines of the run; empty if all nodes are on this one."""
        ...

    def descriptors(self, processes: Mapping[str, int]) -> dict[str, int]:
        """Return how many descriptors (or connections) each node has open; ended ones are left out."""
        ...

    def busy(self) -> list[str]:
        """In virtual time, return the names of processes that have something to do; empty if all wait."""
        ...

    def close(self) -> None:
        """End every node at once and remove the network."""
        ...

    async def end(self) -> None:
        """Like ``close``, but nodes that were asked to stop have time to do so."""
        ...

    def dispose(self) -> None:
        """Release what the event loop needed, after the loop has ended."""
        ...

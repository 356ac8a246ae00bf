"""All about faults in one emulated run; ``testbed.runtime.emulation`` has one ``Faults``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from nodes import records
from nodes.control import ControlError
from nodes.messages import GetStatus, ServerStatus
from testbed.control.coordinator import Coordinator
from testbed.control.faults import leaks
from testbed.control.faults.byhand import Fault, fault_by_hand
from testbed.control.faults.machine import Nodes
from testbed.control.faults.machines import Machines
from testbed.control.faults.recoveries import Recoveries
from testbed.control.faults.schedule import Schedule
from testbed.experiments.experiment import Experiment
from testbed.records.events import EventWriter, Leaked
from testbed.records.summary import DecisionCounts


class Faults:
    """Faults of the scenario and by hand, clients' recoveries from them, and leaks at the end."""

    def __init__(
        self,
        experiment: Experiment,
        nodes: Nodes,
        coordinator: Coordinator,
        events: EventWriter,
        run_dir: Path,
    ) -> None:
        self._nodes = nodes
        self._coordinator = coordinator
        self._events = events
        self._run_dir = run_dir
        self._n_clients = len(experiment.problem.clients)
        self._machines = Machines(experiment, nodes, coordinator, events)
        self._numbers = {name: number for number, name in enumerate(self._machines.names)}
        self._schedule = Schedule(experiment.faults.planned, self._machines)
        self._recoveries = Recoveries(experiment, self._machines, coordinator, events)
        self._descriptors: Mapping[str, int] = {}
        self.leaks: dict[str, float] | None = None
        """``{sessions, cache_bytes, descriptors, namespaces}``; ``None`` until they have been counted."""

    @property
    def watched(self) -> frozenset[int]:
        """Requests whose tokens clients must report."""
        return self._schedule.watched

    @property
    def decisions(self) -> DecisionCounts:
        return self._coordinator.decisions

    def begin(self) -> None:
        """Begin the scenario's faults; called when scenario time begins."""
        self._machines.begin()
        self._descriptors = self._nodes.descriptors()
        self._machines.in_background(self._schedule.run())

    async def by_hand(self, fault: Fault) -> str | None:
        """Carry out a fault by hand. Returns the reason if it was not done, else ``None``."""
        return await fault_by_hand(fault, self._machines.names, self._machines.apply)

    def on_death(self, call: Callable[[int], None]) -> None:
        """Set ``call`` to be called with the number of every server whose process has ended."""
        self._machines.died = call

    def one_at_a_time(self) -> AbstractAsyncContextManager[Any]:
        """Hold this while links change: see ``Machines``."""
        return self._machines.one_at_a_time()

    def token(self, request: int, n_tokens: int) -> None:
        self._schedule.token(request, n_tokens)

    def notify(self, record: records.Recoveries) -> None:
        """Process a client's record of a failure or a recovery."""
        self._recoveries.notify(record)

    def ended(self, request: int) -> None:
        """Forget a request that has ended."""
        self._recoveries.ended(request)

    def answers(self, server: int) -> bool:
        """Returns whether the server's process is there and not stopped."""
        return self._machines.answers(server)

    def node_ended(self, node: str, status: int) -> bool:
        """Note that a node's process has ended with ``status``.

        Returns whether the run goes on without it.
        """
        return node in self._numbers and self._machines.ended(self._numbers[node], status)

    async def look_for_leaks(self) -> None:
        """Count what sessions have left behind. Call this when all clients are done."""
        n_sessions, cache_bytes = await leaks.held_by_servers(self._status)
        left_open = await leaks.left_open(self._descriptors_left)
        for name, n_more in left_open.items():
            self._events.write(Leaked(at_s=self._nodes.now_s(), node=name, n_descriptors=n_more))
        self.leaks = {
            "sessions": n_sessions + self._coordinator.n_sessions,
            "cache_bytes": cache_bytes,
            "descriptors": sum(left_open.values()),
            "namespaces": 0,
        }

    def _descriptors_left(self) -> dict[str, int]:
        """Returns how many descriptors too many nodes have open, by name; without nodes that have none."""
        found = {}
        for name, count in self._nodes.descriptors().items():
            server = self._numbers.get(name)
            # For a server that began later: the most of any server at the start, and one for each client.
            before = self._descriptors.get(name)
            if server is not None and (before is None or self._machines.epoch(server)):
                before = self._descriptors_of_servers() + self._n_clients
            # Every server that joined may have a connection with this node.
            n_more = count - before - self._machines.n_joined if before is not None else 0
            if n_more > 0:
                found[name] = n_more
        return found

    def _descriptors_of_servers(self) -> int:
        """Returns the most descriptors that a server had open at the start."""
        return max(self._descriptors.get(name, 0) for name in self._numbers)

    async def _status(self) -> list[ServerStatus]:
        found = []
        for server in range(len(self._machines.names)):
            if self._machines.answers(server):
                with contextlib.suppress(ControlError):  # the server has just died and holds nothing
                    found.append(await self._nodes.ask_server(server, GetStatus()))
        return found

    async def end(self) -> None:
        """Cancel all faults. May be called at any time."""
        await self._machines.end()

    def count_namespaces(self) -> None:
        """Count the namespaces that are left. Call this when the network has been removed."""
        if self.leaks is not None:
            self.leaks["namespaces"] = leaks.namespaces_left(self._run_dir)

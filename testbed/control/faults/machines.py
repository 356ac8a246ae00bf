"""Carries out faults on the servers' processes. What each kind does is in ``testbed.faultkinds``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from msgspec import UNSET

from nodes.clock import on_tick
from nodes.control import ControlError
from testbed.control.coordinator import Coordinator
from testbed.control.faults.machine import Nodes, ServerProcess
from testbed.control.guarded import guarded
from testbed.errors import MachineLostError, RunError
from testbed.experiments.experiment import Experiment
from testbed.faultkinds import DIED, KINDS, FaultKind
from testbed.records.events import BY_HAND, BY_ITSELF, EventWriter, FaultHappened, FaultOver


class Machines:
    """Carries out faults and notifies the membership. Every fault becomes a line of ``events.jsonl``.

    A fault that does not apply (such as a kill of a dead server) does nothing, neither when it begins nor
    when it ends. A process that is started again has its original speed.
    """

    def __init__(
        self, experiment: Experiment, nodes: Nodes, coordinator: Coordinator, events: EventWriter
    ) -> None:
        self.names = [server.name for server in experiment.problem.servers]
        self._experiment = experiment
        self._nodes = nodes
        self._events = events
        self._machines = [
            ServerProcess(
                j,
                name,
                j not in experiment.faults.absent,
                nodes,
                coordinator,
                events,
                lambda server: self.died(server),
                self.in_background,
                experiment.faults.recovery.give_up_s,
            )
            for j, name in enumerate(self.names)
        ]
        self.died: Callable[[int], None] = lambda server: None
        """Called with the number of a server whose process has ended for any reason."""
        self._has_begun = False
        self._turns = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Note that scenario time has begun."""
        self._has_begun = True

    def one_at_a_time(self) -> AbstractAsyncContextManager[Any]:
        """Returns a lock under which servers and links change in virtual time, so that their order is fixed.

        In real time it is no lock: faults do not wait for other servers' processes.
        """
        return self._turns if self._nodes.clock.is_virtual else contextlib.nullcontext()

    async def end(self) -> None:
        """Cancel all faults."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._has_begun = False

    async def sleep_until_s(self, at_s: float) -> None:
        await self._nodes.clock.sleep_until_s(at_s)

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = guarded(work, self._nodes.broke)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def answers(self, server: int) -> bool:
        """Returns whether the server's process is there and not stopped."""
        machine = self._machines[server]
        return machine.is_up and not machine.is_stopped

    @property
    def n_joined(self) -> int:
        """The number of servers that were absent at the start and have joined since."""
        return sum(self._machines[server].has_been for server in self._experiment.faults.absent)

    def epoch(self, server: int) -> int:
        return self._machines[server].epoch

    def failed_at_s(self, server: int) -> float:
        """Returns when the server last ended or was stopped; -inf if it never did."""
        return self._machines[server].failed_at_s

    def ended(self, server: int, status: int) -> bool:
        """Note that the server's process has ended. Returns whether the run can go on without it.

        ``status`` is its exit status, or minus the signal that ended it.
        """
        machine = self._machines[server]
        machine.gone.set()
        if not machine.is_up:
            return True
        # Only an end by a signal counts as a fault. A process that exits by itself has the reason in its log.
        if status >= 0 or self._experiment.faults.recovery.mode != "replay" or not self._has_begun:
            return False
        machine.dies()
        machine.write(FaultHappened, kind=DIED, by=BY_ITSELF, status=status)
        return True

    async def apply(
        self,
        kind: str,
        server: int,
        factor: float = 1.0,
        for_s: float | None = None,
        planned_at_s: float | None = None,
        by: str = BY_HAND,
    ) -> str | None:
        """Carry out a fault on ``server``. Returns why it does not apply; ``None`` if it was done.

        ``for_s`` (scenario seconds) ends the fault again. The fault waits for the ends of other faults of
        this server that are planned for ``planned_at_s`` or before, however late these are; in virtual time for those of
        all servers.
        """
        fault, machine = KINDS[kind], self._machines[server]
        async with self._turn(machine, planned_at_s), self.one_at_a_time():
            why_not = fault.why_not(machine)
            at_s = self._nodes.now_s()  # before any client can notice
            if why_not is None:
                epoch = machine.epoch
                try:
                    await fault.apply(machine, factor)
                except (RunError, ControlError):
                    if machine.epoch == epoch:
                        raise
                    why_not = "has just died"
            self._events.write(
                FaultHappened(
                    at_s=at_s,
                    server=self.names[server],
                    kind=kind,
                    planned_at_s=planned_at_s,
                    for_s=for_s,
                    applies=why_not is None,
                    by=by,
                    factor=factor if fault.has_factor else UNSET,
                )
            )
            if why_not is not None:
                return f"{self.names[server]} {why_not}"
            machine.n_applied[kind] += 1
            try:
                await fault.follow(machine, planned_at_s)
            except MachineLostError as error:
                return f"{self.names[server]} does not begin: {error}"
            if for_s is not None:
                ends_at_s = on_tick((self._nodes.now_s() if planned_at_s is None else planned_at_s) + for_s)
                task = self.in_background(self._undo(fault, machine, ends_at_s, machine.n_applied[kind]))
                machine.ends[task] = ends_at_s
                task.add_done_callback(machine.ends.pop)
        return None

    def _due(self, machine: ServerProcess, at_s: float | None) -> set[asyncio.Task[None]]:
        """Returns the tasks for which a fault of ``machine`` waits that is planned for ``at_s``: ends of other faults."""
        if at_s is None:
            return set()
        machines = self._machines if self._nodes.clock.is_virtual else [machine]
        return {task for one in machines for task, ends_at_s in one.ends.items() if ends_at_s <= at_s}

    @contextlib.asynccontextmanager
    async def _turn(self, machine: ServerProcess, at_s: float | None) -> AsyncIterator[None]:
        """Hold the machine's lock, after all ends for which a fault waits that is planned for ``at_s``."""
        while True:
            while due := self._due(machine, at_s):
                await asyncio.wait(due)
            async with machine.busy:
                if not self._due(
                    machine, at_s
                ):  # else a fault that held the lock before has planned another end
                    yield
                    return

    async def _undo(self, fault: FaultKind, machine: ServerProcess, at_s: float, number: int) -> None:
        """End the fault at ``at_s``, unless the process has ended since or had another fault of the kind."""
        epoch = machine.epoch
        await self.sleep_until_s(at_s)
        async with machine.busy, self.one_at_a_time():
            if machine.epoch != epoch or machine.n_applied[fault.name] != number:
                return
            with contextlib.suppress(MachineLostError):  # the server stays away
                if await fault.undo(machine, at_s):
                    machine.write(FaultOver, kind=fault.name, planned_at_s=at_s)

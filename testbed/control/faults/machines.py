"""Carries out faults on the servers' processes: kill, stop, cont, slow, restart, join and leave."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from nodes.clock import RunClock
from nodes.control import ControlError
from nodes.messages import A, Drain, GetStatus, Message, Question, Slow, Stop, WaitUntilEmpty
from testbed.control.coordinator import Coordinator
from testbed.control.guarded import guarded
from testbed.errors import RunError, TestbedError
from testbed.rundir import BY_HAND, MOVED, EventWriter
from testbed.scenario.experiment import Experiment


class Nodes(Protocol):
    """What the machines need of an emulation's nodes (``testbed.runtime.nodeset``)."""

    clock: RunClock

    def now_s(self) -> float: ...

    def descriptors(self) -> Mapping[str, int]:
        """Returns how many descriptors each node has open, by name; without nodes that have ended."""
        ...

    async def begin_server(self, server: int) -> None:
        """Start the server with the present placement. Returns when it serves and clients know where."""
        ...

    async def signal_server(self, server: int, number: int) -> None:
        """Send a signal to the server's process. Raises ``RunError`` if there is none."""
        ...

    async def ask_server(self, server: int, question: Question[A]) -> A:
        """Send a question to the server and return its answer. Raises ``ControlError``."""
        ...

    def notify_server(self, server: int, message: Message) -> None: ...

    def broke(self, error: TestbedError) -> None:
        """End the run with ``error``."""
        ...


@dataclass(eq=False)
class _Machine:
    """A server's process.

    ``epoch`` counts its ends, ``n_stops`` and ``n_slow`` the faults that it has had.
    """

    is_up: bool
    has_been: bool
    is_stopped: bool = False
    is_leaving: bool = False
    epoch: int = 0
    n_stops: int = 0
    n_slow: int = 0
    failed_at_s: float = -math.inf
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    ends: dict[asyncio.Task[None], float] = field(default_factory=dict)
    """Tasks that end faults, with the instants for which they are planned."""


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
        self._coordinator = coordinator
        self._events = events
        self._machines = [
            _Machine(j not in experiment.faults.absent, j not in experiment.faults.absent)
            for j in range(len(self.names))
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
        task = asyncio.create_task(guarded(work, self._nodes.broke))
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
        self._dies(server, machine)
        self._event(
            "fault",
            server,
            kind="died",
            planned_at_s=None,
            for_s=None,
            applies=True,
            by="itself",
            status=status,
        )
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
        this server that are planned for ``planned_at_s`` or before, however late these are.
        """
        machine = self._machines[server]
        async with _turn(machine, planned_at_s), self.one_at_a_time():
            why_not = _why_not(kind, machine)
            details: dict[str, Any] = {"factor": factor} if kind == "slow" else {}
            at_s = self._nodes.now_s()  # before any client can notice
            if why_not is None:
                epoch = machine.epoch
                try:
                    await getattr(self, f"_{kind}")(server, machine, factor)
                except (RunError, ControlError):
                    if machine.epoch == epoch:
                        raise
                    why_not = "has just died"
            self._events.write(
                "fault",
                at_s,
                server=self.names[server],
                kind=kind,
                planned_at_s=planned_at_s,
                for_s=for_s,
                applies=why_not is None,
                by=by,
                **details,
            )
            if why_not is not None:
                return f"{self.names[server]} {why_not}"
            if kind == "leave":
                self.in_background(self._drain(server, machine))
            elif kind in ("restart", "join"):
                asked_at_s = self._nodes.now_s()
                await self._begin(server, machine, planned_at_s)
                if kind == "join":
                    self._tell_joined(server, asked_at_s)
            if for_s is not None:
                ends_at_s = (self._nodes.now_s() if planned_at_s is None else planned_at_s) + for_s
                task = self.in_background(self._undo(kind, server, machine, ends_at_s))
                machine.ends[task] = ends_at_s
                task.add_done_callback(machine.ends.pop)
        return None

    async def _undo(self, kind: str, server: int, machine: _Machine, at_s: float) -> None:
        then = machine.epoch, machine.n_stops, machine.n_slow
        await self.sleep_until_s(at_s)
        async with machine.busy, self.one_at_a_time():
            if machine.epoch != then[0]:
                return
            if kind == "kill" and not machine.is_up:
                await self._begin(server, machine, at_s)
            elif kind == "stop" and machine.is_stopped and machine.n_stops == then[1]:
                await self._cont(server, machine, 1.0)
                self._event("fault-over", server, kind=kind, planned_at_s=at_s)
            elif kind == "slow" and machine.is_up and machine.n_slow == then[2]:
                await self._slow(server, machine, 1.0)
                self._event("fault-over", server, kind=kind, planned_at_s=at_s)

    def _dies(self, server: int, machine: _Machine) -> None:
        now_s = self._nodes.now_s()
        machine.is_up = machine.is_stopped = machine.is_leaving = False
        machine.epoch += 1
        machine.failed_at_s = now_s
        self._coordinator.membership.ends(server, now_s)
        self.died(server)

    async def _kill(self, server: int, machine: _Machine, factor: float) -> None:
        # First, so that ended() does not take its end for a failure of the run.
        self._dies(server, machine)
        if not machine.gone.is_set():
            await self._nodes.signal_server(server, signal.SIGKILL)
            await machine.gone.wait()

    async def _restart(self, server: int, machine: _Machine, factor: float) -> None:
        if machine.is_up:
            await self._kill(server, machine, factor)

    async def _join(self, server: int, machine: _Machine, factor: float) -> None:
        machine.has_been = True
        self._coordinator.join(server)

    def _tell_joined(self, server: int, asked_at_s: float) -> None:
        """Write the event of a server that has joined: a move from no blocks."""
        times = dict.fromkeys(("decided_at_s", "closed_at_s", "drained_at_s"), asked_at_s)
        new = list(self._coordinator.placement.ranges[server])
        self._event(MOVED, server, old=[0, 0], new=new, **times, open_at_s=self._nodes.now_s(), n_cut=0)

    async def _begin(self, server: int, machine: _Machine, planned_at_s: float | None) -> None:
        machine.gone.clear()
        beginning = asyncio.ensure_future(self._nodes.begin_server(server))
        gone = asyncio.ensure_future(machine.gone.wait())
        try:
            await asyncio.wait({beginning, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not beginning.done():
                raise RunError(f"{self.names[server]} ended as it began; its log has the reason")
            beginning.result()
        finally:
            beginning.cancel()
            gone.cancel()
        machine.is_up = True
        now_s = self._nodes.now_s()
        self._coordinator.membership.begins(server, now_s)
        self._coordinator.look()
        blocks = list(self._coordinator.placement.ranges[server])
        self._event("begun", server, planned_at_s=planned_at_s, blocks=blocks)

    async def _stop(self, server: int, machine: _Machine, factor: float) -> None:
        failed_at_s = self._nodes.now_s()
        await self._nodes.signal_server(server, signal.SIGSTOP)
        machine.is_stopped = True
        machine.n_stops += 1
        machine.failed_at_s = failed_at_s
        # Not failed_at_s: in real time other servers may have ended meanwhile; membership needs the order.
        self._coordinator.membership.ends(server, self._nodes.now_s())

    async def _cont(self, server: int, machine: _Machine, factor: float) -> None:
        await self._nodes.signal_server(server, signal.SIGCONT)
        machine.is_stopped = False
        if not machine.is_leaving:
            self._coordinator.membership.goes_on(server, self._nodes.now_s())
            self._coordinator.look()

    async def _slow(self, server: int, machine: _Machine, factor: float) -> None:
        machine.n_slow += 1
        if machine.is_stopped:  # the process reads the message when it goes on
            self._nodes.notify_server(server, Slow(factor))
        else:
            await self._nodes.ask_server(server, Slow(factor))

    async def _leave(self, server: int, machine: _Machine, factor: float) -> None:
        machine.is_leaving = True
        self._coordinator.membership.ends(server, self._nodes.now_s(), is_said=True)
        await self._nodes.ask_server(server, Drain())

    async def _drain(self, server: int, machine: _Machine) -> None:
        """Wait until the leaving server has no session, at most ``give_up_s``, then end its process.

        Sessions that are left are replayed elsewhere.
        """
        epoch, began_at_s = machine.epoch, self._nodes.now_s()
        limit_at_s = began_at_s + self._experiment.faults.recovery.give_up_s
        emptied = asyncio.ensure_future(self._nodes.ask_server(server, WaitUntilEmpty()))
        others = [
            asyncio.ensure_future(machine.gone.wait()),
            asyncio.ensure_future(self.sleep_until_s(limit_at_s)),
        ]
        try:
            await asyncio.wait((emptied, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (emptied, *others):
                task.cancel()
            ended = await asyncio.gather(emptied, *others, return_exceptions=True)
        async with machine.busy:
            if machine.epoch != epoch:  # the server was killed before it had left
                return
            n_sessions = 0
            if isinstance(ended[0], BaseException) and not machine.is_stopped:
                n_sessions = await self._n_sessions(server, machine, epoch)
            machine.is_up = machine.is_leaving = False
            machine.epoch += 1
            machine.failed_at_s = self._nodes.now_s()
            if machine.is_stopped:
                await self._nodes.signal_server(server, signal.SIGKILL)
                machine.is_stopped = False
            else:
                self._nodes.notify_server(server, Stop())
            await machine.gone.wait()
        self.died(server)
        self._event("left", server, took_s=self._nodes.now_s() - began_at_s, n_sessions=n_sessions)

    async def _n_sessions(self, server: int, machine: _Machine, epoch: int) -> int:
        try:
            status = await self._nodes.ask_server(server, GetStatus())
        except ControlError:
            if machine.epoch == epoch and machine.is_up:
                raise
            return 0  # the server was killed meanwhile
        return status.n_sessions

    def _event(self, event: str, server: int, **details: Any) -> None:
        self._events.write(event, self._nodes.now_s(), server=self.names[server], **details)


WHY_NOT: dict[str, Callable[[_Machine], str | None]] = {
    "kill": lambda m: None if m.is_up else "is dead already",
    "stop": lambda m: "is dead" if not m.is_up else "is stopped already" if m.is_stopped else None,
    "cont": lambda m: "is dead" if not m.is_up else None if m.is_stopped else "is not stopped",
    "slow": lambda m: None if m.is_up else "is dead",
    "restart": lambda m: None if m.has_been else "has never been there: let it join",
    "join": lambda m: "has been there already: restart it" if m.has_been else None,
    "leave": lambda m: (
        "is dead"
        if not m.is_up
        else "is stopped and cannot drain"
        if m.is_stopped
        else "is leaving already"
        if m.is_leaving
        else None
    ),
}
"""By kind of fault: returns why it does not apply to a server now; ``None`` if it does."""


def _due(machine: _Machine, at_s: float | None) -> set[asyncio.Task[None]]:
    """Returns the tasks that end faults of ``machine`` by ``at_s`` and have not done so yet."""
    return set() if at_s is None else {task for task, ends_at_s in machine.ends.items() if ends_at_s <= at_s}


@contextlib.asynccontextmanager
async def _turn(machine: _Machine, at_s: float | None) -> AsyncIterator[None]:
    """Hold the machine's lock, after all faults that end by ``at_s`` have ended."""
    while True:
        while due := _due(machine, at_s):
            await asyncio.wait(due)
        async with machine.busy:
            if not _due(machine, at_s):  # else a fault that held the lock before has planned another end
                yield
                return


def _why_not(kind: str, machine: _Machine) -> str | None:
    return WHY_NOT[kind](machine)

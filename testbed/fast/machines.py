"""The scenario's faults in the fast engine. What each kind does is in ``testbed.faultkinds``, as for processes.

Nothing of a simulated server takes time but its sessions, so that the coroutines of a kind end at once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, cast

from nodes.admission import Admission
from nodes.messages import A, Drain, Message, Question
from policies.problem import BlockRange
from testbed.control.coordinator import Coordinator
from testbed.experiments.experiment import Experiment, Fault
from testbed.fast.events import EventQueue
from testbed.fast.outcome import Disturbed, ServerEvent
from testbed.fast.steps import Key
from testbed.faultkinds import KINDS, FaultKind
from testbed.records.events import (
    BY_SCENARIO,
    FaultHappened,
    Moved,
    RecoveryEvent,
    ServerBegun,
    ServerLeft,
)

T = TypeVar("T")


def _done(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    raise AssertionError("nothing of a simulated server takes time")


class _Server:
    """One server. See ``testbed.faultkinds.Machine``."""

    def __init__(self, server: int, name: str, is_there: bool, machines: Machines) -> None:
        self.server = server
        self.name = name
        self._machines = machines
        self.is_up = self.has_been = is_there
        self.is_stopped = self.is_leaving = False
        self.failed_at_s = -math.inf
        self.epoch = 0
        """How often it has ended."""
        self.n_applied: Counter[str] = Counter()
        self.leaves_at_s = 0.0
        """When it began to leave."""

    def now_s(self) -> float:
        return self._machines.queue.now_s

    async def signal(self, number: int) -> None:
        raise AssertionError(f"{self.name} is no process")

    async def ask(self, question: Question[A]) -> A:
        assert isinstance(question, Drain), f"{self.name} was asked {question}"
        self._machines.admissions[self.server].leave()
        return cast(A, None)

    def notify(self, message: Message) -> None:
        raise AssertionError(f"{self.name} was sent {message}")

    async def kill(self) -> None:
        self._machines.losing(self.server)
        self.end()
        self._machines.coordinator.membership.ends(self.server, self.now_s())

    def end(self) -> None:
        """Notes that it ends now."""
        self._machines.ending(self.server)
        self.is_up = self.is_leaving = False
        self.epoch += 1
        self.failed_at_s = self.now_s()

    async def begin(self, planned_at_s: float | None) -> None:
        self.is_up = True
        coordinator = self._machines.coordinator
        self._machines.begin(self.server)
        coordinator.membership.begins(self.server, self.now_s())
        coordinator.look()
        self._write(ServerBegun, planned_at_s=planned_at_s, blocks=self._blocks())

    def _blocks(self) -> BlockRange:
        return self._machines.coordinator.placement.ranges[self.server]

    def _write(self, event: type[ServerEvent], **details: Any) -> None:
        self._machines.events.append(event(at_s=self.now_s(), server=self.name, **details))

    def goes_away(self, *, is_said: bool = False) -> None:
        self._machines.coordinator.membership.ends(self.server, self.now_s(), is_said=is_said)

    def comes_back(self) -> None:
        raise AssertionError(f"{self.name} was never stopped")

    def choose_blocks(self) -> None:
        self._machines.coordinator.join(self.server)

    def joined(self, asked_at_s: float) -> None:
        times = dict.fromkeys(("decided_at_s", "closed_at_s", "drained_at_s"), asked_at_s)
        self._write(Moved, old=(0, 0), new=self._blocks(), **times, open_at_s=self.now_s())

    def drain(self) -> None:
        self.leaves_at_s = self.now_s()
        self._machines.drain(self)

    def left(self) -> None:
        """Notes that it has no session any more, and ends."""
        self.end()
        self._write(ServerLeft, took_s=self.now_s() - self.leaves_at_s, n_sessions=0)


class Machines:
    """Carries out faults on servers with these ``admissions``, and notifies the coordinator's membership.

    ``begin(server)`` lets a server serve again, with the coordinator's placement. ``losing(server)`` is called
    before a server ends by a kill, ``ending(server)`` whenever one ends. ``events`` are what ``events.jsonl`` has of
    faults and recoveries.
    """

    def __init__(
        self,
        experiment: Experiment,
        queue: EventQueue,
        coordinator: Coordinator,
        admissions: list[Admission[Key]],
        begin: Callable[[int], None],
        losing: Callable[[int], None],
        ending: Callable[[int], None],
    ) -> None:
        self.queue, self.coordinator, self.admissions = queue, coordinator, admissions
        self.begin, self.losing, self.ending = begin, losing, ending
        self.names = [server.name for server in experiment.problem.servers]
        self.events: list[ServerEvent | RecoveryEvent] = []
        self._give_up_s = experiment.faults.recovery.give_up_s
        self._servers = [
            _Server(j, server.name, j not in experiment.faults.absent, self)
            for j, server in enumerate(experiment.problem.servers)
        ]
        coming: deque[tuple[float, Callable[[], None]]] = deque()
        for at_s, _, fault in sorted((f.at_s, n, f) for n, f in enumerate(experiment.faults.planned)):
            assert at_s is not None, "a fault after a token is not carried out here"
            coming.append((at_s, partial(self._apply, fault, at_s)))
        if coming:
            queue.at(coming[0][0], queue.one_by_one, coming)

    def failed_at_s(self, server: int) -> float:
        """Returns when a server last ended; -inf if it never did."""
        return self._servers[server].failed_at_s

    def write(self, event: RecoveryEvent) -> None:
        """Adds what has happened to a session that lost its server."""
        self.events.append(event)

    def _apply(self, fault: Fault, at_s: float) -> None:
        kind, server = KINDS[fault.kind], self._servers[fault.server]
        why_not = kind.why_not(server)
        if why_not is None:
            _done(kind.apply(server, fault.factor))
        self.events.append(
            FaultHappened(
                at_s=self.queue.now_s,
                server=server.name,
                kind=fault.kind,
                planned_at_s=at_s,
                for_s=fault.for_s,
                applies=why_not is None,
                by=BY_SCENARIO,
            )
        )
        if why_not is not None:
            return
        server.n_applied[fault.kind] += 1
        _done(kind.follow(server, at_s))
        if fault.for_s is not None:
            undoing = kind, server, server.epoch, server.n_applied[fault.kind]
            self.queue.at(at_s + fault.for_s, self._undo, *undoing)

    def _undo(self, kind: FaultKind, server: _Server, epoch: int, number: int) -> None:
        """Ends the fault, unless the server has ended since or had another fault of the kind."""
        if server.epoch == epoch and server.n_applied[kind.name] == number:
            _done(kind.undo(server, self.queue.now_s))

    def drain(self, server: _Server) -> None:
        """Lets a server end once it has no session."""
        self.queue.at(server.leaves_at_s + self._give_up_s, self._overdue, server, server.epoch)
        self.released(server.server)

    def released(self, server: int) -> None:
        """Notes that a session has left ``server``."""
        machine = self._servers[server]
        if machine.is_leaving and not len(self.admissions[server].account):
            machine.left()

    def _overdue(self, server: _Server, epoch: int) -> None:
        if server.epoch == epoch:
            raise Disturbed(
                f"{server.name} cuts the sessions that have not ended {self._give_up_s:g} s after it began to leave"
            )

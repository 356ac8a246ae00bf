"""The servers' processes under faults: which are there, halted, slow; carries faults out at their instants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policies.membership import Membership
from testbed.experiment import Fault
from testbed.simulation.events import EventQueue
from testbed.simulation.record import Record


class Told(Protocol):
    """Who is told what happens to servers."""

    def killed(self, server: int) -> None:
        """Its process is gone, with all caches."""
        ...

    def begun(self, server: int) -> None:
        """A process that had ended is there again and holds its blocks."""
        ...

    def joined(self, server: int) -> None:
        """It is there for the first time and chooses its blocks."""
        ...

    def leaves(self, server: int) -> None:
        """It takes no new sessions."""
        ...

    def n_sessions(self, server: int) -> int:
        """How many sessions it holds."""
        ...


@dataclass(slots=True)
class _Machine:
    """``epoch`` counts its deaths, the numbers the stops and slow-downs that it has had."""

    is_up: bool = True
    has_been: bool = True
    is_stopped: bool = False
    is_leaving: bool = False
    epoch: int = 0
    died_at_s: float = -math.inf
    halted_at_s: float = -math.inf
    leaves_at_s: float = -math.inf
    factor: float = 1.0
    n_stops: int = 0
    n_slow: int = 0
    n_cuts: int = 0
    postponed: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    """What reached it while it was halted."""


class Machines:
    """Carries out ``faults`` and tells ``told`` and ``membership`` of them.

    One that leaves waits for its sessions for ``most_drain_s``. A fault that finds nothing to do (a kill of a server that is gone) does nothing, and nothing happens
    at its end. A process that begins anew is as fast as at first.
    """

    def __init__(
        self,
        names: Sequence[str],
        faults: Sequence[Fault],
        absent: frozenset[int],
        membership: Membership,
        queue: EventQueue,
        record: Record,
        told: Told,
        most_drain_s: float,
    ) -> None:
        self._most_drain_s = most_drain_s
        self._names = names
        self._membership = membership
        self._queue = queue
        self._record = record
        self._told = told
        self._machines = [
            _Machine(is_up=j not in absent, has_been=j not in absent) for j in range(len(names))
        ]
        self._n_to_come = 0
        self._after: dict[int, list[Fault]] = {}
        for fault in faults:
            if fault.after is not None:
                self._after.setdefault(fault.after.request, []).append(fault)
            elif fault.at_s is not None:
                self._n_to_come += 1
                queue.at(fault.at_s, self._due, self._befall, (fault,))

    @property
    def may_change(self) -> bool:
        """Whether anything is still to happen to servers."""
        return self._n_to_come > 0 or bool(self._after)

    def is_up(self, server: int) -> bool:
        return self._machines[server].is_up

    def epoch(self, server: int) -> int:
        """Changes when the process ends or cuts its sessions: what held of an earlier one is gone."""
        machine = self._machines[server]
        return machine.epoch + machine.n_cuts

    def died_at_s(self, server: int) -> float:
        return self._machines[server].died_at_s

    def failed_at_s(self, server: int) -> float:
        """When it last died, cut its sessions, or was halted."""
        machine = self._machines[server]
        return max(machine.died_at_s, machine.halted_at_s)

    def is_halted(self, server: int) -> bool:
        return self._machines[server].is_stopped

    def factor(self, server: int) -> float:
        return self._machines[server].factor

    def waits(self, server: int, call: Callable[..., None], *args: Any) -> bool:
        """Whether ``server`` is halted; if so, ``call(*args)`` comes when it goes on, if ever."""
        machine = self._machines[server]
        if machine.is_stopped:
            machine.postponed.append((call, args))
        return machine.is_stopped

    def token(self, request: int, n_tokens: int) -> None:
        """``request`` has ``n_tokens`` output tokens now."""
        if request not in self._after:
            return
        later = []
        for fault in self._after.pop(request):
            assert fault.after is not None
            if fault.after.tokens <= n_tokens:
                self._befall(fault)
            else:
                later.append(fault)
        if later:
            self._after[request] = later

    def ended(self, request: int) -> None:
        """``request`` has ended: what waits for its tokens never happens."""
        self._after.pop(request, None)

    def released(self, server: int) -> None:
        """``server`` holds no session any more."""
        machine = self._machines[server]
        if machine.is_leaving:
            self._left(server, machine, 0)
            self._die(machine)

    def cut(self, server: int) -> None:
        """``server`` has dropped its sessions, as if its process had ended and begun again."""
        machine = self._machines[server]
        machine.n_cuts += 1
        machine.died_at_s = self._queue.now_s

    def _plan_end(self, fault: Fault, call: Callable[..., None], *args: Any) -> None:
        """``call`` at the end of ``fault``, before anything that begins at that instant."""
        if fault.for_s is not None:
            self._n_to_come += 1
            self._queue.free_at(self._queue.now_s + fault.for_s, self._due, call, args)

    def _due(self, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._n_to_come -= 1
        call(*args)

    def _befall(self, fault: Fault) -> None:
        server, machine = fault.server, self._machines[fault.server]
        is_running = machine.is_up and not machine.is_stopped
        applies = {
            "kill": machine.is_up,
            "stop": is_running,
            "slow": machine.is_up,
            "restart": machine.has_been,
            "join": not machine.is_up and not machine.has_been,
            "leave": is_running and not machine.is_leaving,
        }[fault.kind]
        details: dict[str, Any] = {"factor": fault.factor} if fault.kind == "slow" else {}
        self._event(
            "fault",
            fault.kind,
            server,
            planned_at_s=fault.at_s,
            for_s=fault.for_s,
            applies=applies,
            **details,
        )
        if applies:
            getattr(self, f"_{fault.kind}")(server, machine, fault)

    def _kill(self, server: int, machine: _Machine, fault: Fault) -> None:
        self._end(server, machine)
        self._plan_end(fault, self._revive, server, machine.epoch)

    def _revive(self, server: int, epoch: int) -> None:
        machine = self._machines[server]
        if not machine.is_up and machine.epoch == epoch:
            self._begin(server, machine)

    def _restart(self, server: int, machine: _Machine, fault: Fault) -> None:
        if machine.is_up:
            self._end(server, machine)
        self._begin(server, machine)

    def _join(self, server: int, machine: _Machine, fault: Fault) -> None:
        machine.is_up = machine.has_been = True
        self._told.joined(server)
        self._membership.begins(server, self._queue.now_s)

    def _leave(self, server: int, machine: _Machine, fault: Fault) -> None:
        machine.is_leaving = True
        now_s = self._queue.now_s
        self._membership.ends(server, now_s, is_said=True)
        self._told.leaves(server)
        machine.leaves_at_s = now_s
        if self._told.n_sessions(server):
            self._n_to_come += 1
            at_s = now_s + self._most_drain_s
            self._queue.at(at_s, self._due, self._cut_off, (server, machine.epoch))
        else:
            self.released(server)

    def _cut_off(self, server: int, epoch: int) -> None:
        """It has waited long enough for its sessions: they go on elsewhere."""
        machine = self._machines[server]
        if machine.epoch == epoch:
            self._left(server, machine, self._told.n_sessions(server))
            self._end(server, machine)

    def _left(self, server: int, machine: _Machine, n_sessions: int) -> None:
        now_s, name = self._queue.now_s, self._names[server]
        self._record.event(
            "left", now_s, server=name, took_s=now_s - machine.leaves_at_s, n_sessions=n_sessions
        )

    def _stop(self, server: int, machine: _Machine, fault: Fault) -> None:
        machine.is_stopped = True
        machine.halted_at_s = self._queue.now_s
        machine.n_stops += 1
        self._membership.ends(server, self._queue.now_s)
        self._plan_end(fault, self._go_on, server, machine.epoch, machine.n_stops)

    def _go_on(self, server: int, epoch: int, n_stops: int) -> None:
        machine = self._machines[server]
        if machine.is_stopped and (machine.epoch, machine.n_stops) == (epoch, n_stops):
            self._event("fault-over", "stop", server)
            machine.is_stopped = False
            if not machine.is_leaving:
                self._membership.goes_on(server, self._queue.now_s)
            postponed, machine.postponed = machine.postponed, []
            for call, args in postponed:
                call(*args)

    def _slow(self, server: int, machine: _Machine, fault: Fault) -> None:
        machine.factor = fault.factor
        machine.n_slow += 1
        self._plan_end(fault, self._quicken, server, machine.epoch, machine.n_slow)

    def _quicken(self, server: int, epoch: int, n_slow: int) -> None:
        machine = self._machines[server]
        if (machine.epoch, machine.n_slow) == (epoch, n_slow):
            self._event("fault-over", "slow", server)
            machine.factor = 1.0

    def _begin(self, server: int, machine: _Machine) -> None:
        machine.is_up = True
        self._membership.begins(server, self._queue.now_s)
        self._told.begun(server)

    def _end(self, server: int, machine: _Machine) -> None:
        self._die(machine)
        self._membership.ends(server, self._queue.now_s)
        self._told.killed(server)

    def _die(self, machine: _Machine) -> None:
        machine.is_up = machine.is_stopped = machine.is_leaving = False
        machine.epoch += 1
        machine.died_at_s = self._queue.now_s
        machine.factor = 1.0
        machine.postponed.clear()

    def _event(self, event: str, kind: str, server: int, **details: Any) -> None:
        self._record.event(event, self._queue.now_s, kind=kind, server=self._names[server], **details)

"""The kinds of fault: each is one class, and ``KINDS`` lists them.

Values of a scenario's keys, choices of ``testbed fault``, buttons and colours of the page, and what readers of
``events.jsonl`` make of a fault follow from here. ``testbed.control.faults.machines`` carries faults out. The command line imports this module,
so it imports nothing heavy.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from nodes.messages import A, Message, Question

State = Literal["absent", "joining", "online", "draining", "halted", "dead"]
"""What a server is, as the page shows it."""


class Machine(Protocol):
    """A server's process, as a kind of fault sees it. Its coroutines raise ``RunError`` and ``ControlError``."""

    is_up: bool
    has_been: bool
    """False until a server that was absent at the start has joined."""
    is_stopped: bool
    is_leaving: bool
    failed_at_s: float
    """When it last ended or was stopped; -inf if it never did."""

    def now_s(self) -> float: ...

    async def signal(self, number: int) -> None:
        """Send a signal to the process."""
        ...

    async def ask(self, question: Question[A]) -> A:
        """Send a question to the process; return its answer."""
        ...

    def notify(self, message: Message) -> None:
        """Send a message to the process; it need not read it now."""
        ...

    async def kill(self) -> None:
        """End the process. Returns when it has ended."""
        ...

    async def begin(self, planned_at_s: float | None) -> None:
        """Start the process with the present placement. Returns when it serves; writes the event ``begun``."""
        ...

    def goes_away(self, *, is_said: bool = False) -> None:
        """Note in the membership that it is away from now on; ``is_said``: it announces that itself."""
        ...

    def comes_back(self) -> None:
        """Note in the membership that it is there again, with the caches that it had."""
        ...

    def choose_blocks(self) -> None:
        """Let a server that joins choose the blocks that it will hold."""
        ...

    def joined(self, asked_at_s: float) -> None:
        """Write the event of a server that has joined: a move from no blocks."""
        ...

    def drain(self) -> None:
        """In the background, wait for its sessions as long as the scenario allows, and end the process."""
        ...


class FaultKind(ABC):
    """What can happen to a server.

    ``name`` is its name everywhere; ``what`` one sentence without its full stop, for people.
    """

    name: ClassVar[str]
    what: ClassVar[str]
    state: ClassVar[State | None] = None
    """The server's state from then on; ``None``: as before."""
    can_end: ClassVar[bool] = False
    """It may have a duration (``for``), after which it is undone."""
    undone_by: ClassVar[str] = ""
    """The kind of fault that ends it after ``for``, where it has no end of its own."""
    has_factor: ClassVar[bool] = False
    """It needs a ``factor``, by which it multiplies the server's compute times."""
    only_by_hand: ClassVar[bool] = False
    """It ends a fault. Scenarios use that fault's duration, and it is not counted as a fault."""

    @property
    def takes_away(self) -> bool:
        """Whether the server is down from then on, until it has begun again or the fault is over."""
        return self.state in ("dead", "halted", "draining")

    @property
    def is_bad(self) -> bool:
        """Whether the server does less from then on, which colours show."""
        return self.state not in ("online", "joining")

    @abstractmethod
    def why_not(self, machine: Machine) -> str | None:
        """Return why it does not apply to the server now, to follow its name; ``None`` if it does."""

    @abstractmethod
    async def apply(self, machine: Machine, factor: float) -> None:
        """Carry it out."""

    async def follow(  # noqa: B027 - not abstract: most kinds do nothing
        self, machine: Machine, planned_at_s: float | None
    ) -> None:
        """Do what comes after the line of the fault in ``events.jsonl``: nothing, for most kinds."""

    async def undo(self, machine: Machine, planned_at_s: float) -> bool:
        """End it, if it still lasts; return whether that must be written as ``fault-over``.

        It is called only if the process is the same, and no other fault of this kind has come since.
        """
        raise NotImplementedError(f"{self.name} has no end")


class Kill(FaultKind):
    name = "kill"
    what = "Ends the process; its caches are lost"
    state = "dead"
    can_end = True

    def why_not(self, machine: Machine) -> str | None:
        return None if machine.is_up else "is dead already"

    async def apply(self, machine: Machine, factor: float) -> None:
        await machine.kill()

    async def undo(self, machine: Machine, planned_at_s: float) -> bool:
        if not machine.is_up:
            await machine.begin(planned_at_s)
        return False  # there is the event ``begun``


class Stop(FaultKind):
    name = "stop"
    what = "Halts the process; it does not respond"
    state = "halted"
    can_end = True

    def why_not(self, machine: Machine) -> str | None:
        return "is dead" if not machine.is_up else "is stopped already" if machine.is_stopped else None

    async def apply(self, machine: Machine, factor: float) -> None:
        failed_at_s = machine.now_s()
        await machine.signal(signal.SIGSTOP)
        machine.is_stopped = True
        machine.failed_at_s = failed_at_s
        # Not failed_at_s: in real time other servers may have ended meanwhile; membership needs the order.
        machine.goes_away()

    async def undo(self, machine: Machine, planned_at_s: float) -> bool:
        if not machine.is_stopped:
            return False
        await _let_continue(machine)
        return True


class Cont(FaultKind):
    name = "cont"
    what = "Lets a stopped server continue"
    state = "online"
    only_by_hand = True

    def why_not(self, machine: Machine) -> str | None:
        return "is dead" if not machine.is_up else None if machine.is_stopped else "is not stopped"

    async def apply(self, machine: Machine, factor: float) -> None:
        await _let_continue(machine)


class SlowDown(FaultKind):
    name = "slow"
    what = "Makes every step take this many times as long"
    can_end = True
    has_factor = True

    def why_not(self, machine: Machine) -> str | None:
        return None if machine.is_up else "is dead"

    async def apply(self, machine: Machine, factor: float) -> None:
        from nodes.messages import Slow

        if machine.is_stopped:  # the process reads the message when it goes on
            machine.notify(Slow(factor))
        else:
            await machine.ask(Slow(factor))

    async def undo(self, machine: Machine, planned_at_s: float) -> bool:
        if machine.is_up:
            await self.apply(machine, 1.0)
        return machine.is_up


class Restart(FaultKind):
    name = "restart"
    what = "Ends the process and starts it again"
    state = "dead"

    def why_not(self, machine: Machine) -> str | None:
        return None if machine.has_been else "has never been there: let it join"

    async def apply(self, machine: Machine, factor: float) -> None:
        if machine.is_up:
            await machine.kill()

    async def follow(self, machine: Machine, planned_at_s: float | None) -> None:
        await machine.begin(planned_at_s)


class Join(FaultKind):
    """Only for servers that are absent at the start (``present = false``), which hold nothing until then."""

    name = "join"
    what = "Starts a server that is absent"
    state = "joining"
    undone_by = "leave"

    def why_not(self, machine: Machine) -> str | None:
        return "has been there already: restart it" if machine.has_been else None

    async def apply(self, machine: Machine, factor: float) -> None:
        machine.has_been = True
        machine.choose_blocks()

    async def follow(self, machine: Machine, planned_at_s: float | None) -> None:
        asked_at_s = machine.now_s()
        await machine.begin(planned_at_s)
        machine.joined(asked_at_s)


class Leave(FaultKind):
    name = "leave"
    what = "Accepts no new sessions, lets its sessions finish, and ends"
    state = "draining"
    undone_by = "restart"

    def why_not(self, machine: Machine) -> str | None:
        if not machine.is_up:
            return "is dead"
        if machine.is_stopped:
            return "is stopped and cannot drain"
        return "is leaving already" if machine.is_leaving else None

    async def apply(self, machine: Machine, factor: float) -> None:
        from nodes.messages import Drain

        machine.is_leaving = True
        machine.goes_away(is_said=True)
        await machine.ask(Drain())

    async def follow(self, machine: Machine, planned_at_s: float | None) -> None:
        machine.drain()


async def _let_continue(machine: Machine) -> None:
    await machine.signal(signal.SIGCONT)
    machine.is_stopped = False
    if not machine.is_leaving:
        machine.comes_back()


KINDS: Mapping[str, FaultKind] = {
    kind.name: kind for kind in (Kill(), Stop(), Cont(), SlowDown(), Restart(), Join(), Leave())
}
"""By name, in the order in which they are listed everywhere."""


def any_of(names: Iterable[str]) -> str:
    """Return names for a sentence: "a, b or c"."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


DIED = "died"
"""The kind, in ``events.jsonl``, of a server whose process ended by itself; nobody can cause it."""
IN_FILES = tuple(kind.name for kind in KINDS.values() if not kind.only_by_hand)
"""Values of ``kind`` in ``[[fault]]``."""
IN_CHURN = tuple(kind.name for kind in KINDS.values() if kind.takes_away and kind.can_end)
"""Values of ``kind`` in ``[churn]``: failures that a repair ends."""

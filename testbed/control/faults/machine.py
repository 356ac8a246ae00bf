"""A server's process: what kinds of fault (``testbed.faultkinds``) do with it, and what is noted about it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from nodes.clock import RunClock
from nodes.control import ControlError
from nodes.messages import A, GetStatus, Message, Question, Stop, WaitUntilEmpty
from policies.problem import BlockRange
from testbed.control.coordinator import Coordinator
from testbed.errors import RunError, TestbedError
from testbed.records.events import EventWriter, FaultEvent, Moved, ServerBegun, ServerLeft

NEWS_S = 2.0
"""Event-loop seconds, real or virtual, within which the launcher reports a process that has ended."""
ServerEvent = FaultEvent | ServerLeft | Moved
InBackground = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


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


class ServerProcess:
    """See ``testbed.faultkinds.Machine``. ``server`` is its number.

    ``died`` is called when the process has ended for any reason. ``give_up_s``: how long a server that leaves
    waits for its sessions.
    """

    def __init__(
        self,
        server: int,
        name: str,
        is_there: bool,
        nodes: Nodes,
        coordinator: Coordinator,
        events: EventWriter,
        died: Callable[[int], None],
        in_background: InBackground,
        give_up_s: float,
    ) -> None:
        self.server = server
        self.name = name
        self._nodes = nodes
        self._coordinator = coordinator
        self._events = events
        self._died = died
        self._in_background = in_background
        self._give_up_s = give_up_s
        self.is_up = is_there
        self.has_been = is_there
        self.is_stopped = False
        self.is_leaving = False
        self.failed_at_s = -math.inf
        self.epoch = 0
        """How often the process has ended."""
        self.n_applied: Counter[str] = Counter()
        """How many faults it has had, by kind."""
        self.busy = asyncio.Lock()
        self.gone = asyncio.Event()
        self.ends: dict[asyncio.Task[None], float] = {}
        """Tasks that end faults, with the instants for which they are planned."""

    def now_s(self) -> float:
        return self._nodes.now_s()

    def write(self, event: type[ServerEvent], **details: Any) -> None:
        """Write an event of the server, with the present instant."""
        self._events.write(event(at_s=self.now_s(), server=self.name, **details))

    async def signal(self, number: int) -> None:
        await self._nodes.signal_server(self.server, number)

    async def ask(self, question: Question[A]) -> A:
        """See ``Machine.ask``. When it raises because the process has ended, that is noted already."""
        try:
            return await self._nodes.ask_server(self.server, question)
        except ControlError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(NEWS_S):
                    await self.gone.wait()
            raise

    def notify(self, message: Message) -> None:
        self._nodes.notify_server(self.server, message)

    def goes_away(self, *, is_said: bool = False) -> None:
        self._coordinator.membership.ends(self.server, self.now_s(), is_said=is_said)

    def comes_back(self) -> None:
        self._coordinator.membership.goes_on(self.server, self.now_s())
        self._coordinator.look()

    def choose_blocks(self) -> None:
        self._coordinator.join(self.server)

    def dies(self) -> None:
        """Note that the process ends now."""
        now_s = self.now_s()
        self.is_up = self.is_stopped = self.is_leaving = False
        self.epoch += 1
        self.failed_at_s = now_s
        self._coordinator.membership.ends(self.server, now_s)
        self._died(self.server)

    async def kill(self) -> None:
        self.dies()  # first, so that its end is not taken for a failure of the run
        if not self.gone.is_set():
            await self.signal(signal.SIGKILL)
            await self.gone.wait()

    async def begin(self, planned_at_s: float | None) -> None:
        self.gone.clear()
        beginning = asyncio.ensure_future(self._nodes.begin_server(self.server))
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            await asyncio.wait({beginning, gone}, return_when=asyncio.FIRST_COMPLETED)
            if self.gone.is_set():
                raise RunError(f"{self.name} ended as it began; its log has the reason")
            beginning.result()
        finally:
            beginning.cancel()
            gone.cancel()
        self.is_up = True
        self._coordinator.membership.begins(self.server, self.now_s())
        self._coordinator.look()
        self.write(ServerBegun, planned_at_s=planned_at_s, blocks=self._blocks())

    def _blocks(self) -> BlockRange:
        return self._coordinator.placement.ranges[self.server]

    def joined(self, asked_at_s: float) -> None:
        times = dict.fromkeys(("decided_at_s", "closed_at_s", "drained_at_s"), asked_at_s)
        self.write(Moved, old=(0, 0), new=self._blocks(), **times, open_at_s=self.now_s())

    def drain(self) -> None:
        self._in_background(self._drain())

    async def _drain(self) -> None:
        """Wait until the leaving server has no session, at most ``give_up_s``, then end its process.

        Sessions that are left are replayed elsewhere.
        """
        epoch, began_at_s = self.epoch, self.now_s()
        emptied = asyncio.ensure_future(self.ask(WaitUntilEmpty()))
        others = [
            asyncio.ensure_future(self.gone.wait()),
            asyncio.ensure_future(self._nodes.clock.sleep_until_s(began_at_s + self._give_up_s)),
        ]
        try:
            await asyncio.wait((emptied, *others), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (emptied, *others):
                task.cancel()
            ended = await asyncio.gather(emptied, *others, return_exceptions=True)
        async with self.busy:
            if self.epoch != epoch:  # the server was killed before it had left
                return
            n_sessions = 0
            if isinstance(ended[0], BaseException) and not self.is_stopped:
                try:
                    n_sessions = (await self.ask(GetStatus())).n_sessions
                except ControlError:
                    if self.epoch == epoch:
                        raise
                    return
            self.is_up = self.is_leaving = False
            self.epoch += 1
            self.failed_at_s = self.now_s()
            if self.is_stopped:
                await self.signal(signal.SIGKILL)
                self.is_stopped = False
            else:
                with contextlib.suppress(ControlError):  # it has just died
                    self.notify(Stop())
            await self.gone.wait()
        self._died(self.server)
        self.write(ServerLeft, took_s=self.now_s() - began_at_s, n_sessions=n_sessions)

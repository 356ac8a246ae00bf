"""Moves an emulation's servers: runs ``testbed.control.mover`` under the run's clock, with its nodes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

from nodes.control import ControlError
from nodes.messages import Rehost
from nodes.records import ENDED, Arrived, States
from policies.online import OnlinePolicy
from testbed.control.coordinator import Coordinator
from testbed.control.faults.machine import NEWS_S, Nodes
from testbed.control.guarded import guarded
from testbed.control.mover import Mover, ServerMove
from testbed.errors import RunError
from testbed.experiments.experiment import Experiment
from testbed.records.events import EventWriter


class Moves:
    """Checks at the controller's times, and has nodes change their blocks. A ``testbed.control.mover.MoveExecutor``.

    With ``has_real_blocks`` loading takes its real time; otherwise nodes wait for the modelled time.
    """

    def __init__(
        self,
        experiment: Experiment,
        policy: OnlinePolicy,
        nodes: Nodes,
        coordinator: Coordinator,
        events: EventWriter,
        has_real_blocks: bool,
    ) -> None:
        self._problem = experiment.problem
        self._nodes = nodes
        self._membership = coordinator.membership
        self._has_real_blocks = has_real_blocks
        self._tasks: set[asyncio.Task[None]] = set()
        self.mover = Mover(
            experiment,
            policy,
            coordinator,
            self,
            nodes.now_s,
            events.write,
        )

    def begin(self) -> None:
        """Begin to check; called when scenario time begins."""
        self._start(self._check_at_times())

    async def end(self) -> None:
        """Cancel all moves. May be called at any time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def state(self, record: States) -> None:
        """Count a request that has arrived or ended, by a client's record."""
        if isinstance(record, Arrived):
            self.mover.load.arrive(self._nodes.now_s())
        elif isinstance(record, ENDED):
            self.mover.load.end(self._nodes.now_s())

    def phase(self, server: int, phase: str, at_s: float) -> None:
        """Note a server's phase: see ``nodes.moving``."""
        if phase == "loading":
            self.mover.drained(server, at_s)

    def rehost(self, move: ServerMove) -> None:
        self._start(self._move(move))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = guarded(work, self._nodes.broke)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _check_at_times(self) -> None:
        while (at_s := self.mover.next_check_at_s()) < math.inf:
            await self._nodes.clock.sleep_until_s(at_s)
            self.mover.check()

    async def _move(self, move: ServerMove) -> None:
        load_s = 0.0 if self._has_real_blocks else move.load_s
        try:
            rehost = Rehost(move.new.first, move.new.last, move.new_bytes, move.drain_s, load_s)
            done = await self._nodes.ask_server(move.server, rehost)
        except ControlError as error:
            await self._lost(move, error)
        else:
            self.mover.completed(move, done.closed_at_s, done.drained_at_s, done.open_at_s, done.n_cut)

    async def _lost(self, move: ServerMove, error: ControlError) -> None:
        """Handle a move whose server does not answer: it has died, which is known or will soon be reported.

        Raises ``RunError`` if the server is alive after all.
        """
        if move.server in self._membership.alive():
            await asyncio.sleep(NEWS_S)
        if not self.mover.is_under_way(move):
            return
        if move.server in self._membership.alive():
            raise RunError(f"{self._problem.servers[move.server].name} could not change its blocks: {error}")
        self.mover.server_died(move.server)

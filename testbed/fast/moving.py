"""Moves servers to other blocks, as an online policy decides; they must let sessions drain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nodes.admission import Admission
from nodes.clock import NS, nanoseconds
from policies.online import OnlinePolicy
from testbed.control.coordinator import Coordinator
from testbed.control.mover import Mover, ServerMove
from testbed.experiments.experiment import Experiment
from testbed.fast.events import EventQueue
from testbed.fast.outcome import Disturbed
from testbed.fast.steps import Key
from testbed.records.events import AnyEvent, Moved
from testbed.records.summary import MoveRow


class Moving:
    """Carries out the moves of servers with these ``admissions``. ``rows`` are those that have ended."""

    def __init__(
        self,
        experiment: Experiment,
        online: OnlinePolicy,
        queue: EventQueue,
        coordinator: Coordinator,
        admissions: Sequence[Admission[Key]],
    ) -> None:
        self._names = [server.name for server in experiment.problem.servers]
        self._queue, self._admissions = queue, admissions
        self.rows: list[MoveRow] = []
        self._draining: dict[int, tuple[ServerMove, float]] = {}
        self._mover = Mover(experiment, online, coordinator, self, lambda: queue.now_s, self._note)
        self.load = self._mover.load
        self._plan_check()

    def _plan_check(self) -> None:
        at_s = self._mover.next_check_at_s()
        if at_s < math.inf:
            never_early_at_s = nanoseconds(at_s) / NS  # or the policy would want the same check again
            self._queue.at(never_early_at_s, self._check)

    def _check(self) -> None:
        self._mover.check()
        self._plan_check()

    def rehost(self, move: ServerMove) -> None:
        """As ``testbed.control.mover.MoveExecutor``."""
        now_s, server = self._queue.now_s, move.server
        room_bytes = self._admissions[server].hosted.cache_bytes
        self._admissions[server].offer(move.stays.first, move.stays.last, min(move.new_bytes, room_bytes))
        self._draining[server] = move, now_s
        assert move.drain_s is not None
        self._queue.at(now_s + move.drain_s, self._overdue, move)
        self.released(server)

    def released(self, server: int) -> None:
        """Notes that ``server`` may have lost a session: it loads if it was the last one that had to leave."""
        if server in self._draining and not self._admissions[server].leaving():
            move, closed_at_s = self._draining.pop(server)
            now_s = self._queue.now_s
            self._mover.drained(server, now_s)
            self._queue.at(now_s + move.load_s, self._loaded, move, closed_at_s, now_s)

    def _overdue(self, move: ServerMove) -> None:
        if self._draining.get(move.server, (None, 0.0))[0] is move:
            raise Disturbed(
                f"{self._names[move.server]} cuts the sessions that have not ended {move.drain_s:g} s after it began to move"
            )

    def _loaded(self, move: ServerMove, closed_at_s: float, drained_at_s: float) -> None:
        self._admissions[move.server].offer(move.new.first, move.new.last, move.new_bytes)
        self._mover.completed(move, closed_at_s, drained_at_s, self._queue.now_s, 0)

    def _note(self, event: AnyEvent) -> None:
        if isinstance(event, Moved):
            self.rows.append(event.row(self._names))

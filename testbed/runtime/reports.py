"""Carries out what the nodes of a run ask for, and notes what they report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from nodes import control, messages, records
from nodes.clock import Clock
from nodes.records import (
    ENDED,
    Arrived,
    Cancelled,
    Completed,
    Failed,
    Interrupted,
    Plan,
    Preempted,
    Rejected,
    Released,
    Resumed,
    Reused,
)
from policies.problem import PolicyError, Route
from testbed.control.coordinator import Coordinator
from testbed.control.faults.emulated import Faults
from testbed.control.moves import Moves
from testbed.control.placing import PolicyInterrupted
from testbed.errors import TestbedError, UserError
from testbed.records import events
from testbed.records.events import EventWriter
from testbed.runtime.progress import Progress
from testbed.runtime.setup import RunSetup


class Reports:
    """The orchestrator's end of the nodes' control connections. ``give_up`` breaks the run with an error."""

    def __init__(
        self,
        setup: RunSetup,
        coordinator: Coordinator,
        faults: Faults,
        moves: Moves | None,
        clock: Clock,
        events: EventWriter,
        progress: Progress,
        give_up: Callable[[TestbedError], None],
    ) -> None:
        self._experiment = setup.experiment
        self._stage = setup.stage
        self._guests = setup.guests
        self._coordinator = coordinator
        self._faults = faults
        self._moves = moves
        self._clock = clock
        self._events = events
        self._progress = progress
        self._give_up = give_up
        prefix = self._experiment.compute.prefix
        self._following = {
            plan.turn.after: plan.index
            for plan in self._experiment.workload.requests
            if prefix is not None and prefix.kind == "session"
            if plan.turn is not None and plan.turn.after is not None
        }
        """The next turn of requests whose chain stays open for it."""
        self.done: dict[str, str] = {}
        """Clients whose workload has ended, with the reason if it failed."""
        self.all_done = asyncio.Event()
        """Set when the workload of every client has ended."""

    def handlers(self) -> control.Handlers:
        """Return the handlers of the nodes' messages."""
        return {
            messages.CannotStart: self._on_cannot_start,
            messages.GetRoute: self._on_route,
            messages.GetReplacement: self._on_reroute,
            messages.Recorded: self._on_record,
            messages.NewToken: self._on_token,
            messages.Progress: self._on_progress,
            messages.Done: self._on_done,
            messages.Phase: self._on_phase,
        }

    async def _on_cannot_start(self, message: messages.CannotStart) -> None:
        self._give_up(UserError(f"{message.name}: {message.reason}"))

    async def _on_route(self, asked: messages.GetRoute) -> Plan | None:
        told: asyncio.Future[Plan | None] = asyncio.get_running_loop().create_future()
        asked_at_s = self._clock.now_s()

        def tell(plan: Plan | None) -> None:
            if not told.done():
                told.set_result(plan)

        def answer(found: Route | PolicyError | None) -> None:
            if self._experiment.policy.queue is None:
                tell(self._plan(asked.request, found, 0.0))
            else:  # one look may let several in: in virtual time each is done with before the next one is told
                plan = self._plan(asked.request, found, self._clock.now_s() - asked_at_s)
                asyncio.get_running_loop().call_later(0.0, tell, plan)

        self._coordinator.ask(asked.request, answer, asked.n_done)
        return await told

    async def _on_reroute(self, asked: messages.GetReplacement) -> Plan | None:
        try:
            found: Route | PolicyError | None = self._coordinator.reroute(*msgspec.structs.astuple(asked))
        except PolicyError as error:
            found = error
        return self._plan(asked.request, found, 0.0)

    def _plan(self, index: int, found: Route | PolicyError | None, queued_s: float) -> Plan | None:
        """Return the chain that a client opens; ``None`` if there is none.

        The decision's duration is 0 in virtual time: the record of a run must not depend on the machine.
        """
        # An interrupted policy is no error: the run is ending already.
        if isinstance(found, PolicyError) and not isinstance(found, PolicyInterrupted):
            self._give_up(UserError(f"request {index}: {found}"))
        if not isinstance(found, Route):
            return None
        decision_s = 0.0 if self._stage.is_virtual else self._coordinator.decisions_s[-1]
        round_s = self._coordinator.round_times_s(index, found.hops)
        return Plan(list(found.hops), found.wait_s, decision_s, queued_s, found.cost_s, round_s)

    async def _on_record(self, message: messages.Recorded) -> None:
        record = message.record
        if isinstance(record, records.Recoveries):
            self._faults.notify(record)
            return
        if isinstance(record, Released):
            self._coordinator.release(record.request)
            return
        if isinstance(record, Reused):
            if self._guests is not None:
                self._guests.recorded(record)
            return
        self._progress.notify(record.request, record.kind)
        if self._moves is not None:
            self._moves.state(record)
        if isinstance(record, Arrived):
            self._coordinator.arrives(record.request, record.intended_at_s)
        if isinstance(record, Completed | Failed) and message.times is not None:
            has_failed = isinstance(record, Failed)
            self._coordinator.ended(record.request, message.times, record.at_s, has_failed=has_failed)
        if isinstance(record, Completed):
            self._coordinator.completed(record.request)
        following = self._following.get(record.request)
        if isinstance(record, Completed) and following is not None:
            self._coordinator.hands_over(record.request, following)
        elif isinstance(record, (*ENDED, Rejected, Preempted)):
            self._coordinator.release(record.request)
        if isinstance(record, ENDED):
            self._faults.ended(record.request)
        if (event := self._event_of(record)) is not None:
            self._events.write(event)
        if self._guests is not None:
            self._guests.recorded(record)

    def _event_of(self, record: records.States) -> events.AnyEvent | None:
        """Return the event that stands for a client's record in ``events.jsonl``; None if none does."""
        at_s, request = record.at_s, record.request
        match record:
            case Failed():
                return events.RequestFailed(at_s=at_s, request=request)
            case Rejected():
                return events.RequestRejected(at_s=at_s, request=request)
            case Cancelled():
                return events.RequestCancelled(at_s=at_s, request=request)
            case Interrupted():
                return events.Interrupted(at_s=at_s, request=request)
            case Preempted(server=number, tokens=tokens):
                server = self._experiment.problem.servers[number].name
                return events.RequestPreempted(at_s=at_s, request=request, server=server, tokens=tokens)
            case Resumed(tokens=tokens):
                return events.RequestResumed(at_s=at_s, request=request, tokens=tokens)
        return None

    async def _on_token(self, message: messages.NewToken) -> None:
        self._faults.token(message.request, message.n_tokens)
        if self._guests is not None:
            self._guests.token(message)

    async def _on_phase(self, message: messages.Phase) -> None:
        if self._moves is not None:
            numbers = {spec.name: number for number, spec in enumerate(self._experiment.problem.servers)}
            self._moves.phase(numbers[message.server], message.phase, message.at_s)

    async def _on_progress(self, message: messages.Progress) -> None:
        self._progress.n_tokens[message.client] = message.n_tokens
        self._progress.ttft_s, self._progress.gap_s = message.ttft_s, message.gap_s
        self._progress.scenario_s = self._clock.now_s()

    async def _on_done(self, message: messages.Done) -> None:
        self.done[message.client] = message.failure
        if self._guests is not None or len(self.done) == len(self._experiment.problem.clients):
            self.all_done.set()

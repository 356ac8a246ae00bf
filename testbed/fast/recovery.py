"""Lets sessions whose servers are killed go on elsewhere, with the clients' own code (``nodes.recovery``).

That code is coroutines. Here they wait for events of the queue instead of asyncio's.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

from nodes.admission import Admission, Need, name_of_attempt
from nodes.chain import Chain, HopFailed, OpenHop, Refusal
from nodes.clock import NS, nanoseconds
from nodes.digest import DIGEST_BYTES
from nodes.hub import StubHub
from nodes.records import AnyRecord, Plan, Recoveries, Replayed
from nodes.recovery import Recovery
from nodes.request import Generation, Request, SessionError
from policies.problem import Hop, PolicyError
from policies.workload import RequestPlan
from testbed.control.coordinator import Coordinator
from testbed.control.faults import recoveries
from testbed.experiments.experiment import Experiment
from testbed.fast.connections import Connections
from testbed.fast.delays import ChainDelays
from testbed.fast.events import EventQueue
from testbed.fast.machines import Machines
from testbed.fast.opening import Chains, Opening, SimulatedHop
from testbed.fast.passing import Passing
from testbed.fast.sending import Sending
from testbed.fast.session import Session
from testbed.fast.steps import ChainSession, Key, Part, Steps, replay_of

WHY_LOST = "its connection was lost"


class SessionsCut(Exception):
    """A session loses a server, which is killed, finds that one is gone, or is passed on over a connection that was lost before."""


def not_recovered(experiment: Experiment) -> str:
    """Returns what this engine cannot simulate beside sessions that lose their servers; "" if it can all of it."""
    prefix = experiment.compute.prefix
    return "" if prefix is None or not prefix.history_bytes else "inputs that clients keep"


class _Wait:
    """What a coroutine waits for, until ``done`` is called with the result."""

    def __init__(self) -> None:
        self.call: Callable[[Any], None] | None = None
        self._results: list[Any] = []

    def done(self, result: Any = None) -> None:
        self._results.append(result)
        if self.call is not None:
            self.call(result)

    def __await__(self) -> Generator[_Wait, Any, Any]:
        return self._results[0] if self._results else (yield self)


def _run(
    work: Coroutine[Any, Any, Any], then: Callable[[Any], None], failed: Callable[[SessionError], None]
) -> None:
    """Runs a coroutine that waits for nothing but ``_Wait``; calls ``then`` with its result."""

    def go_on(result: Any) -> None:
        try:
            wait: _Wait = work.send(result)
        except StopIteration as end:
            then(end.value)
        except SessionError as error:
            failed(error)
        else:
            wait.call = go_on

    go_on(None)


class _Clock:
    """The queue's time as a ``nodes.clock.Clock``."""

    def __init__(self, queue: EventQueue) -> None:
        self._queue = queue

    def now_s(self) -> float:
        return self._queue.now_s

    async def sleep_until_s(self, at_s: float) -> None:
        if at_s > self._queue.now_s:
            wait = _Wait()
            self._queue.at(nanoseconds(at_s) / NS, wait.done)  # a sleeper never wakes early
            await wait


class _Chain(Chain):
    """The chain of a session, as its recovery sees it."""

    def __init__(
        self,
        session: Session,
        chains: Chains,
        connections: Connections,
        reserved_tokens: int,
        *,
        forwarding: bool,
    ) -> None:
        self._session = session
        self._chains = chains
        self._of_client = connections
        self._reserved_tokens = reserved_tokens
        self._forwarding = forwarding

    async def open(
        self, plan: Sequence[Hop], first_tokens: int, *, is_replacement: bool = False
    ) -> list[OpenHop] | Refusal:
        session, wait = self._session, _Wait()
        session.opening += 1
        name = name_of_attempt(f"{session.number}", session.n_chains)
        session.n_chains += 1
        need = Need(first_tokens, self._reserved_tokens, (session.plan.arrival_at_s, name))
        opening = Opening(session.plan.client, plan, session.key, need, wait.done)
        opening.is_replacement = is_replacement
        self._chains.open(opening)
        await wait
        if (refusal := opening.refusal) is not None:
            return refusal
        return sorted(opening.opened, key=lambda hop: hop.first)

    def is_there(self, hop: OpenHop) -> bool:
        return cast(SimulatedHop, hop).is_there

    def end_of_loss(self, hops: Sequence[OpenHop], at: int) -> int:
        return len(hops) if self._forwarding else super().end_of_loss(hops, at)

    def forget(self, hop: OpenHop) -> None:
        self._chains.close(self._session.plan.client, [cast(SimulatedHop, hop)])

    async def close(self, hops: Sequence[OpenHop], pages: bytes | None = None) -> None:
        wait = _Wait()
        self._chains.close(
            self._session.plan.client, [cast(SimulatedHop, hop) for hop in hops], then=wait.done
        )
        await wait

    def failed(self, server: int) -> None:
        self._of_client.doubted.add((self._session.plan.client, server))

    def served(self, server: int) -> bool:
        pair = self._session.plan.client, server
        was_doubted = pair in self._of_client.doubted
        self._of_client.doubted.discard(pair)
        return was_doubted


class DelaysOf(Protocol):
    """Returns the delays of a client's chain whose first message has so many tokens, and its connections."""

    def __call__(
        self, plan: Any, hops: tuple[Hop, ...], first_tokens: int
    ) -> tuple[ChainDelays, Sequence[Any]]: ...


class Recovering:
    """Recovers the sessions of a run. ``give_up(session, reason)`` is called once one that cannot go on is closed."""

    def __init__(
        self,
        experiment: Experiment,
        queue: EventQueue,
        coordinator: Coordinator,
        machines: Machines,
        connections: Connections,
        chains: Chains,
        steps: Steps,
        send: Sending,
        admissions: Sequence[Admission[Key]],
        delays: DelaysOf,
        reserved_tokens: Callable[[RequestPlan], int],
        give_up: Callable[[Session, str], None],
    ) -> None:
        self._queue = queue
        self._coordinator = coordinator
        self._connections = connections
        self._chains = chains
        self._steps = steps
        self._delays = delays
        self._admissions = admissions
        self._passing: Passing | None = None
        if experiment.problem.forwarding:
            token_bytes = experiment.problem.model.token_bytes
            self._passing = Passing(queue, connections, send, token_bytes, steps.arrive)
            chains.closed = self._closed
        steps.recover(self._passing)
        self._give_up = give_up
        self._rules = experiment.faults.recovery
        self._problem = experiment.problem
        self._reserved_tokens = reserved_tokens
        self._clock = _Clock(queue)
        self._model = StubHub(DIGEST_BYTES, experiment.problem.model.n_blocks, verify=False)
        self._recoveries = recoveries.Recoveries(experiment, machines, coordinator, machines)

    def of(self, session: Session) -> Recovery:
        """Returns the recovery of a session; there is one for all of its time."""
        if session.recovery is None:
            plan = session.plan
            forwarding = self._problem.forwarding
            parts = session, self._chains, self._connections, self._reserved_tokens(plan)
            chain = _Chain(*parts, forwarding=forwarding)
            observer = partial(self._observe, session)
            request = Request.of(plan, Generation())
            session.recovery = Recovery(
                request, chain, self._reroute, self._rules, self._model, self._clock, observer
            )
        return session.recovery

    def _observe(self, session: Session, record: AnyRecord) -> None:
        if isinstance(record, Replayed):
            session.n_replays += 1
            session.is_recovering = False
        self._recoveries.notify(cast(Recoveries, record))

    async def _reroute(self, request: Request, first: int, last: int, n_done: int) -> Plan | None:
        try:
            route = self._coordinator.reroute(request.index, first, last, n_done)
        except PolicyError as error:
            raise PolicyError(f"request {request.index}: {error}") from error
        wait = _Wait()
        self._queue.at(self._queue.now_s, wait.done)  # others that ask now come first, as between processes
        await wait
        return None if route is None else Plan(list(route.hops), route.wait_s, 0.0)

    def ended(self, session: Session) -> None:
        """Forgets a session that has ended."""
        self._recoveries.ended(session.plan.index)

    def _closed(self, key: Key, server: int) -> None:
        """With forwarding: a session is closed on ``server``, with its step there."""
        assert self._passing is not None, "servers forward"
        self._passing.close(key, server)
        self._steps.drop(key, server)

    def equip(self, session: Session, on_chain: ChainSession) -> None:
        """Lets a session's chain lose the connections of its hops."""
        hops = session.opened
        if not on_chain.token and session.n_reused and not session.is_recovering and not on_chain.earlier:
            for hop in hops[1:]:  # the client has no inputs of what they have found
                hop.begins_at = session.n_reused
        on_chain.wires, on_chain.keys = [hop.wire for hop in hops], [hop.cache_key for hop in hops]
        on_chain.cut = partial(self._lost, session)
        on_chain.passed = partial(self._passed, session)
        if session.is_recovering and all(hop.lacks_history for hop in hops):
            self.of(session).starts_over(cast(list[OpenHop], session.opened))
        if self._passing is not None:
            on_chain.news, on_chain.listeners = [], []
            on_chain.is_open = partial(self._is_open, tuple(hops))
            self._passing.listen(on_chain)

    def _is_open(self, hops: Sequence[SimulatedHop], at: int) -> bool:
        hop = hops[at]
        is_served = hop.wire is None or hop.wire.is_served
        return is_served and self._admissions[hop.server].cached_tokens(hop.cache_key) > 0

    def _lost(self, session: Session, at: int, sent_at_s: float) -> None:
        """The client learns that it has lost hop number ``at`` of the present step, which it sent at ``sent_at_s``."""
        before = session.on_chain
        assert before is not None, "its chain was open"
        before.is_over, session.is_recovering = True, True
        step = before.whole_step(session.n_reused or 0)
        hops, failure = (
            cast(list[OpenHop], session.opened),
            HopFailed(session.opened[at], WHY_LOST, sent_at_s),
        )
        if self._passing is not None or any(hop.begins_at for hop in hops):
            at = 0  # the client has all inputs of the first hop only
        hops[at].inputs = bytearray((step.position + step.n_tokens) * DIGEST_BYTES)
        work = self.of(session).replace(hops, at, failure, step.position, before.token)
        _run(work, partial(self._replaced, session, before, at, step), partial(self._not_replaced, session))

    def _not_replaced(self, session: Session, error: SessionError) -> None:
        then = partial(self._give_up, session, str(error))
        self._chains.close(session.plan.client, session.opened, then=then)

    def _replaced(self, session: Session, before: ChainSession, at: int, step: Part, _: bytes) -> None:
        """Goes on with the step in which a hop was lost."""
        opened = session.opened
        hops = tuple(Hop(hop.server, hop.first, hop.last) for hop in opened)
        replay = replay_of(before, in_steps=self._rules.replay == "step_by_step")
        delays, ways = self._delays(before.plan, hops, replay[0].n_tokens)
        of_hops = [replay if hop.lacks_history else [step] for hop in opened]
        session.on_chain = on_chain = replace(
            before,
            hops=hops,
            delays=delays,
            ways=ways,
            at=at,
            parts=of_hops[at],
            of_hops=of_hops,
            part=0,
            records=before.done_records(forwarding=self._problem.forwarding),
            decodes={},
            is_over=False,
            is_away=False,
        )
        self.equip(session, on_chain)
        self._steps.begin(on_chain, self._queue.now_s)

    def _passed(self, session: Session, at: int) -> None:
        """The session's hop number ``at`` has computed the present step."""
        hop = session.opened[at]
        is_doubted = (session.plan.client, hop.server) in self._connections.doubted
        if not session.is_recovering and not hop.lacks_history and not is_doubted:
            return
        on_chain = session.on_chain
        assert on_chain is not None, "its chain is open"
        step = on_chain.whole_step(session.n_reused or 0)
        n_all = step.position + step.n_tokens
        n_new = n_all if hop.lacks_history else step.n_tokens
        hop.n_cached = n_all
        following = session.opened[at + 1] if at + 1 < len(session.opened) else None
        self.of(session).passed(hop, following, n_new)

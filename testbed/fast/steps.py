"""Simulates steps one by one, where sessions meet: on links, in batches (``nodes.batching``), or in caches that grow."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from nodes import framesizes
from nodes.admission import Admission
from nodes.batching import Batch, Batches, Composition, Step
from nodes.clock import on_tick
from nodes.records import HOP_COLUMNS, HopRecord
from policies.decoding import ONE_TOKEN, Decoding, Round, RoundCosts
from policies.problem import Hop, RequestSpec, hop_times_s, return_times_s
from policies.steps import StepLaw
from policies.workload import RequestPlan
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import stub_profile
from testbed.fast.events import EventQueue
from testbed.fast.links import Way
from testbed.fast.outcome import Rounds

Key = tuple[int, int]
"""A request's number, and which of its attempts to open a session this is."""

Notify = Callable[..., None]
"""Called with (client, server, call, *args): has ``call(*args)`` called when a server's message reaches a client."""

_ALONE = Composition()
COLUMNS = ("request", "token", "hop", *HOP_COLUMNS, "client_s")
"""The columns of ``Steps.rows``."""


class HopDelays(NamedTuple):
    """One hop's times on the links there and back, and the calibration's overhead, in seconds."""

    up_s: float
    down_s: float
    added_s: float


class ChainDelays(NamedTuple):
    """The hops' delays for the prompt, and for every further token."""

    prompt: Sequence[HopDelays]
    later: Sequence[HopDelays]


class Part(NamedTuple):
    """The content of one message: ``n_tokens`` at ``position``.

    ``is_replay``: lost servers had them before.
    """

    position: int
    n_tokens: int
    is_replay: bool = False


@dataclass(slots=True, eq=False)
class ChainSession:
    """A session on the chain that it has opened as ``key``. Its next step is output token ``token``.

    ``ended(instant of the first token)`` is called at its last token, ``lost(server, cached tokens)`` when
    the client learns that a server took its cache.
    """

    plan: RequestPlan
    key: Key
    hops: tuple[Hop, ...]
    delays: ChainDelays
    ways: Sequence[Way]
    """The hops' connections. Without them messages take the ``delays`` and nothing else."""
    ended: Callable[[float], None]
    lost: Callable[[int, int], None] = lambda server, cached_tokens: None
    token: int = 0
    parts: Sequence[Part] = ()
    """The present step's messages: only a replay step by step has several.

    It is at ``parts[part]`` on ``hops[at]``.
    """
    part: int = 0
    at: int = 0
    ready_at_s: float = 0.0
    """When the present step could begin."""
    sent_at_s: float = 0.0
    first_at_s: float = 0.0
    records: list[HopRecord | None] = field(default_factory=list)
    """The present step's records; ``None``: it is not kept."""
    rounds: Rounds = field(default_factory=Rounds)
    costs: RoundCosts = RoundCosts(0.0, 0.0)  # noqa: RUF009 - immutable
    round: Round = ONE_TOKEN
    """What the present step makes."""
    seen_tokens: int = 0
    """Tokens that the servers had seen before the present step, void ones included."""
    is_away: bool = False
    """With forwarding: whether the client waits for a result."""
    preempted_by: int | None = None
    """The server that took its cache; the client acts on it when it next waits for a result."""
    is_over: bool = False
    """Whether the client waits for nothing more; servers may not know that yet."""
    is_fill: bool = False
    """Whether it is no session of its own, but a part of a prompt for one hop's cache: it has no result."""
    earlier: Sequence[int] = ()
    """The tokens of every step of earlier turns on its chain."""

    @property
    def delay(self) -> HopDelays:
        part = self.parts[self.part]
        is_prompt = not part.position or (not self.token and part.n_tokens > 1)
        return (self.delays.prompt if is_prompt else self.delays.later)[self.at]

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """The tokens of every step of this turn and of earlier ones, all of which are done."""
        of_prompt = self.plan.n_input_tokens - sum(self.earlier)
        return (*self.earlier, of_prompt, *(self.rounds.made or [1] * (self.token - 1)))

    def resume(self, before: ChainSession, *, forwarding: bool) -> None:
        """Takes the tokens of the session ``before``, whose chain is lost."""
        self.earlier, self.rounds, self.round = before.earlier, before.rounds, before.round
        self.token, self.first_at_s, self.ready_at_s = before.token, before.first_at_s, before.ready_at_s
        if not forwarding:  # of hops that are done; else the client has none of them
            self.records = before.records[: len(before.records) - before.part]


class Steps:
    """The steps of all servers: each on its own, by the servers' ``laws`` of times, or in ``batches``.

    Every step takes its client ``hub_s(client)``, and its drafts what ``decoding`` says. Where caches grow, they are in ``caches``, and
    ``notify(client, server, call, *args)`` sends that a session has lost its there. ``rows`` has a row for each hop of each token,
    with ``COLUMNS``, or is ``None`` if there are more than ``most``; ``n_rows`` counts them. ``gaps_s`` are
    the seconds from every token to the next one of its request.
    """

    def __init__(
        self,
        queue: EventQueue,
        token_bytes: int,
        *,
        laws: Sequence[StepLaw] = (),
        batches: Sequence[Batches] | None = None,
        caches: Sequence[Admission[Key]] | None = None,
        notify: Notify = lambda client, server, call, *args: None,
        forwarding: bool = False,
        hub_s: Callable[[int], float] = lambda client: 0.0,
        decoding: Decoding | None = None,
        most: int = 0,
    ) -> None:
        self._queue = queue
        self._laws = laws
        self._batches = batches
        self._busy: set[int] = set()
        self._sessions: dict[Step, ChainSession] = {}
        self._caches = caches
        self._notify = notify
        self._token_bytes = token_bytes
        self._hub_s = hub_s
        self._decoding = decoding
        self._forwarding = forwarding
        self.n_rows = 0
        self.rows: array[float] | None = array("d") if most else None
        self.gaps_s = array("d")
        self._most = most

    def begin(self, session: ChainSession, ready_at_s: float) -> None:
        """Serve a request from ``ready_at_s`` on. It may have tokens already."""
        if ready_at_s > self._queue.now_s:
            self._queue.at(ready_at_s, self._send, session)
        else:  # no timer is set for what is due
            self._send(session)

    def notify_preempted(self, session: ChainSession, server: int) -> None:
        """With forwarding: notify the client that ``server`` has taken the session's cache."""
        if session.is_over or session.preempted_by is not None:
            return
        session.preempted_by = server
        if session.is_away:
            self._lose(session, server)

    def _lose(self, session: ChainSession, server: int) -> None:
        session.is_over = True
        session.lost(server, session.parts[session.part].position)

    def _send(self, session: ChainSession) -> None:
        """The client sends the present part to ``hops[at]``."""
        if session.preempted_by is not None:
            self._lose(session, session.preempted_by)
        else:
            session.is_away = True
            self._carry(session)

    def _carry(self, session: ChainSession) -> None:
        session.sent_at_s = now_s = self._queue.now_s
        if not session.ways:
            self._queue.at(now_s + session.delay.up_s, self._arrive, session)
            return
        way, part = session.ways[session.at], session.parts[session.part]
        size = way.size_there(part.n_tokens * self._token_bytes)
        arrived_at_s = way.there.pass_frame(size)
        if arrived_at_s is None:
            way.there.put_frame(size, self._arrive, session)
        elif self._batches is None and self._caches is None and way.accepts is None:
            # Nothing meets it on the server, so that it is known when its result leaves.
            hop = session.hops[session.at]
            busy_s = self._laws[hop.server].step_s(part.position, part.n_tokens, hop.blocks)
            done_at_s = arrived_at_s + busy_s
            if added_s := session.delay.added_s:
                done_at_s = on_tick(done_at_s) + added_s
            self._queue.at(done_at_s, self._depart, session, arrived_at_s, _ALONE)
        else:
            self._queue.on_tick(arrived_at_s, self._arrive, session)

    def _arrive(self, session: ChainSession) -> None:
        hop, part, now_s = session.hops[session.at], session.parts[session.part], self._queue.now_s
        if session.ways and (accepts := session.ways[session.at].accepts) is not None:
            accepts.send(framesizes.OK, _nothing)
        if self._caches is not None and not self._grow(self._caches[hop.server], session, part):
            if not self._forwarding:  # else the client is notified at once: see ``notify_preempted``
                self._notify(session.plan.client, hop.server, self._lose, session, hop.server)
            return
        if self._batches is None:
            busy_s = self._laws[hop.server].step_s(part.position, part.n_tokens, hop.blocks)
            self._queue.at(now_s + busy_s, self._computed, session, now_s, _ALONE)
            return
        step = Step(now_s, part.position, part.n_tokens, hop.blocks)
        self._sessions[step] = session
        self._batches[hop.server].add(step)
        if hop.server not in self._busy:
            self._begin(self._batches[hop.server], hop.server)

    def _grow(self, caches: Admission[Key], session: ChainSession, part: Part) -> bool:
        """Reserves cache for ``part``, in place of void tokens. Returns False if the session has lost its cache."""
        if not session.part and part.position < session.seen_tokens:
            caches.go_back(session.key, part.position)
        return caches.grow(session.key, part.position + part.n_tokens)

    def _begin(self, batches: Batches, server: int) -> None:
        batch = batches.next()
        if batch is None:
            self._busy.discard(server)
        else:
            self._busy.add(server)
            self._queue.at(batch.end_at_s, self._end, batches, server, batch)

    def _end(self, batches: Batches, server: int, batch: Batch) -> None:
        self._begin(batches, server)
        for step in batch.ended:
            self._computed(self._sessions.pop(step), step.arrived_at_s, batch.together)

    def _computed(self, session: ChainSession, arrived_at_s: float, together: Composition) -> None:
        if added_s := session.delay.added_s:
            self._queue.at(self._queue.now_s + added_s, self._depart, session, arrived_at_s, together)
        else:
            self._depart(session, arrived_at_s, together)

    def _depart(self, session: ChainSession, arrived_at_s: float, together: Composition) -> None:
        hop, part, departed_at_s = session.hops[session.at], session.parts[session.part], self._queue.now_s
        is_passed_on = self._forwarding and session.at + 1 < len(session.hops)
        caches = self._caches
        if self._forwarding and caches and not caches[hop.server].cached_tokens(session.key):
            return
        if is_passed_on:
            self._record(session, arrived_at_s, departed_at_s, departed_at_s, together)
            session.at += 1
            self._carry(session)
            return
        step = session, arrived_at_s, departed_at_s, together
        if not session.ways:
            self._queue.at(departed_at_s + session.delay.down_s, self._received, *step)
            return
        way = session.ways[session.at]
        n_bytes = 0 if session.is_fill else part.n_tokens * self._token_bytes
        way.back.send(way.size_back(n_bytes), self._received, *step)

    def _record(
        self,
        session: ChainSession,
        arrived_at_s: float,
        departed_at_s: float,
        received_at_s: float,
        together: Composition,
    ) -> None:
        """Keeps the record of a step, whose result has gone to the next server or reached the client."""
        if self.rows is None:
            session.records.append(None)
            return
        part, is_last = session.parts[session.part], session.at + 1 == len(session.hops)
        n_bytes = part.n_tokens * self._token_bytes
        n_back = n_bytes if is_last or not self._forwarding else 0
        instants = session.sent_at_s, arrived_at_s, departed_at_s, received_at_s
        n_replayed = part.n_tokens if part.is_replay else 0
        session.records.append(
            HopRecord(*session.hops[session.at], *instants, n_bytes, n_back, n_replayed, together)
        )

    def _received(
        self, session: ChainSession, arrived_at_s: float, departed_at_s: float, together: Composition
    ) -> None:
        """Handle that the client has the present part's result: of one hop, with forwarding of all hops."""
        session.is_away = False
        if session.is_over:
            return
        if session.is_fill:
            session.ended(self._queue.now_s)
            return
        self._record(session, arrived_at_s, departed_at_s, self._queue.now_s, together)
        # Parts go through the chain one by one with forwarding, else through one hop after another.
        session.part += 1
        if session.part < len(session.parts):
            session.at = 0 if self._forwarding else session.at
        else:
            session.part, session.at = 0, session.at + 1
            if session.at == len(session.hops):
                if hub_s := self._hub_s(session.plan.client):
                    self._queue.at(self._queue.now_s + hub_s, self._next_token, session)
                else:
                    self._next_token(session)
                return
        self._send(session)

    def _next_token(self, session: ChainSession) -> None:
        plan, done_at_s = session.plan, self._queue.now_s
        self._write(session)
        if session.token == 0:
            session.first_at_s = done_at_s
        else:
            self.gaps_s.append(done_at_s - session.ready_at_s)
        if session.token and self._decoding is not None:
            session.rounds.n_drafted += session.round.drafted
            session.rounds.seen.add(session.round.drafted, session.round.accepted)
            session.rounds.made.append(session.round.made)
        session.seen_tokens = session.parts[-1].position + session.parts[-1].n_tokens
        session.token, session.at, session.ready_at_s = session.token + session.round.made, 0, done_at_s
        n_left = plan.n_output_tokens - session.token
        if not n_left:
            session.is_over = True
            session.ended(session.first_at_s)
            return
        draft_s = 0.0
        if self._decoding is not None:
            n_drafted = self._decoding.n_drafted(n_left, session.costs, session.rounds.seen)
            session.round = self._decoding.drawn(plan.index, session.token, n_drafted)
            draft_s = session.round.drafted * self._decoding.draft_token_s
        session.parts = (Part(plan.n_input_tokens + session.token - 1, session.round.sent),)
        if draft_s:
            self._queue.at(done_at_s + draft_s, self._send, session)
        else:
            self._send(session)

    def _write(self, session: ChainSession) -> None:
        self.n_rows += len(session.records)
        if self.n_rows > self._most:
            self.rows = None
        if self.rows is not None:
            previous_s = session.ready_at_s
            for number, record in enumerate(session.records):
                assert record is not None, "rows are kept from the start, or not again"
                client_s = record.sent_at_s - previous_s
                self.rows.extend((session.plan.index, session.token, number, *record.row(), client_s))
                previous_s = record.received_at_s
        session.records = []


def _nothing() -> None:
    """Nobody waits for the answer to a push."""


def replay_of(session: ChainSession, *, in_steps: bool) -> list[Part]:
    """Returns the replay of all inputs of ``session`` to a new chain: in one message, or as the steps were."""
    position, n_last, _ = session.parts[-1]
    if not in_steps:
        return [Part(0, position + n_last, True)]
    sizes = session.step_sizes + ((n_last,) if session.token else ())
    return [Part(at, n, True) for at, n in zip(accumulate(sizes, initial=0), sizes, strict=False)]


def delays_of(experiment: Experiment, request: RequestSpec, hops: Sequence[Hop]) -> ChainDelays:
    """Returns the delays of a chain by the experiment's problem.

    Hub-spoke: sending takes a part of t_cj in each direction, by the links' rates. Forwarding: a hop's
    delays are those from the server before it, and of the last hop also those back to the client. No message arrives before it was sent.
    """
    problem, calibration = experiment.problem, experiment.calibration
    added_s = calibration.input_overhead_s(request.n_input_tokens), calibration.token_overhead_s
    found: tuple[list[HopDelays], list[HopDelays]] = [], []
    client = problem.clients[request.client]

    def share_up(server: int) -> float:
        name = problem.servers[server].name
        up_bps, down_bps = (
            experiment.network.links[client, name].rate_bps,
            experiment.network.links[name, client].rate_bps,
        )
        return down_bps / (up_bps + down_bps)

    previous: int | None = None
    for hop in hops:
        base_s = problem.servers[hop.server].step_base_s
        for of, hop_s, more_s in zip(
            found, hop_times_s(problem, request, previous, hop.server), added_s, strict=True
        ):
            network_s = hop_s - base_s - more_s
            if problem.forwarding:
                # What the overhead has of the client's link is not spent where the message does not pass that.
                way_s = problem.up_s(request.client, hop.server)
                if previous is not None:
                    way_s = problem.across_s(previous, hop.server)
                less_s = min(more_s, max(0.0, way_s - network_s))
                of.append(HopDelays(network_s + less_s, 0.0, more_s - less_s))
            else:
                sent_s = network_s - problem.raw_rtt_s[request.client][hop.server]
                up_s = problem.up_s(request.client, hop.server) + share_up(hop.server) * sent_s
                of.append(HopDelays(up_s, network_s - up_s, more_s))
        previous = hop.server
    if previous is not None:
        for of, back_s in zip(found, return_times_s(problem, request, previous), strict=True):
            of[-1] = of[-1]._replace(down_s=of[-1].down_s + back_s)
    return ChainDelays(*found)


def overheads_of(experiment: Experiment, request: RequestSpec, hops: Sequence[Hop]) -> ChainDelays:
    """Returns the delays of a chain whose messages go over simulated links: what the calibration adds to these."""
    client = experiment.problem.clients[request.client]
    profiles = [stub_profile(experiment, hop.server) for hop in hops]
    sizes = (0, request.n_input_tokens), (1, 1)
    return ChainDelays(
        *([HopDelays(0.0, 0.0, p.overhead_s(client, *size)) for p in profiles] for size in sizes)
    )

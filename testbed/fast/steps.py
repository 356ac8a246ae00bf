"""Simulates steps one by one, where sessions meet: on links, in batches (``nodes.batching``), or in caches that grow."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

from nodes import framesizes
from nodes.admission import Admission
from nodes.batching import Batch, Batches, Composition, Step, is_decode
from nodes.clock import on_tick
from nodes.framesizes import FrameSize
from nodes.records import HOP_COLUMNS
from policies.decoding import ONE_TOKEN, Decoding, Round, RoundTimes
from policies.problem import Hop
from policies.steps import StepLaw
from policies.workload import RequestPlan
from testbed.fast.connections import Wire
from testbed.fast.delays import ChainDelays, HopDelays
from testbed.fast.events import EventQueue
from testbed.fast.lines import Line
from testbed.fast.links import Way
from testbed.fast.outcome import Rounds

Key = tuple[int, int]
"""A request's number, and which of its attempts to open a session this is."""

IsLate = Callable[["ChainSession"], None]
"""Called when the answer to a session's step has come later than any step may."""
Notify = Callable[..., None]
"""Called with (client, server, call, *args): has ``call(*args)`` called when a server's message reaches a client."""

_ALONE = Composition()
COLUMNS = ("request", "token", "hop", *HOP_COLUMNS, "client_s")
"""The columns of ``Steps.rows``."""
_RECEIVED = COLUMNS.index("received_at_s")
_MOST_RECENT = 3000


class Part(NamedTuple):
    """The content of one message: ``n_tokens`` at ``position``.

    ``is_replay``: lost servers had them before.
    """

    position: int
    n_tokens: int
    is_replay: bool = False


class Decode(NamedTuple):
    """A hop's decode where nothing meets it on the server and all of them are alike: the lines, sizes, and seconds of compute."""

    there: Line
    there_size: FrameSize
    back: Line
    back_size: FrameSize
    busy_s: float


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
    records: list[tuple[float, ...] | None] = field(default_factory=list)
    """The present step's rows (``COLUMNS``); ``None``: they are not kept."""
    decodes: dict[int, Decode] = field(default_factory=dict)
    """Of hops that have had one; all further parts are such decodes."""
    rounds: Rounds = field(default_factory=Rounds)
    round_s: RoundTimes = ()
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
    of_hops: Sequence[Sequence[Part]] = ()
    """The present step's messages to each hop, where some lack the session's history; else ``parts`` are those of all hops."""
    wires: Sequence[Wire | None] = ()
    """The hops' connections, where they can be lost."""
    n_asked: int = 0
    """The number of the request on its wire that waits for an answer."""
    cut: Callable[[int, float], None] = lambda at, sent_at_s: None
    """Called when the client learns that it has lost hop number ``at`` of a step that it sent then."""
    keys: Sequence[Key] = ()
    """What the hops' servers know the session as, where these differ."""
    is_open: Callable[[int], bool] = lambda at: True
    """With forwarding: whether the server of hop number ``at`` still has the session."""
    news: list[int] = field(default_factory=list)
    """With forwarding: the lost hops of which the client has heard."""
    listeners: list[tuple[Wire, int]] = field(default_factory=list)
    """With forwarding: what calls it if a connection of its chain is lost."""
    asked_at_s: float = 0.0
    """When the client sent the present message."""
    passed: Callable[[int], None] | None = None
    """Called with a hop's place in the chain when it has computed the present step."""
    earlier: Sequence[int] = ()
    """The tokens of every step of earlier turns on its chain."""

    @property
    def key_there(self) -> Key:
        """What the present hop's server knows the session as."""
        return self.keys[self.at] if self.keys else self.key

    @property
    def delay(self) -> HopDelays:
        part = self.parts[self.part]
        is_later = is_decode(part.position, part.n_tokens)
        return (self.delays.later if is_later else self.delays.prompt)[self.at]

    def whole_step(self, n_reused: int) -> Part:
        """Returns the present step as hops compute it that have seen all before; ``n_reused`` tokens of the prompt are not computed."""
        n_input = self.plan.n_input_tokens
        if self.token:
            return Part(n_input + self.token - 1, self.round.sent)
        return Part(n_reused, n_input - n_reused)

    @property
    def step_sizes(self) -> tuple[int, ...]:
        """The tokens of every step of this turn and of earlier ones, all of which are done."""
        of_prompt = self.plan.n_input_tokens - sum(self.earlier)
        return (*self.earlier, of_prompt, *(self.rounds.made or [1] * (self.token - 1)))

    def resume(self, before: ChainSession, *, forwarding: bool) -> None:
        """Takes the tokens of the session ``before``, whose chain is lost."""
        self.earlier, self.rounds, self.round = before.earlier, before.rounds, before.round
        self.token, self.first_at_s, self.ready_at_s = before.token, before.first_at_s, before.ready_at_s
        self.records = before.done_records(forwarding=forwarding)

    def done_records(self, *, forwarding: bool) -> list[tuple[float, ...] | None]:
        """Returns the rows of the present step's hops that are done. With ``forwarding`` the client has none of them."""
        return [] if forwarding else self.records[: len(self.records) - self.part]


class Passes(Protocol):
    """What passes steps from server to server where connections can be lost: see ``testbed.fast.passing``."""

    def push(self, session: ChainSession) -> None: ...

    def fail(self, session: ChainSession) -> None: ...


class Steps:
    """The steps of all servers: each on its own, by the servers' ``laws`` of times, or in ``batches``.

    Every step takes its client ``hub_s[client]``, and its drafts what ``decoding`` says. Where caches grow, they are in ``caches``, and
    ``notify(client, server, call, *args)`` sends that a session has lost its there. ``is_late`` is called with sessions whose step
    was not answered within ``limit_s``. ``rows`` has a row for each hop of each token,
    with ``COLUMNS``, or is ``None`` if there are more than ``most``; ``n_rows`` counts them. ``gaps_s`` are
    the seconds from every token to the next one of its request.
    """

    def __init__(
        self,
        queue: EventQueue,
        token_bytes: int,
        *,
        laws: Sequence[StepLaw] = (),
        batches: list[Batches] | None = None,
        caches: Sequence[Admission[Key]] | None = None,
        notify: Notify = lambda client, server, call, *args: None,
        forwarding: bool = False,
        hub_s: Sequence[float],
        decoding: Decoding | None = None,
        most: int = 0,
        limit_s: float = math.inf,
        is_late: IsLate = lambda session: None,
    ) -> None:
        self._queue = queue
        self._laws = laws
        self._decodes_s: dict[Hop, float] = {}
        """Seconds of a decode alone, by hop, where these do not grow with the context."""
        self._batches = batches
        self._busy: set[int] = set()
        self._sessions: dict[Step, ChainSession] = {}
        self._caches = caches
        self._notify = notify
        self._token_bytes = token_bytes
        self._hub_s = hub_s
        self._decoding = decoding
        self._forwarding = forwarding
        self._passing: Passes | None = None
        """With forwarding, where connections can be lost."""
        self.n_rows = 0
        self._rows: array[float] | None = array("d") if most else None
        self._recent: list[float] = []
        """The last rows. A list grows in less time than an array, which takes less memory."""
        self.gaps_s = array("d")
        self._most = most
        self._limit_s = limit_s
        self._is_late = is_late

    @property
    def rows(self) -> array[float] | None:
        """See ``Steps``."""
        self._keep()
        return self._rows

    def _keep(self) -> None:
        if self._rows is not None:
            self._rows.fromlist(self._recent)
        self._recent.clear()

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

    def _refused(self, session: ChainSession, server: int) -> None:
        """The client learns that ``server`` has not taken the present part, since it has taken the session's cache."""
        if session.wires and (wire := session.wires[session.at]) is not None:
            wire.answered(session.n_asked)
        self._lose(session, server)

    def _lose(self, session: ChainSession, server: int) -> None:
        session.is_over = True
        session.lost(server, session.parts[session.part].position)

    def _send(self, session: ChainSession) -> None:
        """The client sends the present part to ``hops[at]``."""
        if session.preempted_by is not None:
            self._lose(session, session.preempted_by)
            return
        session.asked_at_s = self._queue.now_s
        if self._passing is not None:
            if session.news:
                self._passing.fail(session)
                return
            session.is_away = True
            self._carry(session)
        elif not session.wires or self._asks(session):
            session.is_away = True
            self._carry(session)

    def _asks(self, session: ChainSession) -> bool:
        """Notes that the client waits for the present hop. Returns False if its connection is known to be lost."""
        wire, now_s = session.wires[session.at], self._queue.now_s
        assert wire is not None, "connections can be lost"
        if not wire.is_there:
            session.cut(session.at, now_s)
            return False
        session.n_asked = wire.ask(partial(session.cut, session.at, now_s))
        return True

    def _is_lost(self, session: ChainSession) -> bool:
        """Whether the present hop's server has ended since the session was opened there, or the session has."""
        wire = session.wires[session.at] if session.wires else None
        return wire is not None and (not wire.is_served or not session.is_open(session.at))

    def recover(self, passing: Passes | None) -> None:
        """Lets connections be lost. ``passing``: what passes steps from server to server."""
        self._passing = passing

    def drop(self, key: Key, server: int) -> None:
        """Drops what ``server`` computes for a session that is closed there."""
        for step, session in list(self._sessions.items()):
            if session.hops[session.at].server == server and session.key_there == key:
                assert self._batches is not None, "only these have steps that wait"
                self._batches[server].remove(step)
                del self._sessions[step]

    def end(self, server: int) -> None:
        """Drops what a server computes, which ends now."""
        if self._batches is not None:
            self._batches[server] = self._batches[server].anew()
            self._busy.discard(server)

    def _carry(self, session: ChainSession) -> None:
        queue = self._queue
        session.sent_at_s = now_s = queue.now_s
        if (decode := session.decodes.get(session.at)) is not None:
            arrived_at_s = decode.there.pass_frame(decode.there_size)
            if arrived_at_s is not None:
                queue.at(arrived_at_s + decode.busy_s, self._depart, session, arrived_at_s, _ALONE)
                return
        if not session.ways:
            queue.at(now_s + session.delay.up_s, self.arrive, session)
            return
        part = session.parts[session.part]
        there, back, accepts, size_there, size_back, _, _ = session.ways[session.at]
        size = size_there(part.n_tokens * self._token_bytes)
        arrived_at_s = there.pass_frame(size)
        if arrived_at_s is None:
            there.put_frame(size, self.arrive, session)
        elif self._batches is None and self._caches is None and accepts is None:
            # Nothing meets it on the server, so that it is known when its result leaves.
            hop = session.hops[session.at]
            busy_s = self._busy_s(hop, part)
            done_at_s, added_s = arrived_at_s + busy_s, session.delay.added_s
            is_alike = (
                session.token
                and part.position
                and part.n_tokens == 1
                and self._decoding is None
                and hop in self._decodes_s
            )
            if is_alike and not added_s:
                back_size = size_back(self._token_bytes)
                session.decodes[session.at] = Decode(there, size, back, back_size, busy_s)
            if added_s:
                done_at_s = on_tick(done_at_s) + added_s
            queue.at(done_at_s, self._depart, session, arrived_at_s, _ALONE)
        else:
            queue.on_tick(arrived_at_s, self.arrive, session)

    def _busy_s(self, hop: Hop, part: Part) -> float:
        """Returns for how long a server computes ``part`` on its own."""
        position, n_tokens, _ = part
        if n_tokens > 1 or not position:
            return self._laws[hop.server].step_s(position, n_tokens, hop.blocks)
        busy_s = self._decodes_s.get(hop)
        if busy_s is None:
            law = self._laws[hop.server]
            busy_s = law.step_s(position, n_tokens, hop.blocks)
            if not law.grows_with_context(hop.blocks):
                self._decodes_s[hop] = busy_s
        return busy_s

    def arrive(self, session: ChainSession) -> None:
        """The present part reaches the server of ``hops[at]``."""
        if session.wires and self._is_lost(session):
            return
        hop, part, now_s = session.hops[session.at], session.parts[session.part], self._queue.now_s
        is_passed = self._passing is not None and session.at  # then it is answered already
        if not is_passed and session.ways and (accepts := session.ways[session.at].accepts) is not None:
            accepts.tell(framesizes.OK)
        if self._caches is not None and not self._grow(self._caches[hop.server], session, part):
            if not self._forwarding:  # else the client is notified at once: see ``notify_preempted``
                self._notify(session.plan.client, hop.server, self._refused, session, hop.server)
            return
        if self._batches is None:
            self._queue.at(now_s + self._busy_s(hop, part), self._computed, session, now_s, _ALONE)
            return
        step = Step(now_s, part.position, part.n_tokens, hop.blocks)
        self._sessions[step] = session
        self._batches[hop.server].add(step)
        if hop.server not in self._busy:
            self._begin(self._batches[hop.server], hop.server)

    def _grow(self, caches: Admission[Key], session: ChainSession, part: Part) -> bool:
        """Reserves cache for ``part``, in place of void tokens. Returns False if the session has lost its cache."""
        key = session.key_there
        if not session.part and not part.is_replay and part.position < session.seen_tokens:
            caches.go_back(key, part.position)
        return caches.grow(key, part.position + part.n_tokens)

    def _begin(self, batches: Batches, server: int) -> None:
        batch = batches.next()
        if batch is None:
            self._busy.discard(server)
        else:
            self._busy.add(server)
            self._queue.at(batch.end_at_s, self._end, batches, server, batch)

    def _end(self, batches: Batches, server: int, batch: Batch) -> None:
        if self._batches is None or self._batches[server] is not batches:
            return  # the server has ended
        self._begin(batches, server)
        for step in batch.ended:
            if (session := self._sessions.pop(step, None)) is not None:  # else it is closed
                self._computed(session, step.arrived_at_s, batch.together)

    def _computed(self, session: ChainSession, arrived_at_s: float, together: Composition) -> None:
        if added_s := session.delay.added_s:
            self._queue.at(self._queue.now_s + added_s, self._depart, session, arrived_at_s, together)
        else:
            self._depart(session, arrived_at_s, together)

    def _depart(self, session: ChainSession, arrived_at_s: float, together: Composition) -> None:
        if session.wires and self._is_lost(session):
            return
        departed_at_s, caches = self._queue.now_s, self._caches
        if self._forwarding:
            if caches and not caches[session.hops[session.at].server].cached_tokens(session.key):
                return
            if session.at + 1 < len(session.hops):
                self._record(session, arrived_at_s, departed_at_s, departed_at_s, together)
                if self._passing is not None:
                    self._passing.push(session)
                    return
                session.at += 1
                self._carry(session)
                return
        step = session, arrived_at_s, departed_at_s, together
        if (decode := session.decodes.get(session.at)) is not None:
            at_s = decode.back.pass_frame(decode.back_size)  # ``Line.send``, without the time of a call
            if at_s is None:
                decode.back.put_frame(decode.back_size, self._received, *step)
            else:
                self._queue.on_tick(at_s, self._received, *step)
            return
        if not session.ways:
            self._queue.at(departed_at_s + session.delay.down_s, self._received, *step)
            return
        _, back, _, _, size_back, _, _ = session.ways[session.at]
        n_bytes = 0 if session.is_fill else session.parts[session.part].n_tokens * self._token_bytes
        back.send(size_back(n_bytes), self._received, *step)

    def _record(
        self,
        session: ChainSession,
        arrived_at_s: float,
        departed_at_s: float,
        received_at_s: float,
        together: Composition,
    ) -> None:
        """Keeps the row of a step, whose result has gone to the next server or reached the client."""
        records = session.records
        if self._rows is None:
            records.append(None)
            return
        (_, n_tokens, is_replay), is_last = session.parts[session.part], session.at + 1 == len(session.hops)
        n_bytes = n_tokens * self._token_bytes
        n_back = n_bytes if is_last or not self._forwarding else 0
        previous, sent_at_s = records[-1] if records else None, session.sent_at_s
        row = (
            *(session.plan.index, session.token, len(records)),
            *session.hops[session.at],
            *(sent_at_s, arrived_at_s, departed_at_s, received_at_s),
            *(n_bytes, n_back, n_tokens if is_replay else 0),
            *together,
            sent_at_s - (session.ready_at_s if previous is None else previous[_RECEIVED]),
        )
        records.append(row)

    def _received(
        self, session: ChainSession, arrived_at_s: float, departed_at_s: float, together: Composition
    ) -> None:
        """Handle that the client has the present part's result: of one hop, with forwarding of all hops."""
        session.is_away = False
        if session.is_over:
            return
        if self._queue.now_s - session.asked_at_s >= self._limit_s:
            self._is_late(session)
        if session.wires and self._passing is None:
            wire = session.wires[session.at]
            assert wire is not None, "connections can be lost"
            wire.answered(session.n_asked)
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
            if session.passed is not None:
                for at in range(session.at) if self._forwarding else (session.at - 1,):
                    session.passed(at)
            if session.of_hops and session.at < len(session.hops):
                session.parts = session.of_hops[session.at]
            if session.at == len(session.hops):
                if hub_s := self._hub_s[session.plan.client]:
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
        position, n_sent, _ = session.parts[-1]
        session.of_hops = ()
        session.seen_tokens = position + n_sent
        session.token, session.at, session.ready_at_s = session.token + session.round.made, 0, done_at_s
        n_left = plan.n_output_tokens - session.token
        if not n_left:
            session.is_over = True
            for wire, number in session.listeners:
                wire.answered(number)
            session.ended(session.first_at_s)
            return
        draft_s = 0.0
        if self._decoding is not None:
            n_drafted = self._decoding.n_drafted(n_left, session.round_s, session.rounds.seen)
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
            self._rows = None
        if self._rows is not None:
            for row in session.records:
                assert row is not None, "rows are kept from the start, or not again"
                self._recent += row
            if len(self._recent) > _MOST_RECENT:
                self._keep()
        session.records = []


def replay_of(session: ChainSession, *, in_steps: bool) -> list[Part]:
    """Returns the replay of all inputs of ``session`` to a new chain: in one message, or as the steps were."""
    position, n_last, _ = session.parts[-1]
    if not in_steps:
        return [Part(0, position + n_last, True)]
    sizes = session.step_sizes + ((n_last,) if session.token else ())
    return [Part(at, n, True) for at, n in zip(accumulate(sizes, initial=0), sizes, strict=False)]

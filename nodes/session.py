"""One inference session as the hub runs it: open a chain, prefill, decode token by token, close."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nodes import admission, records, wire
from nodes.chain import Chain, HopFailed, OpenHop, Preempted, Refusal
from nodes.clock import Clock, on_tick
from nodes.connection import Connection
from nodes.hub import HubModel, TokenSequence
from nodes.prefixes import MAX_PAGES, HubHistory, page_ids, reusable, split_ids
from nodes.records import (
    Admitted,
    Completed,
    Drafted,
    HopRecord,
    Opening,
    Plan,
    Rejected,
    Resumed,
    Reused,
    Routed,
    Token,
)
from nodes.recovery import Observer, Recovery, Rerouter
from nodes.request import Request
from nodes.rounds import Answer, Round, Rounds
from policies.decoding import RoundTimes, Seen
from policies.problem import Hop
from policies.rules import RecoveryRules
from policies.workload import Backoff


@dataclass(frozen=True)
class SessionRules:
    """How sessions are opened, and when they give up. Times are scenario seconds.

    Opening takes at least ``initial_delay_s``; ``setup_s`` is added after it (both from the calibration).

    A client whose session could not be opened tries again as ``backoff`` says, also after a preemption. With
    ``backoff.give_up_s`` 0 it waits for room for ever, but gives up after ``recovery.give_up_s`` if there is
    no chain, if a server cannot be reached, or if the session can never fit.

    ``kept_tokens``: tokens of a page of cache that servers keep for later sessions; ``None``: they keep none. ``history_bytes``:
    what a client keeps of hops' inputs, to fill hops that have lost pages. ``hold_s``: how
    long a chain stays open for the next turn of a conversation; ``None``: it is closed.
    """

    initial_delay_s: float = 0.0
    setup_s: float = 0.0
    kept_tokens: int | None = None
    history_bytes: float = 0.0
    hold_s: float | None = None
    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen
    recovery: RecoveryRules = RecoveryRules()  # noqa: RUF009 - frozen


Router = Callable[[Request, int, int], Awaitable[Plan | None]]
"""Asks the routing policy for a chain: (request, attempt from 0, output tokens so far)."""


class HubSession:
    """Serves one request to its end. Without ``reroute``, a failed hop fails the request."""

    chain_kind: type[Chain] = Chain

    def __init__(
        self,
        request: Request,
        key: str,
        client: str,
        connections: Sequence[Connection],
        route: Router,
        model: HubModel,
        rules: SessionRules,
        clock: Clock,
        observer: Observer,
        reroute: Rerouter | None = None,
        after: HubSession | None = None,
        history: HubHistory | None = None,
    ) -> None:
        """``after``: the session of the turn before, which may have left its chain open. ``history``: what the client has kept
        of earlier sessions' inputs; ``None``: nothing."""
        self.request = request
        self._route = route
        self._model = model
        self._rules = rules
        self._clock = clock
        self._observe = observer
        self._history = history
        self.stays_open = False
        """Whether the chain stays open at the end, for the next turn."""
        self._chain = self.chain_kind(request, key, client, connections, clock, rules.recovery)
        self._is_held = False
        """Whether the request has ended, and its chain is still open."""
        if after is not None and not after._is_held:
            after = None
        if after is not None:
            self._chain, self._chain.request = after._chain, request
        self._recovery = Recovery(request, self._chain, reroute, rules.recovery, model, clock, observer)
        self.hops: list[OpenHop] = [] if after is None else after.hops
        self.tokens: list[int] = []
        """The ids of the prompt and of the output so far, once it is served."""
        self._n_reused = self._n_filled = 0
        """Tokens of the prompt that are not computed, because all servers have kept their caches; those that hops were sent for
        it, of all hops."""
        self._was_open = False
        self._round_s: RoundTimes = () if after is None else after._round_s
        """How long a round takes on the chain, as the coordinator expects it."""
        self._steps: list[int] = [] if after is None else list(after._steps)
        """The number of tokens of every step so far, those that are away included."""
        self._n_done = self._position = 0
        """Output tokens so far, and the position of the next step."""
        self._seen = Seen()
        self._rounds: Rounds | None = None

    async def run(self) -> None:
        """Serves the request; returns when it has all its tokens.

        Raises ``SessionError`` with the reason if it cannot be completed.
        """
        pages: bytes | None = None
        try:
            request, size = self.request, self._rules.kept_tokens
            sequence = self._model.sequence(request)
            self.tokens = sequence.tokens
            if size is not None:
                self._chain.pages = page_ids(
                    self.tokens, size, min(MAX_PAGES, reusable(len(self.tokens), size))
                )
            ready_at_s = self._go_on() if self.hops else await self._begin()
            await self._clock.sleep_until_s(ready_at_s)
            self._rounds = self._rounds_of(sequence)
            finished_at_s = await self._generate(sequence, self._rounds, ready_at_s)
            if size is not None:  # the last token of the output was never sent
                pages = page_ids(self.tokens[:-1], size)
                if self._history is not None:
                    self._keep_inputs(self._history, size, pages)
            self._is_held = self.stays_open
            logged = pages if request.generation.prompt else None
            self._observe(Completed(request.index, finished_at_s, logged or b""))
        finally:
            try:
                if self._rounds is not None:
                    await self._rounds.end()
            finally:  # also if it is cancelled while it waits for its rounds
                if not self._is_held:
                    await self._close(pages)

    async def release(self) -> None:
        """Closes the chain if it is open for the next turn."""
        if self._is_held:
            self._is_held = False
            await self._close()

    async def _close(self, pages: bytes | None = None) -> None:
        try:
            await self._chain.close(self.hops, pages)
        finally:
            self._chain.end()

    async def _begin(self) -> float:
        """Opens a chain; returns when the prompt can be sent."""
        request, rules = self.request, self._rules
        attempt_at_s = await self._open_chain(request.n_input_tokens, request.arrival_at_s)
        opened_at_s = self._clock.now_s()
        self._observe(Opening(request.index, attempt_at_s, opened_at_s))
        ready_at_s = admission.ready_at_s(attempt_at_s, opened_at_s, rules.initial_delay_s, rules.setup_s)
        if rules.kept_tokens is not None:
            self._n_reused = min(hop.n_found for hop in self.hops)
            if self._history is not None:
                await self._fill(self._history, rules.kept_tokens)
        if rules.kept_tokens is not None or rules.hold_s is not None:
            self._observe(Reused(request.index, self._clock.now_s(), self._n_reused, n_filled=self._n_filled))
        return max(ready_at_s, self._clock.now_s())

    async def _fill(self, history: HubHistory, size: int) -> None:
        """Sends hops what they lack of the prompt's pages, as far as all hops can have them: each computes it alone.

        A hop that fails now fails at its next step, too, and is replaced then.
        """
        ids = split_ids(self._chain.pages)
        self._n_reused, lacking = history.reach({hop.first: hop.n_found for hop in self.hops}, ids, size)

        async def fill(hop: OpenHop, pages: list[bytes]) -> None:
            rows, n_tokens = self._model.recall(b"".join(pages)), size * len(pages)
            hop.n_cached = hop.n_found
            self._n_filled += n_tokens
            try:
                await self._chain.step(hop, n_tokens, rows, wire.Fill)
            except HopFailed:
                self._chain.forget(hop)

        await asyncio.gather(*(fill(hop, lacking[hop.first]) for hop in self.hops if hop.first in lacking))

    def _keep_inputs(self, history: HubHistory, size: int, pages: bytes) -> None:
        """Keeps the inputs of all hops that have them."""
        for hop in self.hops:
            n_tokens = hop.n_cached - hop.begins_at
            for number, page_id in enumerate(split_ids(pages)):
                begin = number * size - hop.begins_at
                if 0 <= begin <= n_tokens - size:
                    each = len(hop.inputs) // n_tokens
                    inputs = bytes(hop.inputs[begin * each : (begin + size) * each])
                    history.add(hop.first, page_id, inputs, size * self._model.token_bytes)

    def _go_on(self) -> float:
        """Begins on the chain that the turn before has left open; returns when the prompt can be sent: now."""
        index, now_s = self.request.index, self._clock.now_s()
        self._was_open = True
        self._n_reused = self.hops[0].n_cached
        self._observe(Admitted(index, now_s, [Hop(hop.server, hop.first, hop.last) for hop in self.hops]))
        self._observe(Opening(index, now_s, now_s))
        self._observe(Reused(index, now_s, self._n_reused, was_open=True))
        return now_s

    async def _open_chain(
        self, first_tokens: int, since_s: float, n_done: int = 0, *, is_replacement: bool = False
    ) -> float:
        """Asks for routes until a chain admits the session. Returns the start of that attempt.

        The first step has ``first_tokens`` tokens. The time to give up counts from ``since_s``. Raises
        ``SessionError`` when it gives up.
        """
        rules, index = self._rules, self.request.index
        backoff = rules.backoff
        give_up_s = backoff.give_up_s, rules.recovery.give_up_s
        attempts = admission.Attempts(backoff.waits_s(index), since_s, *give_up_s)
        while True:
            asked_at_s = self._clock.now_s()
            answer = await self._route(self.request, attempts.n, n_done)
            attempt_at_s = self._clock.now_s()
            if answer is None:
                refusal = Refusal(-1, admission.NO_ROUTE, (), (), is_final=True)
            else:
                asked_s = attempt_at_s - asked_at_s - answer.queued_s
                took_s = answer.wait_s, answer.decision_s, asked_s, answer.queued_s, answer.cost_s
                self._observe(Routed(index, attempt_at_s, answer.hops, *took_s))
                opened = await self._chain.open(answer.hops, first_tokens, is_replacement=is_replacement)
                if not isinstance(opened, Refusal):
                    self.hops, self._round_s = opened, answer.round_s
                    self._observe(Admitted(index, self._clock.now_s(), answer.hops))
                    return attempt_at_s
                refusal = opened
            server, reason, refused, broken, is_final = refusal
            self._recovery.unreachable(broken)
            now_s = self._clock.now_s()
            backoff_s = attempts.failed(now_s, reason, is_final=is_final or bool(broken))
            self._observe(Rejected(index, now_s, server, reason, backoff_s, list(refused), list(broken)))
            await self._clock.sleep_until_s(on_tick(now_s + backoff_s))

    async def _start_over(self, preempted: Preempted, n_done: int) -> bytes:
        """Releases the other hops and waits for a new chain, as at first.

        Returns all hidden states, to replay them.
        """
        history = self._model.recall(bytes(self.hops[0].inputs))
        n_all, index = len(history) // self._model.token_bytes, self.request.index
        now_s = self._clock.now_s()
        self._observe(records.Preempted(index, now_s, preempted.hop.server, preempted.hop.n_cached))
        for hop in self.hops:
            self._chain.forget(hop)
        self.hops = []
        await self._open_chain(n_all, now_s, n_done, is_replacement=True)
        self._recovery.starts_over(self.hops)
        self._observe(Resumed(index, self._clock.now_s(), n_all))
        return history

    def _reuse(self, prompt: bytes) -> bytes:
        """Returns the hidden states of a prompt that the servers have not kept the caches of."""
        reused, rest = self._n_reused, prompt[self._n_reused * self._model.token_bytes :]
        if self._was_open:  # the inputs of its hops are there
            return rest
        for hop in self.hops:
            hop.n_cached = hop.begins_at = reused
        if self._history is not None and (size := self._rules.kept_tokens) is not None:
            ids = split_ids(self._chain.pages)[: reused // size]
            for hop in self.hops[1:]:
                hop.begins_at, known = self._history.begins_at(hop.first, ids, reused)
                hop.inputs = bytearray(b"".join(known))
        first = self.hops[0]
        first.inputs, first.begins_at = bytearray(self._model.remember(prompt[: len(prompt) - len(rest)])), 0
        return rest

    def _rounds_of(self, sequence: TokenSequence) -> Rounds:
        """Returns the steps that the request takes, and how many of them may be away at a time."""
        decoding = self._model.decoding

        async def draft(behind: Round | None) -> Round | None:
            n_left, position, n_drafted = self.request.n_output_tokens - self._n_done, self._position, 0
            if behind is not None:
                if not self._n_done:
                    return None  # nothing is drafted behind a prompt
                position = behind.end
                n_left -= position - self._position
                if n_left < 1:
                    return None
            if decoding is not None and self._n_done:
                most = decoding.n_drafted(n_left, self._round_s, self._seen)
                if behind is not None and not most and n_left > 1:
                    return None  # drafts do not pay
                drafted = await (sequence.draft(most) if behind is None else sequence.draft_ahead(most))
                if drafted is None:
                    return None
                n_drafted = drafted
            payload = await sequence.embed()
            n_tokens = len(payload) // self._model.token_bytes
            if self._n_reused and not position:
                position, payload = self._n_reused, self._reuse(payload)
                n_tokens -= position
            return Round(position, n_tokens, n_drafted, payload)

        def void(n_rounds: int, position: int, n_kept: int) -> None:
            sequence.forget(n_kept)
            if n_rounds:
                del self._steps[-n_rounds:]
                self._go_back(position)

        most = 1 if decoding is None else decoding.in_flight
        return Rounds(most, draft, sequence.goes_on, self._sent, void)

    async def _generate(self, sequence: TokenSequence, rounds: Rounds, ready_at_s: float) -> float:
        """Prefills and decode; returns the instant of the last token."""
        while self._n_done < self.request.n_output_tokens and not sequence.ended:
            is_round = self._n_done > 0
            round_, (answer, timings) = await rounds.next()
            token_ids = await sequence.take(answer)
            finished_at_s = self._clock.now_s()
            for token_id in token_ids:
                self._observe(
                    Token(self.request.index, finished_at_s, self._n_done, ready_at_s, timings, token_id)
                )
                self._n_done += 1
                ready_at_s, timings = finished_at_s, []
            n_void = round_.n_tokens - len(token_ids) if is_round else 0
            self._position = round_.end - n_void
            n_given_up = await rounds.taken(round_, all_agreed=not n_void and not sequence.ended)
            if self._model.decoding is not None and is_round:
                drafted = round_.n_drafted, sequence.n_accepted
                self._observe(Drafted(self.request.index, finished_at_s, *drafted, n_given_up))
                self._seen.add(*drafted)
            if n_void:
                self._steps[-1] -= n_void
                self._go_back(self._position)
        return ready_at_s

    def _go_back(self, position: int) -> None:
        """Makes void what the chain has seen from ``position`` on: the next step takes its place."""
        for hop in self.hops:
            n_held = hop.n_cached - hop.begins_at
            if hop.n_cached > position:
                del hop.inputs[len(hop.inputs) * (position - hop.begins_at) // n_held :]
                hop.n_cached = position

    @contextlib.asynccontextmanager
    async def _sending(self, round_: Round, hop: OpenHop, rows: bytes) -> AsyncIterator[None]:
        """Has ``hop`` among its inputs what the body sends it, unless the round is given up meanwhile.

        If the hop is lost, waits until the round is the only one that is away.
        """
        assert self._rounds is not None, "it was sent"
        n_before = len(hop.inputs)
        hop.inputs += self._model.remember(rows)
        try:
            try:
                yield
            except HopFailed:
                await self._rounds.alone(round_)
                raise
        except asyncio.CancelledError:
            del hop.inputs[n_before:]
            hop.is_given_up = True
            raise

    def _sent(self, round_: Round) -> Coroutine[Any, Any, Answer]:
        """Notes a step that is about to be sent; returns what sends it."""
        is_whole = not self._n_done and not self._was_open  # of a prompt, a replay sends all
        self._steps.append(round_.end if is_whole else round_.n_tokens)
        return self._step(round_)

    async def _step(self, round_: Round) -> Answer:
        """Sends a round through the chain; hops that fail on the way are replaced.

        Returns the last block's hidden states, and a record per message.
        """
        timings: list[HopRecord] = []
        rows, at = round_.payload, 0
        while at < len(self.hops):
            await round_.has_way(at)
            hop = self.hops[at]
            # All of them for a replacement, else those of this step.
            n_new = round_.end - hop.n_cached - hop.n_away
            rows = rows[-n_new * self._model.token_bytes :]
            try:
                async with self._sending(round_, hop, rows):
                    rows, new_timings = await self._pass(hop, n_new, rows, round_, at)
            except Preempted as failure:
                rows, at = await self._start_over(failure, self._n_done), 0
                continue
            except HopFailed as failure:
                if any(each.begins_at for each in self.hops):
                    at = 0
                rows = await self._recovery.replace(self.hops, at, failure, round_.position, self._n_done)
                continue
            timings += new_timings
            round_.passed(at)
            at += 1
            self._recovery.passed(hop, self.hops[at] if at < len(self.hops) else None, n_new)
        return rows[-round_.n_tokens * self._model.token_bytes :], timings

    def _parts(self, hop: OpenHop, n_new: int) -> list[int]:
        """Returns the tokens per message for ``n_new`` hidden states to ``hop``.

        They go in one message, except for a replay step by step: it repeats the steps as they were.
        """
        in_steps = hop.lacks_history and self._rules.recovery.replay == "step_by_step"
        return self._steps if in_steps else [n_new]

    async def _pass(
        self, hop: OpenHop, n_new: int, rows: bytes, round_: Round, at: int
    ) -> tuple[bytes, list[HopRecord]]:
        """Sends ``n_new`` hidden states of a round to ``hop``, number ``at``. Returns its results, and a record per message.

        Raises ``HopFailed``.
        """
        is_replay = hop.lacks_history
        timings: list[HopRecord] = []
        answers, begin = [], 0
        for n_tokens in self._parts(hop, n_new):
            end = begin + n_tokens * self._model.token_bytes
            out, sent_at_s, received_at_s = await self._chain.step(
                hop, n_tokens, rows[begin:end], on_left=partial(round_.left, at)
            )
            await round_.comes_behind(at)
            instants = sent_at_s, out.arrived_at_s, out.departed_at_s, received_at_s
            n_bytes = end - begin, len(out.payload)
            n_replayed = n_tokens if is_replay else 0
            timings.append(
                HopRecord(hop.server, hop.first, hop.last, *instants, *n_bytes, n_replayed, out.together)
            )
            hop.n_cached += n_tokens
            answers.append(out.payload)
            begin = end
        return b"".join(answers), timings

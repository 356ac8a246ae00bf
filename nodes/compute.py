"""Compute backends: they run a session's hidden states through a server's blocks.

``StubCompute`` takes exactly the time of the hardware profile and returns values that can be verified.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, Protocol

from nodes.batching import Batch, Batches, Composition, FactorAt, OneByOne, Step, StepTimes, Work, is_decode
from nodes.clock import Clock, on_tick
from nodes.digest import apply_to_rows, read_rows, write_rows
from policies.problem import Batching


class ComputeError(Exception):
    """The backend failed: blocks could not be loaded, or no memory is left. The message is for the user."""


class Computed(NamedTuple):
    """Result of a step: hidden states after the session's blocks, and the batch in which the step ended."""

    payload: bytes
    together: Composition = Composition()


class Compute(Protocol):
    """The interface of compute backends."""

    token_bytes: int
    factor: float
    """How many times as long as usual steps take that begin from now on; the server computes nothing else meanwhile."""

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> Any:
        """Returns the state of a new session on blocks ``[first, last)``.

        Raises ``ComputeError`` without memory.
        """
        ...

    def opening(self, session: Any) -> Awaitable[None] | None:
        """Returns an awaitable that ends once the session has its memory; ``None`` if it has it already.

        Awaiting it raises ``ComputeError`` if there is no memory after all. Until then the session can be
        closed, and its steps wait. Cancelling the wait does not end the session.
        """
        ...

    def grow(self, session: Any, max_tokens: int) -> None:
        """Allocates memory for ``max_tokens`` in total. No step of the session may run.

        Raises ``ComputeError``.
        """
        ...

    def close_session(self, session: Any) -> None:
        """Frees the session's memory; a step of it may still be running."""
        ...

    def kept(self, session: Any, tokens: range) -> Any:
        """Returns the cache of a page of a session that is about to be closed, for ``reuse``.

        A step that was given up may still run, but of later tokens only.
        """
        ...

    def evicted(self, page: Any) -> None:
        """Frees what ``kept`` has returned."""
        ...

    def reuse(self, session: Any, pages: Sequence[Any]) -> None:
        """Gives a new session the cache of its first tokens: ``pages``, as ``kept`` has returned them."""
        ...

    async def step(
        self, session: Any, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        """Computes a step: ``payload`` holds ``n_tokens`` hidden states from ``position`` on.

        Position 0 is the prefill. A position before the end of the session's caches makes what they have from there
        on void. Raises ``ComputeError``.
        """
        ...

    async def host(self, first: int, last: int) -> None:
        """Holds blocks ``[first, last)`` and no others. Sessions on other blocks must have been closed.

        Raises ``ComputeError`` if they cannot be loaded.
        """
        ...

    def memory(self) -> dict[str, float]:
        """Returns the bytes really in use, by purpose (``blocks_bytes``, ``cache_bytes``, ...), if any."""
        ...

    def close(self) -> None: ...


async def open_session(compute: Compute, client: str, first: int, last: int, max_tokens: int) -> Any:
    """Opens a session and waits for its memory. Raises ``ComputeError``."""
    session = compute.new_session(client, first, last, max_tokens)
    if (opening := compute.opening(session)) is not None:
        await opening
    return session


@dataclass(frozen=True)
class StubProfile:
    """Times of one server's steps, in scenario seconds.

    A step takes the server as long as ``times`` say. Its answer then waits for the client's overhead from the
    calibration, while the server is free again: ``token_overhead_s[client]`` for a decode, be it a token or a
    round of drafts, and for a prompt of l tokens base + slope * l with (base, slope) = ``input_overhead_s[client]``.

    ``batching``: "serial" computes one step at a time, as PETALS' server does. "none" lets sessions slow each
    other by the contention of ``times`` only (see ``Turns``). "continuous" computes the steps that wait
    together (see ``nodes.batching``), of a prompt at most ``chunk_tokens`` tokens at once.
    """

    token_bytes: int
    times: StepTimes
    token_overhead_s: Mapping[str, float] = field(default_factory=dict)
    input_overhead_s: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    batching: Batching = "none"
    chunk_tokens: int | None = None
    kept_tokens: int | None = None
    """Tokens of a page of cache that is kept for later sessions; ``None``: none is."""

    def batches(self, factor_at: FactorAt) -> Batches | None:
        """Returns an empty server's queue of steps; ``None``: steps do not wait for each other."""
        if self.batching == "none":
            return None
        if self.batching == "serial":
            return OneByOne(self.times, factor_at)
        return Batches(self.times, self.chunk_tokens, factor_at)

    def overhead_s(self, client: str, position: int, n_tokens: int) -> float:
        if is_decode(position, n_tokens):
            return self.token_overhead_s.get(client, 0.0)
        base, slope = self.input_overhead_s.get(client, (0.0, 0.0))
        return max(0.0, base + slope * n_tokens)


class Turns:
    """How long steps take where all run at once; steps are added in the order of their arrival.

    A step takes ``1 + contention_ratio * n`` times as long if n others are running when it arrives. Steps that
    come or end later do not change it, so its end is known at once.
    """

    def __init__(self, contention_ratio: float) -> None:
        self._contention_ratio = contention_ratio
        self._ends_at_s: list[float] = []

    def take(self, arrived_at_s: float, alone_s: float) -> float:
        """Adds a step that takes ``alone_s`` by itself. Returns how long it takes."""
        if not self._contention_ratio:
            return alone_s
        while self._ends_at_s and self._ends_at_s[0] <= arrived_at_s:
            heappop(self._ends_at_s)
        busy_s = alone_s * (1 + self._contention_ratio * len(self._ends_at_s))
        heappush(self._ends_at_s, arrived_at_s + busy_s)
        return busy_s

    def leave(self, end_at_s: float) -> None:
        """Ends early a step that would have ended at ``end_at_s``: later ones do not meet it."""
        if end_at_s in self._ends_at_s:
            self._ends_at_s.remove(end_at_s)
            heapify(self._ends_at_s)


class _StubSession:
    """A session's caches, and its inputs from ``origin`` on, so that it can go back.

    ``start`` are the caches at ``origin``; before the last step of several tokens, at position and caches, they were
    ``before``. ``pages``: the caches at the end of each whole page of ``size`` tokens, if pages are kept. ``free_at_s``: when its
    last step ends, also if that was given up.
    """

    __slots__ = (
        "before",
        "caches",
        "client",
        "first",
        "free_at_s",
        "origin",
        "pages",
        "seen",
        "size",
        "start",
    )

    def __init__(self, client: str, first: int, last: int, size: int | None) -> None:
        self.client = client
        self.first = first
        self.caches = [0] * (last - first)
        self.size = size
        self.pages: list[list[int]] = []
        self.free_at_s = 0.0
        self.begin(0)

    def begin(self, origin: int) -> None:
        """Begins to see inputs at position ``origin``, with the caches as they are."""
        self.origin, self.start = origin, tuple(self.caches)
        self.before = origin, self.start
        self.seen = array("Q")  # a list would take five times as much for long prompts

    def apply(self, position: int, values: list[int]) -> list[int]:
        """Returns the results of ``values`` from ``position`` on; goes back there if it has seen more."""
        if position < self.origin + len(self.seen):
            if self.before[0] > position:
                self.before = self.origin, self.start
            before, caches = self.before
            self.caches[:] = caches
            if before < position:
                apply_to_rows(
                    self.seen[before - self.origin : position - self.origin], self.first, self.caches
                )
            del self.seen[position - self.origin :]
            if self.size is not None:
                del self.pages[position // self.size :]
        if len(values) > 1:
            self.before = position, tuple(self.caches)
        self.seen.extend(values)
        if self.size is None:
            return apply_to_rows(values, self.first, self.caches)
        ends = range(self.size - 1 - position % self.size, len(values), self.size)
        return apply_to_rows(values, self.first, self.caches, ends, self.pages)


class StubCompute:
    """The calibrated timing stub: no GPU, exact times, and values that show whether the chain was right.

    A step ends at an absolute instant that follows from arrivals alone, so an error in waiting for one step
    never shifts the next.
    """

    def __init__(self, profile: StubProfile, clock: Clock) -> None:
        self.profile = profile
        self.token_bytes = profile.token_bytes
        self.factor = 1.0
        """How many times as long as the profile says steps take that begin from now on."""
        self._clock = clock
        self._turns = Turns(profile.times.contention_ratio)
        batches = profile.batches(lambda at_s: self.factor)
        self._batcher = None if batches is None else Batcher(batches, partial(self._pass, batches))

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> _StubSession:
        return _StubSession(client, first, last, self.profile.kept_tokens)

    def opening(self, session: _StubSession) -> None:
        return None

    def grow(self, session: _StubSession, max_tokens: int) -> None:
        pass

    def close_session(self, session: _StubSession) -> None:
        pass

    def kept(self, session: _StubSession, tokens: range) -> list[int]:
        return session.pages[tokens.start // len(tokens)]

    def evicted(self, page: list[int]) -> None:
        pass

    def reuse(self, session: _StubSession, pages: Sequence[list[int]]) -> None:
        assert session.size is not None, "only then pages are kept"
        session.pages = list(pages)
        session.caches = list(pages[-1])
        session.begin(len(pages) * session.size)

    async def host(self, first: int, last: int) -> None:
        pass

    def memory(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        if self._batcher is not None:
            self._batcher.close()

    async def step(
        self, session: _StubSession, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        profile = self.profile
        blocks = range(session.first, session.first + len(session.caches))
        values = session.apply(position, read_rows(payload, self.token_bytes))
        answer = write_rows(values, self.token_bytes)
        together = Composition()
        overhead_s = profile.overhead_s(session.client, position, n_tokens)
        if self._batcher is None:
            alone_s = profile.times.step_s(position, n_tokens, blocks) * self.factor
            begins_at_s = max(arrived_at_s, session.free_at_s)
            ends_at_s = session.free_at_s = begins_at_s + self._turns.take(arrived_at_s, alone_s)
            try:
                await self._clock.sleep_until_s(on_tick(on_tick(ends_at_s) + overhead_s))
            except asyncio.CancelledError:  # a server looks before each block whether anybody still waits
                self._turns.leave(ends_at_s)
                block_s = (ends_at_s - begins_at_s) / len(blocks)
                if block_s:
                    n_begun = math.ceil(max(self._clock.now_s() - begins_at_s, 0.0) / block_s)
                    session.free_at_s = min(on_tick(begins_at_s + n_begun * block_s), ends_at_s)
                raise
            return Computed(answer, together)
        step = Step(arrived_at_s, position, n_tokens, blocks)
        batch = await self._batcher.run(step)
        if profile.batching == "continuous":
            together = batch.together
        await self._clock.sleep_until_s(on_tick(batch.end_at_s + overhead_s))
        return Computed(answer, together)

    async def _pass(self, batches: Batches, work: Work) -> float:
        end_at_s = batches.ends_at_s(work)
        await self._clock.sleep_until_s(end_at_s)
        return end_at_s


class Batcher:
    """Runs a server's batches, one after another, while steps wait.

    ``compute`` carries a batch out and returns the instant at which it ended.
    """

    def __init__(self, batches: Batches, compute: Callable[[Work], Awaitable[float]]) -> None:
        self._batches = batches
        self._compute = compute
        self._waiting: dict[Step, asyncio.Future[Batch]] = {}
        self._work: asyncio.Task[None] | None = None

    async def run(self, step: Step) -> Batch:
        """Waits until a batch ends ``step``; returns that batch. On cancellation the step is removed."""
        ended: asyncio.Future[Batch] = asyncio.get_running_loop().create_future()
        self._waiting[step] = ended
        self._batches.add(step)
        if self._work is None:
            self._work = asyncio.create_task(self._run())
        try:
            return await ended
        finally:
            if self._waiting.pop(step, None) is not None:
                self._batches.remove(step)

    def fail(self, step: Step, error: BaseException) -> None:
        """Makes ``run`` raise ``error`` for ``step``. What is left of the step is not computed."""
        if (ended := self._waiting.pop(step, None)) is not None and not ended.done():
            ended.set_exception(error)
        self._batches.remove(step)

    async def _run(self) -> None:
        while (work := self._batches.take()) is not None:
            batch = self._batches.end(work, await self._compute(work))
            for step in batch.ended:
                if (ended := self._waiting.pop(step, None)) is not None and not ended.done():
                    ended.set_result(batch)
        self._work = None

    def close(self) -> None:
        if self._work is not None:
            self._work.cancel()

"""Continuous batching: which steps a server computes together, and how long that takes.

The stub, the simulator, the model and real blocks follow this one rule. With a law of times, the arrivals
determine when each step ends. Real blocks take the time that they need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from nodes.clock import on_tick
from policies.decoding import MOST_TOKENS

FactorAt = Callable[[float], float]
"""How many times as long as its law says a server takes for what it begins at an instant, in scenario seconds."""


class BatchTimes(Protocol):
    """How long a server's steps take: ``policies.steps.StepLaw``."""

    def batch_s(
        self, blocks: range, positions: Sequence[int], prompt: range, sizes: Sequence[int] = ()
    ) -> float:
        """Decodes steps at ``positions`` and the tokens ``prompt`` of one prompt (may be none), computed together.

        ``sizes`` are the decodes' tokens; empty: one each.
        """
        ...


class StepTimes(BatchTimes, Protocol):
    """Those of a server that may also compute steps on their own."""

    @property
    def contention_ratio(self) -> float:
        """While n other sessions compute, a step takes ``1 + contention_ratio n`` times as long."""
        ...

    def step_s(self, position: int, n_tokens: int, blocks: range) -> float:
        """A step alone: ``n_tokens`` at ``position``, which is the number of tokens cached before it."""
        ...


def is_decode(position: int, n_tokens: int) -> bool:
    """Returns whether a step is no prompt: one token, or as few as a round of speculative decoding may have.

    More tokens behind cached ones are the rest of a prompt whose beginning was kept.
    """
    return position > 0 and n_tokens <= MOST_TOKENS + 1


@dataclass(slots=True, eq=False)
class Step:
    """One session's step that waits or is computed: ``n_tokens`` at ``position`` through ``blocks``."""

    arrived_at_s: float
    position: int
    n_tokens: int
    blocks: range
    n_done: int = 0
    """Tokens of a prompt that earlier chunks have computed."""

    @property
    def n_blocks(self) -> int:
        return len(self.blocks)

    @property
    def is_decode(self) -> bool:
        return is_decode(self.position, self.n_tokens)


class Work(NamedTuple):
    """What is computed together from ``start_at_s`` on: ``decodes``, and tokens ``chunk`` of ``prompt``."""

    start_at_s: float
    decodes: tuple[Step, ...]
    prompt: Step | None
    chunk: range

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.decodes if self.prompt is None else (*self.decodes, self.prompt)

    @property
    def ended(self) -> tuple[Step, ...]:
        """Those of ``steps`` that end with this batch."""
        prompt = self.prompt
        is_left = prompt is not None and self.chunk.stop < prompt.position + prompt.n_tokens
        return self.decodes if is_left else self.steps

    @property
    def together(self) -> Composition:
        return Composition(
            len(self.steps),
            sum(step.n_tokens for step in self.decodes) + len(self.chunk),
            sum(step.position for step in self.decodes),
            self.chunk.stop,
            max(step.n_blocks for step in self.steps),
            self.start_at_s,
        )


class Composition(NamedTuple):
    """The numbers of a batch that determine its time by a law of times.

    All are 0 if a server makes no batches.

    ``steps``: sessions' steps, at most one of them a prompt's. ``tokens``: one per decode (with speculative decoding
    those of a round), and those of the prompt or its chunk. ``context_tokens``: tokens in the decodes' caches, in total. The prompt's tokens end
    before position ``prompt_end`` (0: no prompt). ``blocks``: the most blocks that a step has.
    ``began_at_s``: scenario seconds.
    """

    steps: int = 0
    tokens: int = 0
    context_tokens: int = 0
    prompt_end: int = 0
    blocks: int = 0
    began_at_s: float = 0.0

    @property
    def decodes(self) -> int:
        """How many of ``steps`` are no prompt's."""
        return self.steps - (self.prompt_end > 0)

    @property
    def prompt(self) -> range:
        """The positions of the prompt's tokens; none if there is none."""
        return range(self.prompt_end - (self.tokens - self.decodes), self.prompt_end)


class Batch(NamedTuple):
    """A batch that ended at ``end_at_s``. ``ended`` are the steps that ended with it."""

    together: Composition
    end_at_s: float
    ended: tuple[Step, ...]


class Batches:
    """A server's steps under continuous batching.

    A free server begins as soon as a step arrives, with that one. A server that was busy takes all decode steps
    that arrived before it became free, and of prompts the one that came first (or the next ``chunk_tokens`` tokens
    of it). Steps that arrive at the very instant wait for the next batch, so that the order of events at an
    instant does not matter. A replay counts as a prompt, and a draft that is verified as a decode. Every block takes as long as the
    law says of all of them together, and a batch has as many blocks as the longest of its steps.
    """

    def __init__(
        self,
        times: BatchTimes | None,
        chunk_tokens: int | None = None,
        factor_at: FactorAt = lambda at_s: 1.0,
    ) -> None:
        """Without ``times``, the caller computes what ``take`` returns, and passes its end to ``end``."""
        self._times = times
        self._chunk_tokens = chunk_tokens
        self._factor_at = factor_at
        self._decodes: deque[Step] = deque()
        self._prompts: deque[Step] = deque()
        self._free_at_s = 0.0

    def anew(self) -> Batches:
        """Returns those of the same server after it has ended and begun again."""
        return Batches(self._times, self._chunk_tokens, self._factor_at)

    def add(self, step: Step) -> None:
        """Adds a step that waits. Steps are added in the order of their arrival."""
        (self._decodes if step.is_decode else self._prompts).append(step)

    def remove(self, step: Step) -> None:
        """Forgets a step that nobody waits for; nothing if its last batch has begun."""
        waiting = self._decodes if step.is_decode else self._prompts
        if step in waiting:
            waiting.remove(step)

    def start_at_s(self) -> float | None:
        """Returns when the next batch begins; ``None`` if no step waits."""
        first = self._first()
        return None if first is None else max(self._free_at_s, first.arrived_at_s)

    def _first(self) -> Step | None:
        heads = [waiting[0] for waiting in (self._decodes, self._prompts) if waiting]
        return min(heads, key=lambda step: step.arrived_at_s, default=None)

    def next(self) -> Batch | None:
        """Returns the next batch, which takes as long as the law says; ``None`` if no step waits.

        All steps that arrived before its start must have been added.
        """
        work = self.take()
        return None if work is None else self.end(work, self.ends_at_s(work))

    def take(self) -> Work | None:
        """Returns what to compute next; ``None`` if no step waits. Call ``end`` before the next ``take``."""
        first = self._first()
        if first is None:
            return None
        start_at_s = self._free_at_s
        decodes, prompt = [], None
        if first.arrived_at_s >= start_at_s:  # the server was free
            start_at_s = first.arrived_at_s
            if first.is_decode:
                decodes.append(self._decodes.popleft())
            else:
                prompt = first
        else:
            while self._decodes and self._decodes[0].arrived_at_s < start_at_s:
                decodes.append(self._decodes.popleft())
            if self._prompts and self._prompts[0].arrived_at_s < start_at_s:
                prompt = self._prompts[0]
        return Work(start_at_s, tuple(decodes), prompt, range(0) if prompt is None else self._chunk(prompt))

    def _chunk(self, prompt: Step) -> range:
        """Returns the positions of the next chunk of ``prompt``. After its last one it no longer waits."""
        begin, end = prompt.position + prompt.n_done, prompt.position + prompt.n_tokens
        if self._chunk_tokens is not None:
            end = min(end, begin + self._chunk_tokens)
        prompt.n_done += end - begin
        if prompt.n_done == prompt.n_tokens:
            self._prompts.popleft()
        return range(begin, end)

    def ends_at_s(self, work: Work) -> float:
        """Returns the instant at which ``work`` ends by the law."""
        assert self._times is not None, "a server with a law"
        blocks = max((step.blocks for step in work.steps), key=lambda blocks: (len(blocks), -blocks.start))
        positions, sizes = [s.position for s in work.decodes], [s.n_tokens for s in work.decodes]
        busy_s = self._times.batch_s(blocks, positions, work.chunk, sizes)
        return on_tick(work.start_at_s + busy_s * self._factor_at(work.start_at_s))

    def end(self, work: Work, end_at_s: float) -> Batch:
        """Ends ``work`` at ``end_at_s``: the server is free from then on. Returns its batch."""
        self._free_at_s = end_at_s
        return Batch(work.together, end_at_s, work.ended)


class OneByOne(Batches):
    """A server's steps one after another, in the order of their arrival: batches of one step."""

    def __init__(self, times: StepTimes, factor_at: FactorAt) -> None:
        super().__init__(times, factor_at=factor_at)
        self._step_s = times.step_s

    def add(self, step: Step) -> None:
        self._decodes.append(step)

    def remove(self, step: Step) -> None:
        if step in self._decodes:
            self._decodes.remove(step)

    def take(self) -> Work | None:
        if not self._decodes:
            return None
        step = self._decodes.popleft()
        return Work(max(self._free_at_s, step.arrived_at_s), (step,), None, range(0))

    def ends_at_s(self, work: Work) -> float:
        (step,) = work.decodes
        alone_s = self._step_s(step.position, step.n_tokens, step.blocks)
        return on_tick(work.start_at_s + alone_s * self._factor_at(work.start_at_s))


def batches_of(steps: Iterable[Step], batches: Batches) -> Iterator[Batch]:
    """Yields all batches of ``steps``, which must be in the order of their arrival."""
    coming = deque(steps)
    while True:
        start_at_s = batches.start_at_s()
        if start_at_s is None:
            if not coming:
                return
            batches.add(coming.popleft())
            continue
        while coming and coming[0].arrived_at_s < start_at_s:
            batches.add(coming.popleft())
        batch = batches.next()
        assert batch is not None, "something waits"
        yield batch

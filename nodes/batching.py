"""Continuous batching: which steps a server computes together, and how long that takes.

One rule for the stub, the simulator and the model: given when steps arrived, when each ends follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class BatchTimes(Protocol):
    """How long a server's steps take: ``policies.steps.StepLaw``."""

    def batch_s(self, n_blocks: int, positions: Sequence[int], prompt: range) -> float:
        """Decode steps at ``positions`` and the tokens ``prompt`` of one prompt (may be none), computed together."""
        ...


@dataclass(slots=True, eq=False)
class Step:
    """One session's step that waits or is computed: ``n_tokens`` at ``position`` through ``n_blocks`` blocks."""

    arrived_at_s: float
    position: int
    n_tokens: int
    n_blocks: int
    factor: float = 1.0
    """How many times as long as usual the server takes."""
    n_done: int = 0
    """Tokens of a prompt that earlier chunks have computed."""

    @property
    def is_decode(self) -> bool:
        return self.position > 0 and self.n_tokens == 1


class Batch(NamedTuple):
    """Steps that are computed together from ``start_at_s`` until ``end_at_s``; ``ended`` are those that end with it."""

    start_at_s: float
    end_at_s: float
    n_steps: int
    n_tokens: int
    ended: tuple[Step, ...]


class Batches:
    """A server's steps under continuous batching.

    A free server begins as soon as a step arrives, with that one. A server that was busy takes all decode steps
    that arrived before it became free, and of prompts the one that came first (or the next ``chunk_tokens`` tokens
    of it). Steps that arrive at the very instant wait for the next batch, so that the order of events at an
    instant does not matter. Several tokens at once (also of a replay) count as a prompt. Every block takes as long as the
    law says of all of them together, and a batch has as many blocks as the longest of its steps.
    """

    def __init__(self, times: BatchTimes, chunk_tokens: int | None = None) -> None:
        self._times = times
        self._chunk_tokens = chunk_tokens
        self._decodes: deque[Step] = deque()
        self._prompts: deque[Step] = deque()
        self._free_at_s = 0.0

    def add(self, step: Step) -> None:
        """Have ``step`` wait; steps come in the order of their arrival."""
        (self._decodes if step.is_decode else self._prompts).append(step)

    def remove(self, step: Step) -> None:
        """Forget a step that nobody waits for; nothing if its last batch has begun."""
        waiting = self._decodes if step.is_decode else self._prompts
        if step in waiting:
            waiting.remove(step)

    def start_at_s(self) -> float | None:
        """When the next batch begins; ``None``: nothing waits."""
        first = self._first()
        return None if first is None else max(self._free_at_s, first.arrived_at_s)

    def _first(self) -> Step | None:
        heads = [waiting[0] for waiting in (self._decodes, self._prompts) if waiting]
        return min(heads, key=lambda step: step.arrived_at_s, default=None)

    def next(self) -> Batch | None:
        """Take what is computed next; ``None``: nothing waits. All that arrived before its start has been added."""
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
        batch = self._composed(start_at_s, decodes, prompt)
        self._free_at_s = batch.end_at_s
        return batch

    def _composed(self, start_at_s: float, decodes: list[Step], prompt: Step | None) -> Batch:
        steps, chunk = tuple(decodes), range(0)
        if prompt is not None:
            begin, end = prompt.position + prompt.n_done, prompt.position + prompt.n_tokens
            if self._chunk_tokens is not None:
                end = min(end, begin + self._chunk_tokens)
            chunk = range(begin, end)
            prompt.n_done += len(chunk)
            steps = (*steps, prompt)
        n_blocks = max(step.n_blocks for step in steps)
        busy_s = self._times.batch_s(n_blocks, [step.position for step in decodes], chunk)
        busy_s *= max(step.factor for step in steps)
        ended = steps
        if prompt is not None:
            if prompt.n_done == prompt.n_tokens:
                self._prompts.popleft()
            else:
                ended = tuple(decodes)
        return Batch(start_at_s, start_at_s + busy_s, len(steps), len(decodes) + len(chunk), ended)


def batches_of(steps: Iterable[Step], batches: Batches) -> Iterator[Batch]:
    """All batches of ``steps``, which come in the order of their arrival."""
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

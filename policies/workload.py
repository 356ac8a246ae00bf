"""Requests with their arrivals, and how long a refused session waits before its next attempt."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from policies.problem import RequestSpec


@dataclass(frozen=True)
class Turn:
    """Where a request stands in a conversation; both numbers count from 0.

    ``after`` is the index of the request before it, whose prompt and output its own prompt begins with. It arrives
    ``think_s`` seconds after that one's last token. ``None``: it arrives at its own time.
    """

    conversation: int
    number: int
    after: int | None = None
    think_s: float = 0.0


@dataclass(frozen=True)
class RequestPlan:
    """One request of the workload. ``client`` is an index into ``problem.clients``.

    ``n_output_tokens`` is how many tokens are generated. Before that, only their maximum ``max_new_tokens``
    is known, and caches are reserved for it. ``None``: the exact number is known.

    ``turn`` ``None``: the request is no part of a conversation. If it comes after another one, ``arrival_at_s`` is the
    earliest instant possible.

    ``block_ids``: the ids of its prompt's blocks of ``block_tokens`` tokens, as far as they are known. Blocks of equal ids
    have equal tokens. ``answer_ids``: those of the further blocks, which have the rest of the prompt and the answer, without
    its last token; nobody knows them before the answer.
    """

    index: int
    client: int
    arrival_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    max_new_tokens: int | None = None
    turn: Turn | None = None
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    answer_ids: tuple[int, ...] = ()

    @property
    def known(self) -> RequestSpec:
        """The request as policies, admission and servers may know it, with the output's maximum."""
        most = self.n_output_tokens if self.max_new_tokens is None else self.max_new_tokens
        return RequestSpec(self.client, self.n_input_tokens, most)

    @property
    def served(self) -> RequestSpec:
        """The request as it is served in the end, with its real output."""
        return RequestSpec(self.client, self.n_input_tokens, self.n_output_tokens)


@dataclass(frozen=True)
class Backoff:
    """Waits between attempts to open a session: ``first_s``, then doubled each time up to ``max_s``.

    A request without room ``give_up_s`` after its arrival fails (0: never). ``jitter_ratio`` j, from 0 to 1,
    makes each wait (1 - j) to (1 + j) times as long, drawn from a random stream of ``seed`` and the request.
    """

    first_s: float = 1.0
    max_s: float = 60.0
    give_up_s: float = 0.0
    jitter_ratio: float = 0.0
    seed: int = 0

    def waits_s(self, request: int) -> Iterator[float]:
        """Yields the seconds that request number ``request`` waits after each refusal."""
        wait_s, jitter = self.first_s, self.jitter_ratio
        rng = random.Random(f"{self.seed}:backoff:{request}") if jitter else None
        while True:
            yield wait_s if rng is None else wait_s * (1 + jitter * rng.uniform(-1, 1))
            wait_s = min(2 * wait_s, self.max_s)


@dataclass(frozen=True)
class QueueRules:
    """How requests wait in the coordinator's queue.

    ``kind``: with "fifo" only the first request may start. With "backfill" any request with room may start,
    until one has waited ``age_s``: then none may start before it. A request that is ``give_up_s`` old leaves
    the queue without room; it is refused and gives up. The coordinator goes through the queue when a session
    ends, and at the latest every ``look_again_s``.
    """

    kind: Literal["fifo", "backfill"]
    age_s: float
    give_up_s: float
    look_again_s: float


def longest_prompt(requests: Iterable[RequestPlan]) -> int:
    """Returns the input tokens of the longest prompt of ``requests``; 0 if there is none."""
    return max((request.n_input_tokens for request in requests), default=0)


def longest_tokens(requests: Iterable[RequestPlan]) -> int:
    """Returns the tokens, input and output, of the longest of ``requests``; 0 if there is none."""
    return max((request.n_input_tokens + request.n_output_tokens for request in requests), default=0)

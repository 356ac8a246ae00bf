"""What arrives when, and how long a refused session waits before it asks again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from policies.problem import RequestSpec


@dataclass(frozen=True)
class RequestPlan:
    """One request of the workload. ``client`` indexes ``problem.clients``.

    ``n_output_tokens`` come. What is known of that before they have is ``max_new_tokens``, for which caches are
    reserved; ``None``: it is known exactly.
    """

    index: int
    client: int
    arrival_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    max_new_tokens: int | None = None

    @property
    def known(self) -> RequestSpec:
        """What policies, admission and servers may see."""
        most = self.n_output_tokens if self.max_new_tokens is None else self.max_new_tokens
        return RequestSpec(self.client, self.n_input_tokens, most)

    @property
    def served(self) -> RequestSpec:
        """What it takes in the end."""
        return RequestSpec(self.client, self.n_input_tokens, self.n_output_tokens)


@dataclass(frozen=True)
class Backoff:
    """Waits between attempts to open a session: ``first_s`` doubling up to ``max_s``.

    ``give_up_s`` after arrival without room, the request fails (0: never). ``jitter_ratio`` j, 0..1, makes
    each wait (1 - j) to (1 + j) times as long, from a random stream of ``seed`` and the request.
    """

    first_s: float = 1.0
    max_s: float = 60.0
    give_up_s: float = 0.0
    jitter_ratio: float = 0.0
    seed: int = 0

    def waits_s(self, request: int) -> Iterator[float]:
        """What request number ``request`` waits after its first refusal, its second, and so on."""
        wait_s, jitter = self.first_s, self.jitter_ratio
        rng = random.Random(f"{self.seed}:backoff:{request}") if jitter else None
        while True:
            yield wait_s if rng is None else wait_s * (1 + jitter * rng.uniform(-1, 1))
            wait_s = min(2 * wait_s, self.max_s)


@dataclass(frozen=True)
class QueueRules:
    """How requests wait in the coordinator's queue.

    ``kind``: "fifo", the first alone may go; "backfill", whoever has room goes, until one has waited ``age_s``: then
    nobody goes before that one. With ``give_up_s`` a request is sent on its way that long after its arrival, to be refused
    and to give up. The queue is looked through when a session ends, and after ``look_again_s`` at the latest.
    """

    kind: Literal["fifo", "backfill"]
    age_s: float
    give_up_s: float
    look_again_s: float

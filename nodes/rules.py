"""What a client does when a hop of its chain fails, and how caches grow, as numbers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PagingRules:
    """Caches that grow with their tokens: by pages of ``page_tokens``, in all blocks of a hop at once.

    New sessions get in while they leave 1 - ``high_water`` of a server's room for those that are there to grow.
    """

    page_tokens: int = 16
    high_water: float = 0.9

    def paged(self, n_tokens: int, most_tokens: int) -> int:
        """Whole pages for ``n_tokens``, in tokens; not more than ``most_tokens``."""
        return min(-(-n_tokens // self.page_tokens) * self.page_tokens, most_tokens)


@dataclass(frozen=True)
class RecoveryRules:
    """What a client does when a hop of its chain fails; scenario seconds.

    ``mode``: "replay"; "head": as PETALS' last commit, whose replacements cannot start at a position above 0,
    so that every one of them fails; "off": the request fails. A hop has failed when its connection is lost,
    when its server has lost the session, or when no answer came for ``request_timeout_s``, and ``token_s`` more
    for every token of the step after its first (what the slowest hop needs for it); a server that has not
    opened a session after ``connect_timeout_s`` is not there. The first attempt to replace a hop is made at
    once, the next after ``retry_first_s``, doubling up to ``retry_max_s``, until ``give_up_s`` after the
    failure was noticed; ``retry_jitter_ratio`` j, 0..1, makes each of these waits (1 - j) to (1 + j) times as
    long, by ``seed``, the request and the attempt. ``replay``: the history goes to a replacement "at_once", in
    one message, or "step_by_step", the prompt and then every token on its own: then its cache has every bit of
    the lost one, whatever the rounding, for a round trip per token.
    """

    mode: Literal["replay", "head", "off"] = "replay"
    request_timeout_s: float = math.inf
    token_s: float = 0.0
    connect_timeout_s: float = math.inf
    retry_first_s: float = 1.0
    retry_max_s: float = 60.0
    give_up_s: float = 300.0
    replay: Literal["at_once", "step_by_step"] = "at_once"
    retry_jitter_ratio: float = 0.0
    seed: int = 0

    def step_limit_s(self, n_tokens: int, n_hops: int = 1) -> float:
        """How long a step may go without an answer."""
        return self.request_timeout_s + n_hops * self.token_s * (n_tokens - 1)

    def retry_delay_s(self, attempt: int, request: int) -> float:
        """What ``request`` waits before attempt number ``attempt``, from 0: 0, then first, doubling."""
        if attempt == 0:
            return 0.0
        wait_s = min(self.retry_first_s * 2.0 ** min(attempt - 1, 60), self.retry_max_s)
        if not self.retry_jitter_ratio:
            return wait_s
        draw = random.Random(f"{self.seed}:retry:{request}:{attempt}").uniform(-1, 1)
        return wait_s * (1 + self.retry_jitter_ratio * draw)

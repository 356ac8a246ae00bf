"""What clients and servers keep to: recovery from failed hops, and caches that grow by pages."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from policies.problem import RequestSpec
from policies.workload import RequestPlan

MAX_ATTEMPTS = 1_000_000
"""A client gives a session up after so many attempts to open it."""


@dataclass(frozen=True)
class PagingRules:
    """Caches that grow with their tokens: by pages of ``page_tokens`` tokens, in all blocks of a hop at once.

    A new session is admitted if at most the share ``high_water`` (0..1) of a server's room is in use with it,
    or if it is the only one. The rest is left for open sessions to grow.
    """

    page_tokens: int = 16
    high_water: float = 0.9

    def paged(self, n_tokens: int, most_tokens: int) -> int:
        """Returns ``n_tokens`` rounded up to whole pages, but at most ``most_tokens``."""
        return min(-(-n_tokens // self.page_tokens) * self.page_tokens, most_tokens)


@dataclass(frozen=True)
class PrefixRules:
    """Caches that outlive their requests, for prompts that begin with the same tokens.

    ``kind`` "shared": servers keep ended sessions' caches by pages of ``page_tokens`` until sessions need the room.
    Clients keep ``history_bytes`` of hops' inputs, with which they fill hops that have lost pages.
    "session": the chain of a conversation stays open for ``hold_s`` after each answer, with cache for ``session_tokens``.
    """

    kind: Literal["session", "shared"]
    page_tokens: int = 16
    hold_s: float = 300.0
    session_tokens: int = 0
    history_bytes: float = 0.0


@dataclass(frozen=True)
class RecoveryRules:
    """What a client does when a hop of its chain fails. Times are scenario seconds.

    ``mode``: "replay" replaces the hop. "head" does as PETALS' last commit, whose replacements cannot start
    at a position above 0, so that all of them fail there. "off" fails the request.

    A hop has failed when its connection is lost, when its server has lost the session, or when a step was not
    answered within ``request_timeout_s``, plus ``token_s`` for every token after its first (what the slowest
    hop needs for it). A server that has not opened a session within ``connect_timeout_s`` is unreachable.

    The first attempt to replace a hop is made at once. The wait before the next is ``retry_first_s``; waits
    double up to ``retry_max_s``, until ``give_up_s`` after the failure was noticed. ``retry_jitter_ratio`` j,
    from 0 to 1, makes each wait (1 - j) to (1 + j) times as long, at random by ``seed``, the request and the
    attempt.

    ``replay``: the history is sent to a replacement "at_once", in one message, or "step_by_step", the prompt
    and then every token on its own. Step by step takes a round trip per token, but the new cache equals the
    lost one bit by bit, whatever the rounding.

    Routers leave a server that failed out of routes for ``ban_s`` seconds, and twice as long after each further
    failure in a row. With ``ban_failed_servers`` false it stays routable for as long as routers believe that
    it is there.
    """

    mode: Literal["replay", "head", "off"] = "replay"
    request_timeout_s: float = 180.0
    token_s: float = 0.0
    connect_timeout_s: float = 5.0
    retry_first_s: float = 1.0
    retry_max_s: float = 60.0
    give_up_s: float = 300.0
    replay: Literal["at_once", "step_by_step"] = "at_once"
    retry_jitter_ratio: float = 0.0
    seed: int = 0
    ban_s: float = 15.0
    ban_failed_servers: bool = True

    def step_limit_s(self, n_tokens: int, n_hops: int = 1) -> float:
        """Returns how long a step of ``n_tokens`` through ``n_hops`` hops may go without an answer."""
        return self.request_timeout_s + n_hops * self.token_s * (n_tokens - 1)

    def retry_delay_s(self, attempt: int, request: int) -> float:
        """Returns the wait of ``request`` before attempt number ``attempt``; that of attempt 0 is 0."""
        if attempt == 0:
            return 0.0
        wait_s = min(self.retry_first_s * 2.0 ** min(attempt - 1, 60), self.retry_max_s)
        if not self.retry_jitter_ratio:
            return wait_s
        draw = random.Random(f"{self.seed}:retry:{request}:{attempt}").uniform(-1, 1)
        return wait_s * (1 + self.retry_jitter_ratio * draw)

    def replayed(self, plan: RequestPlan, n_tokens: int) -> RequestSpec:
        """Returns a request that takes as long to serve as the replay of ``n_tokens`` tokens of ``plan``."""
        n_prompt = n_tokens if self.replay == "at_once" else plan.n_input_tokens
        return RequestSpec(plan.client, n_prompt, n_tokens - n_prompt + 1)

    @property
    def push_limit_s(self) -> float:
        """Seconds that a server waits for the next one to accept a push.

        Half of the client's limit for the result, so that the client learns which server is overdue.
        """
        return self.request_timeout_s / 2

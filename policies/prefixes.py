"""Which chains probably hold the beginning of a prompt: what routers may see of the caches that servers have kept."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from policies.problem import Hop, Placement, Problem, RequestSpec, hop_times_s, service_s
from policies.workload import RequestPlan

_MOST_CHAINS = 4
"""Chains that are reported for a prompt."""


class Asking(NamedTuple):
    """What is known of the request that asks for a chain.

    ``own``: the chain of its conversation's last turn; empty if there is none. ``chains``: those that probably hold the
    beginning of its prompt, with how many tokens of it, the most first.
    """

    own: tuple[Hop, ...]
    chains: tuple[tuple[tuple[Hop, ...], int], ...]


class PrefixMap:
    """Remembers which chains have served which prompts, as far as their servers have room for it.

    Nobody reports what servers evict: each is taken to keep what was used last, in all of its room (``cache_bytes``, with
    ``token_bytes`` per token and block). What has happened is seen from the next report on; reports come every ``age_s``
    seconds (0: at once).
    """

    def __init__(self, cache_bytes: Sequence[float], token_bytes: float, age_s: float = 0.0) -> None:
        self._room_bytes = list(cache_bytes)
        self._token_bytes = token_bytes
        self._age_s = age_s
        self._chains: dict[Hashable, OrderedDict[tuple[Hop, ...], tuple[int, float]]] = {}
        """By beginning: the chains that have it, the one used last at the end, with its tokens and since when."""
        self._held: list[OrderedDict[tuple[Hashable, tuple[Hop, ...]], float]] = [
            OrderedDict() for _ in cache_bytes
        ]
        """By server: the bytes of beginnings, the one used last at the end."""
        self._held_bytes = [0.0] * len(self._room_bytes)
        self._last: dict[int, tuple[tuple[Hop, ...], float]] = {}

    def served(self, plan: RequestPlan, hops: tuple[Hop, ...], now_s: float) -> None:
        """Notes that a request has ended on ``hops``, whose servers keep its cache."""
        for key, n_tokens, n_new in reversed(list(_beginnings(plan, is_over=True))):
            chains = self._chains.setdefault(key, OrderedDict())
            _, since_s = chains.pop(hops, (0, now_s))
            chains[hops] = n_tokens, since_s
            for hop in hops:
                held = self._held[hop.server]
                self._held_bytes[hop.server] -= held.pop((key, hops), 0.0)
                held[key, hops] = n_bytes = n_new * hop.n_blocks * self._token_bytes
                self._held_bytes[hop.server] += n_bytes
        for hop in hops:
            self._fit(hop.server)
        if plan.turn is not None:
            self._last[plan.turn.conversation] = hops, now_s

    def _fit(self, server: int) -> None:
        held = self._held[server]
        while held and self._held_bytes[server] > self._room_bytes[server]:
            (key, hops), n_bytes = held.popitem(last=False)
            self._held_bytes[server] -= n_bytes
            chains = self._chains.get(key)
            if chains is not None and chains.pop(hops, None) is not None and not chains:
                del self._chains[key]

    def asking(self, plan: RequestPlan, now_s: float) -> Asking:
        """Returns what is known of a request that asks now."""
        reported_at_s = math.floor(now_s / self._age_s) * self._age_s if self._age_s else math.inf
        found: dict[tuple[Hop, ...], int] = {}
        for key, n_tokens, _ in reversed(list(_beginnings(plan, is_over=False))):
            for hops, (n_held, since_s) in reversed(self._chains.get(key, OrderedDict()).items()):
                if since_s < reported_at_s and len(found) < _MOST_CHAINS:
                    found.setdefault(hops, min(n_held, n_tokens, plan.n_input_tokens - 1))
        own: tuple[Hop, ...] = ()
        if plan.turn is not None:
            last, at_s = self._last.get(plan.turn.conversation, ((), 0.0))
            own = last if at_s < reported_at_s else ()
        return Asking(own, tuple(sorted(found.items(), key=lambda item: -item[1])))


def _beginnings(plan: RequestPlan, *, is_over: bool) -> Iterator[tuple[Hashable, int, int]]:
    """Yields (key, tokens up to its end, tokens that the one before has not) of what a request's prompt begins with."""
    if not plan.block_ids and plan.turn is not None:
        if is_over:
            n_tokens = plan.n_input_tokens + plan.n_output_tokens - 1
            yield ("conversation", plan.turn.conversation), n_tokens, n_tokens
        elif plan.turn.number:
            yield ("conversation", plan.turn.conversation), plan.n_input_tokens, 0
        return
    key: Hashable = None
    for number, block in enumerate(plan.block_ids, 1):
        key = hash((key, block))
        n_tokens = min(number * plan.block_tokens, plan.n_input_tokens)
        yield key, n_tokens, n_tokens - (number - 1) * plan.block_tokens


def is_held(placement: Placement, hops: Sequence[Hop]) -> bool:
    """Returns whether a new session may take the chain: its servers still hold their blocks, and none behind them.

    The hops that replaced a lost server's may end earlier than their server's range, which those of a new chain may not.
    """
    ranges = placement.ranges
    return bool(hops) and all(ranges[j].first <= first and last == ranges[j].last for j, first, last in hops)


def saved_s(problem: Problem, request: RequestSpec, hops: Sequence[Hop], n_reused: int) -> float:
    """Returns how many modelled seconds ``request`` takes less on a chain that has the cache of its first ``n_reused`` tokens.

    It can be negative where the rest is as short as a draft: a decode may read its experts and caches longer than a short
    prompt takes.
    """
    if not n_reused:
        return 0.0
    rest = RequestSpec(request.client, request.n_input_tokens - n_reused, request.n_output_tokens)
    less_s = 0.0
    previous: int | None = None
    for hop in hops:
        server = problem.servers[hop.server]
        less_s += hop_times_s(problem, request, previous, hop.server)[0]
        less_s += server.prefill_of_s(request.n_input_tokens, hop.blocks)
        less_s -= hop_times_s(problem, rest, previous, hop.server)[0]
        less_s -= server.extend_of_s(n_reused, rest.n_input_tokens, hop.blocks)
        previous = hop.server
    return less_s


def service_after_s(problem: Problem, request: RequestSpec, hops: Sequence[Hop], n_reused: int) -> float:
    """Returns the modelled seconds of ``request`` on a chain that has the cache of its first ``n_reused`` tokens."""
    return service_s(problem, request, hops)[1] - saved_s(problem, request, hops, n_reused)

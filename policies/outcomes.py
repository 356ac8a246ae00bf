"""What became of requests, as their clients measured it: what routers can learn from."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from policies.problem import Hop

MOST_KNOWN = 1000
"""So many outcomes are kept for routers that are bound later."""


class WhoAsks(NamedTuple):
    """Which request asks for a chain: its number, and its place in a conversation (``None``: it is of none).

    ``turn`` counts from 0. ``arrived_at_s``: when it came to its client.
    """

    request: int
    conversation: int | None
    turn: int
    arrived_at_s: float


class Times(NamedTuple):
    """What a client has measured of a request that has ended; ``None``: that did not happen.

    ``opened_at_s``: when it began to open the first chain that admitted it. ``n_tokens``: output tokens.
    """

    opened_at_s: float | None = None
    first_at_s: float | None = None
    n_tokens: int = 0


class Outcome(NamedTuple):
    """A request that has ended, as its client measured it. Times are seconds, instants scenario seconds.

    - ``client``: as in ``RequestSpec``; ``conversation``: as in ``WhoAsks``
    - ``hops``: the chain that it had at its end, with blocks of the whole model; empty if it had none
    - ``wait_s``: from its arrival until it began to open the chain that admitted it, or until it failed
    - ``ttft_s``: from its arrival to its first token; ``None``: it has none
    - ``tpot_s``: the mean time of each further token; ``None``: it has none
    - ``n_output_tokens``: those that were made
    """

    request: int
    client: int
    conversation: int | None
    hops: tuple[Hop, ...]
    arrived_at_s: float
    finished_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    wait_s: float
    ttft_s: float | None
    tpot_s: float | None
    has_failed: bool

    @property
    def e2e_s(self) -> float:
        """The seconds from its arrival to its end."""
        return self.finished_at_s - self.arrived_at_s

    def age_s(self, now_s: float) -> float:
        """Return how long ago it ended."""
        return now_s - self.finished_at_s


class Outcomes:
    """The outcomes of a run in the order in which clients reported them. Only those that are ``known`` can be seen."""

    def __init__(self) -> None:
        self._known: deque[Outcome] = deque(maxlen=MOST_KNOWN)
        self._unknown: deque[Outcome] = deque()
        self.n_known = 0

    def add(self, outcome: Outcome) -> None:
        """Add one that is not known yet."""
        self._unknown.append(outcome)

    def know(self, before_s: float = math.inf) -> None:
        """Make known what has ended before ``before_s``."""
        while self._unknown and self._unknown[0].finished_at_s < before_s:
            self._known.append(self._unknown.popleft())
            self.n_known += 1

    def since(self, n_seen: int) -> Sequence[Outcome]:
        """Return the known outcomes after the first ``n_seen``, of which at most the last ``MOST_KNOWN`` are kept."""
        return list(islice(self._known, max(n_seen - self.n_known + len(self._known), 0), None))


def outcome_of(
    who: WhoAsks,
    client: int,
    hops: tuple[Hop, ...],
    n_input_tokens: int,
    times: Times,
    at_s: float,
    *,
    has_failed: bool,
) -> Outcome:
    """Return the outcome of a request that has ended at ``at_s``."""
    arrived_at_s, n_tokens = who.arrived_at_s, times.n_tokens
    opened_at_s, first_at_s = times.opened_at_s, times.first_at_s
    return Outcome(
        who.request,
        client,
        who.conversation,
        hops,
        arrived_at_s,
        at_s,
        n_input_tokens,
        n_tokens,
        (at_s if opened_at_s is None else opened_at_s) - arrived_at_s,
        None if first_at_s is None else first_at_s - arrived_at_s,
        None if first_at_s is None or n_tokens < 2 or has_failed else (at_s - first_at_s) / (n_tokens - 1),
        has_failed,
    )

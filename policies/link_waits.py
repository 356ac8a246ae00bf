"""How long messages are expected to wait on links for those of other sessions.

A link is a queue: what enters first leaves first.

- A prompt waits for the prompts that are expected to be on the link when it arrives (``SystemState.backlog_s``).
- A token waits for what is on its way of a prompt: at most the connection's window, since the rest of a prompt lets small
  messages pass (docs/networks.md). With n other sessions on the link, prompts use it for a share of n P / T of the time,
  where P is the time that a mean prompt takes there and T that of a mean request on the session's chain.

All of it is 0 where ``Problem.links`` is ``None``, and where no link can matter (``LinkWaits.of``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from policies.cgbp import lower_bounds_per_token_s
from policies.link_rates import LinkRates, Passage, Queue
from policies.problem import Hop, Problem, RequestSpec, hop_times_s, service_s
from policies.remember import remember
from policies.state import SystemState

NOTICED_RATIO = 0.01
"""Waits count if a token can wait this share of its time for one link."""
_MOST_BUSY = 0.95
_HALVINGS = 20
_MOST_KNOWN = 100_000
"""At most this many results are kept."""

Way = tuple[Queue, ...]
"""The queues that a message passes from one node to another. It waits at the one where it waits longest: what comes out of
that one has no reason to wait at the others."""


class Pace(NamedTuple):
    """A mean request alone on a chain.

    ``token_s`` are the seconds of a token after the first, ``stay_s`` those of the whole request. There are
    ``n_tokens`` such tokens. ``load_s2`` is the sum over its ways of ``LinkWaits.load_s2``.
    """

    token_s: float
    stay_s: float
    n_tokens: int
    load_s2: float = 0.0


class Waits(NamedTuple):
    """What links add to a request: seconds to its first token, and to all of it. ``passages`` are its prompt's."""

    first_s: float
    all_s: float
    passages: tuple[Passage, ...]


def backlog_s(state: SystemState, way: Way, now_s: float, at_s: float) -> float:
    """Returns the seconds that a prompt is expected to wait for those before it if it comes to a way at ``at_s``."""
    return max(state.use(queue, now_s, at_s).backlog_s for queue in way)


class LinkWaits:
    """Expected waits for links. It does not depend on a placement."""

    def __init__(self, problem: Problem, links: LinkRates) -> None:
        self._problem = problem
        self._links = links
        self._n_input, self._n_output = problem.mean_lengths
        self._paces: dict[tuple[int, tuple[Hop, ...]], Pace] = {}
        self._known_s: dict[tuple[float, int, Pace], float] = {}

    @classmethod
    def of(cls, problem: Problem) -> LinkWaits | None:
        """Returns the waits of a problem; ``None`` where links take no time, or hardly ever make a token wait.

        The latter is so if a token waits for less than 1 % of the time that it takes at least, even on a link that all
        requests use which can.
        """
        if problem.links is None:
            return None
        waits = cls(problem, problem.links)
        return waits if waits._can_matter() else None

    def _can_matter(self) -> bool:
        problem, links = self._problem, self._links
        token_s = min(lower_bounds_per_token_s(problem))
        if token_s == math.inf:  # there is no placement, as its policy will report
            return False
        pace = Pace(token_s, token_s * self._n_output, max(self._n_output - 1, 1))
        rates: dict[Queue, float] = {}
        """Requests per second that can use a link."""
        for client in range(len(problem.clients)):
            ways = (way(client, j) for j in range(problem.n_servers) for way in (links.up, links.down))
            for queue in {queue for way in ways for queue in way}:
                rates[queue] = rates.get(queue, 0.0) + problem.request_rate / len(problem.clients)
        loads = [(queue.rate_bps, rate) for queue, rate in rates.items()]
        if links.across_bps:
            loads.append((min(map(min, links.across_bps)), problem.request_rate))
        return any(
            self._token_wait_s(rate_bps, rate * pace.stay_s, pace) > NOTICED_RATIO * token_s
            for rate_bps, rate in loads
        )

    def pace(self, client: int, hops: tuple[Hop, ...]) -> Pace:
        """Returns the pace of a client's mean request on a chain."""
        found = self._paces.get((client, hops))
        if found is None:
            first_s, all_s = service_s(
                self._problem, RequestSpec(client, self._n_input, self._n_output), hops
            )
            n_tokens = max(self._n_output - 1, 1)
            load_s2 = sum(max(map(self._load_s2, way)) for way in self.ways(client, hops))
            found = Pace((all_s - first_s) / n_tokens, all_s, n_tokens, load_s2)
            remember(self._paces, (client, hops), found, _MOST_KNOWN)
        return found

    def there(self, client: int, previous: int | None, server: int) -> Way:
        """Returns the way of hidden states to a server; ``previous``: the hop before, if there is one."""
        if previous is None or not self._problem.forwarding:
            return self._links.up(client, server)
        return self._links.across(previous, server)

    def back(self, client: int, server: int) -> Way:
        """Returns the way of hidden states from a server to the client."""
        return self._links.down(client, server)

    def ways(self, client: int, hops: Sequence[Hop]) -> list[Way]:
        """Returns all ways of a chain's messages, in order."""
        found: list[Way] = []
        previous: int | None = None
        for number, hop in enumerate(hops):
            found.append(self.there(client, previous, hop.server))
            if not self._problem.forwarding or number + 1 == len(hops):
                found.append(self.back(client, hop.server))
            previous = hop.server
        return found

    def _met_s(self, rate_bps: float) -> float:
        """Returns the mean over a prompt's time on a link of how long it needs for what is on its way."""
        s_per_byte = 8 / rate_bps
        prompt_s = self._n_input * self._links.token_bytes * s_per_byte
        window_s = self._links.window_bytes * s_per_byte
        return window_s * (1 - window_s / prompt_s / 2) if window_s < prompt_s else prompt_s / 2

    def _load_s2(self, queue: Queue) -> float:
        """Returns a prompt's time on a link times ``_met_s``: prompts delay tokens in proportion to that."""
        return self.prompt_s(queue, self._n_input) * self._met_s(queue.rate_bps)

    def token_wait_s(self, queue: Queue, n_others: int, pace: Pace) -> float:
        """Returns the seconds that a token is expected to wait at a queue which ``n_others`` other sessions use."""
        if not n_others or self._n_output < 2:
            return 0.0
        key = queue.rate_bps, n_others, pace
        found_s = self._known_s.get(key)
        if found_s is None:
            found_s = remember(self._known_s, key, self._token_wait_s(*key), _MOST_KNOWN)
        return found_s

    def _token_wait_s(self, rate_bps: float, n_others: float, pace: Pace) -> float:
        if pace.token_s <= 0 or not self._n_input:
            return 0.0
        links = self._links
        token_s = links.token_bytes * 8 / rate_bps
        prompt_s = self._n_input * token_s
        if not prompt_s:  # nothing waits on a link of infinite rate
            return 0.0
        met_s = self._met_s(rate_bps)
        # Waits on a chain's ways are in proportion to their loads: together they are this many times one's own.
        n_ways = max(pace.load_s2 / (prompt_s * met_s), 1.0)
        on_tokens = min(n_others * token_s / pace.token_s, _MOST_BUSY)
        on_tokens_s = on_tokens * token_s / (1 - on_tokens) / 2
        n_tokens, decode_s = pace.n_tokens, pace.n_tokens * pace.token_s

        def expected_s(wait_s: float) -> float:
            """Returns what a token waits on this way if it waits ``wait_s`` here, and in proportion elsewhere."""
            more_s = n_tokens * n_ways * wait_s
            # A session's tokens meet the prompts that come after its own, from when that is on the link.
            n_met = n_others * (prompt_s + decode_s + more_s) / (pace.stay_s + more_s)
            # While a prompt passes, the session sends a token whenever the one before is back.
            back_s = pace.token_s + (n_ways - 1) * wait_s
            return n_met * prompt_s * met_s / (back_s + met_s) / n_tokens

        low_s, high_s = 0.0, expected_s(0.0) * max(1.0, pace.stay_s / (prompt_s + decode_s))
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            if expected_s(middle_s) > middle_s:
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s + on_tokens_s

    def prompt_s(self, queue: Queue, n_tokens: int) -> float:
        """Returns the seconds that a prompt keeps a link busy."""
        return n_tokens * self._links.token_bytes * 8 / queue.rate_bps

    def of_request(
        self, request: RequestSpec, hops: Sequence[Hop], state: SystemState, now_s: float
    ) -> Waits:
        """Returns what a request is expected to wait for links if its prompt is sent at ``now_s``.

        The sessions in ``state`` are the others; those that come later are expected to be as many.
        """
        problem, client, n_input = self._problem, request.client, request.n_input_tokens
        pace = self.pace(client, tuple(hops))
        passages: list[Passage] = []
        waited_s = token_wait_s = 0.0

        def pass_on(way: Way, at_s: float) -> float:
            """Returns the seconds that the prompt waits if it comes at ``at_s``."""
            nonlocal waited_s, token_wait_s
            most_s = longest_s = wait_s = 0.0
            for queue in way:
                n_others, backlog_s = state.use(queue, now_s, at_s)
                longest_s = max(longest_s, self.prompt_s(queue, n_input))
                wait_s = max(wait_s, backlog_s)
                most_s = max(most_s, self.token_wait_s(queue, n_others, pace))
            for queue in way:
                begins_at_s, busy_s = at_s + wait_s, self.prompt_s(queue, n_input)
                passages.append(Passage(queue, at_s, begins_at_s, begins_at_s + longest_s, busy_s, math.inf))
            waited_s, token_wait_s = waited_s + wait_s, token_wait_s + most_s
            return wait_s

        at_s = now_s
        previous: int | None = None
        for number, hop in enumerate(hops):
            at_s += pass_on(self.there(client, previous, hop.server), at_s)
            at_s += hop_times_s(problem, request, previous, hop.server)[0]
            at_s += problem.servers[hop.server].prefill_of_s(n_input, hop.blocks)
            if not problem.forwarding or number + 1 == len(hops):
                back, sent_s = self.back(client, hop.server), 0.0
                if not problem.forwarding:  # the hop's time has the way back
                    sent_s = max(self.prompt_s(queue, n_input) for queue in back)
                    sent_s += problem.down_s(client, hop.server)
                at_s += pass_on(back, at_s - sent_s)
            previous = hop.server
        all_s = waited_s + (request.n_output_tokens - 1) * token_wait_s
        until_s = now_s + service_s(problem, request, hops)[1] + all_s
        return Waits(waited_s, all_s, tuple(p._replace(until_s=until_s) for p in passages))

"""What a step takes on a server that others use, too: expected times from the number of sessions there."""

from __future__ import annotations

from typing import NamedTuple

from policies.problem import Hop, Problem, RequestSpec, decode_step_s

_MOST_KNOWN = 100_000
"""Times that are kept."""
_MOST_ON_PROMPTS = 0.95
_HALVINGS = 20


class Cycle(NamedTuple):
    """What a token after the first takes on an idle chain, in seconds: ways and the client, and the servers."""

    elsewhere_s: float
    on_servers_s: float

    def slower(self, factor: float) -> float:
        """The whole of it where every server takes ``factor`` times as long."""
        return self.elsewhere_s + factor * self.on_servers_s


class Sharing:
    """Expected times on servers that compute several sessions in one step, or one step after another.

    A mean-value model. Every session sends a server a step per cycle, which is what one of its tokens takes; the other servers
    of its chain are taken to be as much slower than idle ones as this one. With n sessions there, what comes from the others while one step is computed is in the same step as this session's. A
    prompt is sent once per session, and a step waits for half of the one that it meets. A step that meets another waits for all of
    that: sessions that were in one step go on together, so that they come as one begins. All
    requests have the mean lengths that are known. No policy knows of chunks of prompts.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._n_input, self._n_output = problem.mean_lengths
        self._context = self._n_input + self._n_output / 2
        self._known_s: dict[tuple[int, int, int, Cycle], float] = {}

    def cycle(self, client: int, hops: tuple[Hop, ...]) -> Cycle:
        """Of a session on ``hops``."""
        request = RequestSpec(client, self._n_input, self._n_output)
        all_s = decode_step_s(self._problem, request, hops, round(self._context))
        on_servers_s = sum(self._alone_s(hop.server, hop.n_blocks) for hop in hops)
        return Cycle(max(all_s - on_servers_s, 0.0), on_servers_s)

    def step_s(self, server: int, n_blocks: int, n_sessions: int, cycle: Cycle) -> float:
        """What a decode step of ``n_blocks`` takes on ``server`` with its wait, one of ``n_sessions`` >= 1 there."""
        key = server, n_blocks, n_sessions, cycle
        found_s = self._known_s.get(key)
        if found_s is None:
            if len(self._known_s) >= _MOST_KNOWN:
                self._known_s.clear()
            found_s = self._known_s[key] = self._expected_s(*key)
        return found_s

    def _alone_s(self, server: int, n_blocks: int) -> float:
        spec = self._problem.servers[server]
        return spec.step_base_s + n_blocks * spec.decode_at_s(self._context)

    def _expected_s(self, server: int, n_blocks: int, n_sessions: int, cycle: Cycle) -> float:
        alone_s, n_others = self._alone_s(server, n_blocks), n_sessions - 1
        if not n_others or not alone_s or self._problem.batching == "none":
            return alone_s

        def is_longer(step_s: float) -> bool:
            return self._at_s(server, n_blocks, n_others, cycle.slower(step_s / alone_s)) > step_s

        # What slows sessions down has them come less often: the longer the cycle, the shorter the step. Bisection.
        low_s = high_s = alone_s
        while is_longer(high_s):
            low_s, high_s = high_s, 2 * high_s
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            if is_longer(middle_s):
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s

    def _at_s(self, server: int, n_blocks: int, n_others: int, cycle_s: float) -> float:
        """A step with its wait if each of ``n_others`` sends one every ``cycle_s``."""
        spec = self._problem.servers[server]
        prompt_s = n_blocks * spec.prefill_s(self._n_input)
        on_prompts = min(n_others * prompt_s / (cycle_s * self._n_output), _MOST_ON_PROMPTS)
        first_s = self._alone_s(server, n_blocks)
        further_s = first_s
        if self._problem.batching == "continuous":
            each_s = spec.session_slope_s + spec.context_slope_s * self._context
            further_s = n_blocks * each_s
        rate = n_others / cycle_s
        # x others come while a step of x + 1 sessions is computed: x = rate (first + further x).
        left = 1 - rate * further_s
        n_with = min(n_others, rate * first_s / left) if left > 0 else n_others
        step_s = first_s + further_s * n_with
        busy = min(1.0, rate * step_s / max(n_with, 1.0))
        return step_s + busy * step_s + on_prompts * prompt_s / 2

    def on_prompts(self, server: int, n_blocks: int, n_sessions: int, cycle: Cycle) -> float:
        """The part of its time that ``server`` spends on the prompts of ``n_sessions``; 0 where nobody waits for it."""
        if self._problem.batching == "none":
            return 0.0
        slower = self.step_s(server, n_blocks, n_sessions, cycle) / (self._alone_s(server, n_blocks) or 1.0)
        prompts_s = n_sessions * n_blocks * self._problem.servers[server].prefill_s(self._n_input)
        return min(prompts_s / (cycle.slower(slower) * self._n_output), _MOST_ON_PROMPTS)

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


class _Times(NamedTuple):
    """What a server takes in seconds for steps of the mean lengths: besides its blocks, and per block."""

    base_s: float
    decode_s: float
    prompt_s: float
    further_s: float
    """For each further session in a step."""


class Sharing:
    """Expected times on servers that compute several sessions in one step, or one step after another.

    A mean-value model. Every session sends a server a step per cycle, which is what one of its tokens takes; the other servers
    of its chain are taken to be as much slower than idle ones as this one. With n sessions there, what comes from the others while one step is computed is in the same step as this session's. A
    prompt is sent once per session, and a step waits for half of the one that it meets. A step that meets another waits for all of
    that: sessions that were in one step go on together, so that they come as one begins. All
    requests have the mean lengths that are known. No policy knows of chunks of prompts.

    It knows nothing of placements: one serves for all of a problem's.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._n_input, self._n_output = problem.mean_lengths
        self._context = self._n_input + self._n_output / 2
        self._times = [
            _Times(
                spec.step_base_s,
                spec.decode_at_s(self._context),
                spec.prefill_s(self._n_input),
                spec.session_slope_s + spec.context_slope_s * self._context,
            )
            for spec in problem.servers
        ]
        # Servers that take the same are one here.
        self._alike = [self._times.index(times) for times in self._times]
        self._known_s: dict[tuple[int, int, int, Cycle], float] = {}
        self._cycles: dict[tuple[int, tuple[Hop, ...]], Cycle] = {}

    def cycle(self, client: int, hops: tuple[Hop, ...]) -> Cycle:
        """Of a session on ``hops``."""
        found = self._cycles.get((client, hops))
        if found is not None:
            return found
        request = RequestSpec(client, self._n_input, self._n_output)
        all_s = decode_step_s(self._problem, request, hops, round(self._context))
        on_servers_s = sum(self._alone_s(hop.server, hop.n_blocks) for hop in hops)
        if len(self._cycles) >= _MOST_KNOWN:
            self._cycles.clear()
        found = self._cycles[client, hops] = Cycle(max(all_s - on_servers_s, 0.0), on_servers_s)
        return found

    def step_s(self, server: int, n_blocks: int, n_sessions: int, cycle: Cycle) -> float:
        """What a decode step of ``n_blocks`` takes on ``server`` with its wait, one of ``n_sessions`` >= 1 there."""
        key = self._alike[server], n_blocks, n_sessions, cycle
        found_s = self._known_s.get(key)
        if found_s is None:
            if len(self._known_s) >= _MOST_KNOWN:
                self._known_s.clear()
            found_s = self._known_s[key] = self._expected_s(server, n_blocks, n_sessions - 1, cycle)
        return found_s

    def _alone_s(self, server: int, n_blocks: int) -> float:
        times = self._times[server]
        return times.base_s + n_blocks * times.decode_s

    def _expected_s(self, server: int, n_blocks: int, n_others: int, cycle: Cycle) -> float:
        alone_s = self._alone_s(server, n_blocks)
        if not n_others or not alone_s or self._problem.batching == "none":
            return alone_s
        times, n_output = self._times[server], self._n_output
        prompt_s = n_blocks * times.prompt_s
        further_s = n_blocks * times.further_s if self._problem.batching == "continuous" else alone_s

        def is_longer(than_s: float) -> bool:
            """Whether a step with its wait takes longer if the others send one every cycle that ``than_s`` makes."""
            cycle_s = cycle.slower(than_s / alone_s)
            on_prompts = min(n_others * prompt_s / (cycle_s * n_output), _MOST_ON_PROMPTS)
            rate = n_others / cycle_s
            # x others come while a step of x + 1 sessions is computed: x = rate (first + further x).
            left = 1 - rate * further_s
            n_with = min(n_others, rate * alone_s / left) if left > 0 else n_others
            step_s = alone_s + further_s * n_with
            busy = min(1.0, rate * step_s / max(n_with, 1.0))
            return step_s + busy * step_s + on_prompts * prompt_s / 2 > than_s

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

    def on_prompts(self, server: int, n_blocks: int, n_sessions: int, cycle: Cycle) -> float:
        """The part of its time that ``server`` spends on the prompts of ``n_sessions``; 0 where nobody waits for it."""
        if self._problem.batching == "none":
            return 0.0
        slower = self.step_s(server, n_blocks, n_sessions, cycle) / (self._alone_s(server, n_blocks) or 1.0)
        prompts_s = n_sessions * n_blocks * self._times[server].prompt_s
        return min(prompts_s / (cycle.slower(slower) * self._n_output), _MOST_ON_PROMPTS)

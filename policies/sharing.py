"""Expected times of steps on a server that several sessions use, from the number of sessions there."""

from __future__ import annotations

from typing import NamedTuple

from policies.problem import Hop, Problem, RequestSpec, decode_step_s
from policies.remember import remember

_MOST_KNOWN = 100_000
"""At most this many times are kept."""
_MOST_ON_PROMPTS = 0.95
_HALVINGS = 20


class Cycle(NamedTuple):
    """The seconds that a token after the first takes on an idle chain.

    ``on_servers_s`` are spent on servers, ``elsewhere_s`` on links and on the client.
    """

    elsewhere_s: float
    on_servers_s: float

    def slower(self, factor: float) -> float:
        """Returns the seconds of the whole cycle if every server takes ``factor`` times as long."""
        return self.elsewhere_s + factor * self.on_servers_s


class _Times(NamedTuple):
    """The seconds of a server's steps at the mean lengths: ``base_s`` per step, the others per block."""

    base_s: float
    decode_s: float
    prompt_s: float
    further_s: float
    """For each further session in a step."""
    experts_s: float
    """For all experts of a mixture."""
    experts_ratio: float

    def mean_further_s(self, n_others: int) -> float:
        """Returns the seconds per block and further session, if all ``n_others`` >= 1 are in the step."""
        if not self.experts_s:
            return self.further_s
        idle = 1 - self.experts_ratio
        return self.further_s + self.experts_s * (idle - idle ** (n_others + 1)) / n_others


class Sharing:
    """Expected times on servers that compute several sessions in one step, or one step after another.

    It is a mean-value model:

    - Every session sends a server one step per cycle. A cycle is the time of one of its tokens. The other
      servers of its chain are assumed to be slower than idle ones by the same factor as this one.
    - With n sessions on a server, the steps of others that arrive while one step is computed are computed
      together with this session's step.
    - A session sends one prompt. A step that arrives during a prompt waits for half of it.
    - A step that arrives during another step waits for all of it: sessions that shared a step go on together,
      so they arrive when a step begins.
    - All requests have the known mean lengths. Chunks of prompts are not modelled.

    It does not depend on a placement: one object can be used for all placements of a problem.
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
                spec.experts_s,
                spec.experts_ratio,
            )
            for spec in problem.servers
        ]
        # Servers with equal times share their results.
        self._alike = [self._times.index(times) for times in self._times]
        self._known_s: dict[tuple[int, int, int, Cycle], float] = {}
        self._cycles: dict[tuple[int, tuple[Hop, ...]], Cycle] = {}

    def cycle(self, client: int, hops: tuple[Hop, ...]) -> Cycle:
        """Returns the cycle of a session on ``hops``, if all servers are idle."""
        found = self._cycles.get((client, hops))
        if found is not None:
            return found
        request = RequestSpec(client, self._n_input, self._n_output)
        all_s = decode_step_s(self._problem, request, hops, round(self._context))
        on_servers_s = sum(self._alone_s(hop.server, hop.n_blocks) for hop in hops)
        found = Cycle(max(all_s - on_servers_s, 0.0), on_servers_s)
        return remember(self._cycles, (client, hops), found, _MOST_KNOWN)

    def step_s(self, server: int, n_blocks: int, n_sessions: int, cycle: Cycle) -> float:
        """Returns the expected seconds of a decode step of ``n_blocks`` on ``server``, its wait included.

        The session is one of ``n_sessions`` >= 1 on the server.
        """
        key = self._alike[server], n_blocks, n_sessions, cycle
        found_s = self._known_s.get(key)
        if found_s is None:
            found_s = self._expected_s(server, n_blocks, n_sessions - 1, cycle)
            remember(self._known_s, key, found_s, _MOST_KNOWN)
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
        is_batched = self._problem.batching == "continuous"
        further_s = n_blocks * times.mean_further_s(n_others) if is_batched else alone_s

        def is_longer(than_s: float) -> bool:
            """Whether a step with its wait takes longer than ``than_s`` if the others' take ``than_s``."""
            cycle_s = cycle.slower(than_s / alone_s)
            on_prompts = min(n_others * prompt_s / (cycle_s * n_output), _MOST_ON_PROMPTS)
            rate = n_others / cycle_s
            # x others arrive while a step of x + 1 sessions is computed: x = rate (alone + further x).
            left = 1 - rate * further_s
            n_with = min(n_others, rate * alone_s / left) if left > 0 else n_others
            step_s = alone_s + further_s * n_with
            busy = min(1.0, rate * step_s / max(n_with, 1.0))
            return step_s + busy * step_s + on_prompts * prompt_s / 2 > than_s

        # Slower sessions send steps less often: the longer the cycle, the shorter the step. So bisection
        # works.
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
        """Returns the share of time that ``server`` spends on ``n_sessions`` prompts; 0 without batching."""
        if self._problem.batching == "none":
            return 0.0
        slower = self.step_s(server, n_blocks, n_sessions, cycle) / (self._alone_s(server, n_blocks) or 1.0)
        prompts_s = n_sessions * n_blocks * self._times[server].prompt_s
        return min(prompts_s / (cycle.slower(slower) * self._n_output), _MOST_ON_PROMPTS)

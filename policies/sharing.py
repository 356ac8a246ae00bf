"""Expected times of steps on a server that several sessions use, from the number of sessions there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from policies.problem import Hop, Problem, RequestSpec, ServerSpec, SharedRounds, decode_step_s
from policies.remember import remember

_MOST_CYCLES = 2_000
"""The times of steps are kept for at most this many cycles."""
_MOST_ON_PROMPTS = 0.95
_HALVINGS = 20
_NEAR_RATIO = 1e-9
"""``_close_bounds`` are that close; it computes ``_MOST_GUESSES`` times at most."""
_MOST_GUESSES = 30
_NOISE_RATIO = 1e-12
"""Nearer to the root than this, rounding may decide the sign: bisection looks for itself."""
_APART = 2.0
"""Of n other sessions, exp(-n prompt / (this x cycle)) have not yet met in a wait for a prompt."""


class Cycle(NamedTuple):
    """The seconds that a token after the first takes on an idle chain.

    ``on_servers_s`` are spent on servers, ``elsewhere_s`` on links and on the client.
    """

    elsewhere_s: float
    on_servers_s: float

    def slower(self, factor: float) -> float:
        """Returns the seconds of the whole cycle if every server takes ``factor`` times as long."""
        return self.elsewhere_s + factor * self.on_servers_s


_Kind = tuple[int, int, int]
"""(The first server with equal times, number of blocks, number of sessions)."""


class _Times(NamedTuple):
    """The seconds of a server's steps at the mean lengths: ``base_s`` per step, the others per block."""

    base_s: float
    decode_s: float
    prompt_s: float
    further_s: float
    """For each further session in a step, apart from experts and from what drafts need to be computed."""
    spec: ServerSpec
    shared: SharedRounds
    pairs: float
    """Twice the pairs of tokens in the attention of a session's step."""

    def mean_further_s(self, n_others: int) -> float:
        """Returns the seconds per block and further session, if all ``n_others`` >= 1 are in the step."""
        spec, (n_sent, n_made), n = self.spec, self.shared, n_others + 1
        found_s = self.further_s
        if spec.experts_s:
            more_s = spec.more_experts_s(n * n_sent) - spec.more_experts_s(n_sent)
            found_s += more_s / (n_others * n_made)
        if n_sent > 1:
            computed_s = spec.computed_s(n * n_sent, n * self.pairs) / n_made
            found_s = max(found_s, (computed_s - self.decode_s) / n_others)
        return found_s


class Sharing:
    """Expected times on servers that compute several sessions in one step, or one step after another.

    It is a mean-value model:

    - Every session sends a server one step per cycle. A cycle is the time of one of its tokens. The other
      servers of its chain are assumed to be slower than idle ones by the same factor as this one.
    - With n sessions on a server, the steps of others that arrive while one step is computed are computed
      together with this session's step. So are those of sessions that have once waited for the same prompt: they
      go on together.
    - A session sends one prompt. A step that arrives during a prompt waits for half of it.
    - Sessions that go on together come back to the server when a step ends and the rest of a cycle has passed. If
      another step was begun meanwhile, they wait for what is left of it.
    - All requests have the known mean lengths. Chunks of prompts are not modelled.

    It does not depend on a placement: one object can be used for all placements of a problem.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.alike = problem.alike
        self._n_input, self._n_output = problem.mean_lengths
        self._context = self._n_input + self._n_output / 2
        self._times = [
            _Times(
                spec.step_base_s,
                spec.decode_at_s(self._context),
                spec.prefill_s(self._n_input),
                spec.session_slope_s + spec.context_slope_s * self._context,
                spec,
                problem.shared,
                spec.attended(self._context + problem.shared.n_sent) - spec.attended(self._context),
            )
            for spec in problem.servers
        ]
        self._at: dict[Cycle, SharedSteps] = {}
        self._on: dict[tuple[int, tuple[Hop, ...]], SharedSteps] = {}

    def on(self, client: int, hops: tuple[Hop, ...]) -> SharedSteps:
        """Returns the steps of sessions whose cycle is that of one on ``hops``, if all servers are idle."""
        found = self._on.get((client, hops))
        if found is None:
            found = remember(self._on, (client, hops), self.at(self.cycle(client, hops)), _MOST_CYCLES)
        return found

    def at(self, cycle: Cycle) -> SharedSteps:
        """Returns the steps of sessions with this cycle."""
        found = self._at.get(cycle)
        if found is None:
            found = remember(self._at, cycle, SharedSteps(self, cycle), _MOST_CYCLES)
        return found

    def cycle(self, client: int, hops: tuple[Hop, ...]) -> Cycle:
        """Returns the cycle of a session on ``hops``, if all servers are idle."""
        request = RequestSpec(client, self._n_input, self._n_output)
        all_s = decode_step_s(self._problem, request, hops, round(self._context))
        on_servers_s = sum(self.alone_s(hop.server, hop.n_blocks) for hop in hops)
        return Cycle(max(all_s - on_servers_s, 0.0), on_servers_s)

    def alone_s(self, server: int, n_blocks: int) -> float:
        """Returns the seconds of a step over ``n_blocks`` of a session that is alone on the server."""
        times = self._times[server]
        return times.base_s + n_blocks * times.decode_s

    def expected_s(self, server: int, n_blocks: int, n_others: int, cycle: Cycle) -> float:
        """Returns the seconds of a step, its wait included, of a session with ``n_others`` on the server."""
        alone_s = self.alone_s(server, n_blocks)
        if not n_others or not alone_s or self._problem.batching == "none":
            return alone_s
        times, n_output = self._times[server], self._n_output
        prompt_s = n_blocks * times.prompt_s
        is_batched = self._problem.batching == "continuous"
        further_s = n_blocks * times.mean_further_s(n_others) if is_batched else alone_s
        prompts_s = n_others * prompt_s

        def longer_s(than_s: float) -> float:
            """Returns by how many seconds a step with its wait is longer than ``than_s`` if the others' take ``than_s``."""
            cycle_s = cycle.slower(than_s / alone_s)
            on_prompts = min(prompts_s / (cycle_s * n_output), _MOST_ON_PROMPTS)
            rate = n_others / cycle_s
            # x others arrive while a step of x + 1 sessions is computed: x = rate (alone + further x).
            left = 1 - rate * further_s
            n_with = min(n_others, rate * alone_s / left) if left > 0 else n_others
            n_with += (n_others - n_with) * (1 - math.exp(-prompts_s / (_APART * cycle_s)))
            step_s = alone_s + further_s * n_with
            busy = min(1.0, rate * step_s / max(n_with, 1.0))
            away_s = cycle_s - than_s
            return step_s + busy * max(step_s - away_s, 0.0) + on_prompts * prompt_s / 2 - than_s

        # Slower sessions send steps less often: the longer the cycle, the shorter the step. So bisection
        # works, and close bounds leave next to nothing of it to be computed.
        low_s = high_s = alone_s
        over_s = under_s = longer_s(alone_s)
        while under_s > 0:
            low_s, over_s, high_s = high_s, under_s, 2 * high_s
            under_s = longer_s(high_s)
        above_s, below_s = _close_bounds(longer_s, low_s, over_s, high_s, under_s)
        noise_s = _NOISE_RATIO * high_s
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            if middle_s < above_s - noise_s or (middle_s < below_s + noise_s and longer_s(middle_s) > 0):
                low_s = middle_s
            else:
                high_s = middle_s
        return high_s

    def on_prompts(self, server: int, n_blocks: int, n_sessions: int, step_s: float, cycle: Cycle) -> float:
        """Returns the share of time that ``server`` spends on the prompts of ``n_sessions`` whose steps take ``step_s``."""
        if self._problem.batching == "none":
            return 0.0
        slower = step_s / (self.alone_s(server, n_blocks) or 1.0)
        prompts_s = n_sessions * n_blocks * self._times[server].prompt_s
        return min(prompts_s / (cycle.slower(slower) * self._n_output), _MOST_ON_PROMPTS)


def _close_bounds(
    longer_s: Callable[[float], float], low_s: float, over_s: float, high_s: float, under_s: float
) -> tuple[float, float]:
    """Returns closer bounds of the root of ``longer_s``, which falls by a second per second or more.

    ``over_s`` and ``under_s`` are its values at the bounds. By false position (the Illinois algorithm).
    """
    was_over: bool | None = None
    for _ in range(_MOST_GUESSES):
        if not under_s < 0 < over_s:
            break
        found_s = high_s - under_s * (high_s - low_s) / (under_s - over_s)
        rest_s = longer_s(found_s)
        if abs(rest_s) <= _NEAR_RATIO * found_s:
            return max(low_s, min(found_s, found_s + rest_s)), min(high_s, max(found_s, found_s + rest_s))
        if is_over := rest_s > 0:
            low_s, over_s = found_s, rest_s
            under_s /= 2 if was_over else 1
        else:
            high_s, under_s = found_s, rest_s
            over_s /= 2 if was_over is False else 1
        was_over = is_over
    return low_s, high_s


class ByNumber(dict[int, float]):
    """Seconds by the number of sessions, computed when they are first asked for; 0 for none."""

    def __init__(self, of: Callable[[int], float]) -> None:
        self._of = of

    def __missing__(self, n: int) -> float:
        found_s = self[n] = self._of(n) if n else 0.0
        return found_s


class SharedSteps:
    """The expected steps of sessions that have the same cycle. Servers with equal times share what was computed before.

    Their methods' ``n_blocks`` are those of a step on ``server``, and ``n_sessions`` those that use the server.
    """

    def __init__(self, sharing: Sharing, cycle: Cycle) -> None:
        self._sharing, self._cycle = sharing, cycle
        self._alike = sharing.alike
        self._step_s: dict[_Kind, float] = {}
        self._added_s: dict[tuple[int, int], ByNumber] = {}
        self._prompts_ahead: dict[_Kind, float] = {}

    def step_s(self, server: int, n_blocks: int, n_sessions: int) -> float:
        """Returns the expected seconds of a decode step of one of ``n_sessions`` >= 1, its wait included."""
        key = self._alike[server], n_blocks, n_sessions
        found_s = self._step_s.get(key)
        if found_s is None:
            found_s = self._sharing.expected_s(server, n_blocks, n_sessions - 1, self._cycle)
            self._step_s[key] = found_s
        return found_s

    def added_s(self, server: int, n_blocks: int) -> ByNumber:
        """Returns what one session more costs, in seconds per token: it because of the others, and they because of it."""
        key = self._alike[server], n_blocks
        if (found_s := self._added_s.get(key)) is None:

            def with_one_more_s(n: int) -> float:
                alone_s, now_s, with_s = (self.step_s(server, n_blocks, among) for among in (1, n, n + 1))
                return max(with_s - alone_s + n * (with_s - now_s), 0.0)

            found_s = self._added_s[key] = ByNumber(with_one_more_s)
        return found_s

    def prompts_ahead(self, server: int, n_blocks: int, n_sessions: int) -> float:
        """Returns the mean number of prompts that one that comes finds before it; 0 without batching."""
        key = self._alike[server], n_blocks, n_sessions
        found = self._prompts_ahead.get(key)
        if found is None:
            step_s = self.step_s(server, n_blocks, n_sessions)
            busy = self._sharing.on_prompts(server, n_blocks, n_sessions, step_s, self._cycle)
            found = self._prompts_ahead[key] = busy / (1 - busy)
        return found

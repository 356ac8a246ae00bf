"""Batches: measures how long steps of several sessions take, and fits their times.

The fit is judged by points that it has not seen. When a busy server ends a step, it begins a batch of all
steps that wait (``nodes.batching``). So each case first begins a step that keeps the server busy, then
requests the case's steps, and measures the time from the start of their batch to its end.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nodes.clock import Clock
from nodes.compute import Compute, open_session
from policies.steps import StepTimes
from testbed.studies.calibrate.linear import LinearFit, fit_linear
from testbed.studies.calibrate.measure import CLIENT, Close, MakePayload
from testbed.studies.calibrate.plan import Plan

HELD_OUT_RATIO = 0.25
"""The share of all points that the fit does not use, and by which it is judged."""
N_WARM_UP = 1

Fill = Callable[[Any, int], None]
"""Gives a new session's cache so many tokens without computing them."""


@dataclass(frozen=True, order=True)
class BatchCase:
    """A step of ``n_decodes`` sessions and a prompt of ``n_prompt_tokens`` (0: none) on ``n_blocks`` blocks.

    ``is_spread``: the sessions' contexts have all of the plan's lengths in turn, the longest first; else all
    have the shortest.
    """

    n_blocks: int
    is_spread: bool
    n_decodes: int
    n_prompt_tokens: int


@dataclass(frozen=True)
class BatchPlan:
    """All ``cases``, ``rounds`` times after one round to warm up. Prompts of sessions that decode have
    ``lengths``.
    """

    cases: tuple[BatchCase, ...]
    lengths: tuple[int, ...]
    rounds: int

    @property
    def max_blocks(self) -> int:
        return max(case.n_blocks for case in self.cases)

    def contexts(self, is_spread: bool) -> list[int]:
        """Returns the number of tokens of each session that decodes, before its first step."""
        most = max(case.n_decodes for case in self.cases)
        longest_first = self.lengths[::-1]
        return [longest_first[i % len(longest_first)] if is_spread else self.lengths[0] for i in range(most)]


@dataclass(frozen=True)
class BatchSample:
    """One measured step. ``cached_tokens``: sum over its decodes. ``round`` is negative in warm-up."""

    round: int
    n_blocks: int
    is_spread: bool
    n_decodes: int
    cached_tokens: int
    n_prompt_tokens: int
    time_s: float


@dataclass(frozen=True)
class BatchPoint:
    """The samples of one case: the medians of their times and of their cached tokens."""

    n_blocks: int
    n_decodes: int
    cached_tokens: float
    n_prompt_tokens: int
    n_samples: int
    time_s: float
    is_held_out: bool


@dataclass(frozen=True)
class BatchFit:
    """The law of ``StepTimes.batch_s`` fitted to the points that are not held out."""

    points: tuple[BatchPoint, ...]
    fit: LinearFit
    times: StepTimes

    def fitted_s(self, point: BatchPoint) -> float:
        """Returns the fitted time of a point in seconds."""
        # The law depends only on the sum of the cached tokens, so one session can have them all.
        cached = [round(point.cached_tokens), *[0] * (point.n_decodes - 1)][: point.n_decodes]
        return self.times.batch_s(point.n_blocks, cached, range(point.n_prompt_tokens))

    def errors_ratio(self) -> list[float]:
        """Returns |fitted - measured| / measured of each point that was held out."""
        return [abs(self.fitted_s(p) / p.time_s - 1) for p in self.points if p.is_held_out]

    @property
    def mean_error_ratio(self) -> float:
        return float(np.mean(self.errors_ratio()))

    @property
    def max_error_ratio(self) -> float:
        return max(self.errors_ratio())


def plan_batches(plan: Plan, sizes: Sequence[int], max_tokens: int | None) -> BatchPlan | None:
    """Returns a plan of batches of ``sizes`` decodes with the lengths of ``plan``.

    It measures all blocks and half of them, to separate the cost per step from the cost per block. Returns
    None if sessions of at most ``max_tokens`` tokens are too short.
    """
    sizes = sorted({1, *sizes})
    usual = sorted({case.n_input_tokens for case in plan.cases})
    # A session takes part in at most one batch per size, and in each of the 2 x 3 batches with a prompt.
    n_steps = len(sizes) + 2 * 3
    lengths = [n for n in usual if max_tokens is None or n + n_steps <= max_tokens]
    if not lengths:
        return None
    prompts = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    cases = set()
    for n_blocks in {plan.max_blocks, max(1, plan.max_blocks // 2)}:
        for is_spread in (False, True):
            cases |= {BatchCase(n_blocks, is_spread, n, 0) for n in sizes}
        cases |= {
            BatchCase(n_blocks, False, n, tokens)
            for n in (0, sizes[len(sizes) // 2], sizes[-1])
            for tokens in prompts
        }
    return BatchPlan(tuple(sorted(cases)), tuple(lengths), plan.rounds)


async def measure_batches(
    plan: BatchPlan,
    compute: Compute,
    clock: Clock,
    payload: MakePayload,
    *,
    close: Close,
    fill: Fill | None = None,
    seed: int = 0,
) -> list[BatchSample]:
    """Returns all samples of ``plan``. ``compute`` makes batches and holds blocks ``[0,
    plan.max_blocks)``.

    ``fill`` gives sessions their contexts; else their prompts are computed, which takes longer than what is measured.
    """
    samples: list[BatchSample] = []
    # Many sessions have prompts of the same length, and drawing one takes longer than computing it.
    payload = functools.cache(payload)
    for number in range(-N_WARM_UP, plan.rounds):
        chance = random.Random(f"{seed}:{number}")
        groups = sorted({(case.n_blocks, case.is_spread) for case in plan.cases})
        chance.shuffle(groups)
        for n_blocks, is_spread in groups:
            cases = [case for case in plan.cases if (case.n_blocks, case.is_spread) == (n_blocks, is_spread)]
            chance.shuffle(cases)
            group = _Group(compute, clock, payload, fill, n_blocks, len(cases))
            try:
                await group.open(plan.contexts(is_spread))
                samples += [await group.measure(number, case) for case in cases]
            finally:
                for session in group.opened:
                    close(session)
    return samples


class _Group:
    """Sessions on the same blocks, shared by several cases. The caller closes those in ``opened``
    afterwards.
    """

    def __init__(
        self,
        compute: Compute,
        clock: Clock,
        payload: MakePayload,
        fill: Fill | None,
        n_blocks: int,
        n_cases: int,
    ) -> None:
        self._compute, self._clock, self._payload, self._fill = compute, clock, payload, fill
        self._n_blocks, self._n_cases = n_blocks, n_cases
        self._sessions: list[Any] = []
        self._positions: list[int] = []
        self.opened: list[Any] = []

    async def _session(self, max_tokens: int) -> Any:
        self.opened.append(await open_session(self._compute, CLIENT, 0, self._n_blocks, max_tokens))
        return self.opened[-1]

    def _step(self, session: Any, position: int, n_tokens: int) -> asyncio.Task[Any]:
        payload, arrived_at_s = self._payload(n_tokens), self._clock.now_s()
        return asyncio.ensure_future(self._compute.step(session, position, n_tokens, payload, arrived_at_s))

    async def open(self, contexts: Sequence[int]) -> None:
        """Open one session per entry of ``contexts``, with so many tokens, and one that keeps the server
        busy.
        """
        self._positions = list(contexts)
        for n_tokens in contexts:
            self._sessions.append(await self._session(n_tokens + self._n_cases))
            if self._fill is None:
                await self._step(self._sessions[-1], 0, n_tokens)
            else:
                self._fill(self._sessions[-1], n_tokens)
        self._busy = await self._session(1 + self._n_cases)
        await self._step(self._busy, 0, 1)
        self._n_busy = 1

    async def measure(self, number: int, case: BatchCase) -> BatchSample:
        prompt = await self._session(case.n_prompt_tokens) if case.n_prompt_tokens else None
        before = self._step(self._busy, self._n_busy, 1)
        self._n_busy += 1
        n = case.n_decodes
        cached_tokens = sum(self._positions[:n])
        steps = [self._step(self._sessions[i], self._positions[i], 1) for i in range(n)]
        self._positions[:n] = [position + 1 for position in self._positions[:n]]
        if case.n_prompt_tokens:
            steps.append(self._step(prompt, 0, case.n_prompt_tokens))
        await before
        await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
        ended_at_s = self._clock.now_s()
        together = {step.together for step in await asyncio.gather(*steps)}
        assert {one.steps for one in together} == {len(steps)}, (
            "all steps that wait for a busy server are one batch"
        )
        # The start as the server reports it: when this task runs again, the batch may be done already.
        [began_at_s] = {one.began_at_s for one in together}
        return BatchSample(
            number,
            case.n_blocks,
            case.is_spread,
            n,
            cached_tokens,
            case.n_prompt_tokens,
            ended_at_s - began_at_s,
        )


def fit_batches(samples: Sequence[BatchSample]) -> BatchFit:
    """Fit the law of ``StepTimes.batch_s`` to all points but a random ``HELD_OUT_RATIO`` of them, which judge
    it.
    """
    groups: dict[tuple[int, bool, int, int], list[BatchSample]] = {}
    for sample in samples:
        if sample.round >= 0:
            key = sample.n_blocks, sample.is_spread, sample.n_decodes, sample.n_prompt_tokens
            groups.setdefault(key, []).append(sample)
    keys = sorted(groups)
    held_out = set(random.Random("held out").sample(keys, max(1, round(HELD_OUT_RATIO * len(keys)))))
    points = tuple(
        BatchPoint(
            n_blocks=key[0],
            n_decodes=key[2],
            cached_tokens=float(np.median([sample.cached_tokens for sample in groups[key]])),
            n_prompt_tokens=key[3],
            n_samples=len(groups[key]),
            time_s=float(np.median([sample.time_s for sample in groups[key]])),
            is_held_out=key in held_out,
        )
        for key in keys
    )
    seen = [point for point in points if not point.is_held_out]
    columns: dict[str, list[float]] = {
        "decode_s": [p.n_blocks * (p.n_decodes > 0) for p in seen],
        "session_slope_s": [p.n_blocks * max(0, p.n_decodes - 1) for p in seen],
        "context_slope_s": [p.n_blocks * p.cached_tokens for p in seen],
        "prefill_slope_s": [p.n_blocks * p.n_prompt_tokens for p in seen],
        "prefill_base_s": [p.n_blocks * (p.n_prompt_tokens > 0) for p in seen],
        "step_base_s": [1.0] * len(seen),
        "prefill_curve_s": [p.n_blocks * p.n_prompt_tokens**2 for p in seen],
    }
    fit = fit_linear(columns, [p.time_s for p in seen])
    values: dict[str, Any] = {name: fit.value(name) for name in columns}
    return BatchFit(points, fit, StepTimes(**values))

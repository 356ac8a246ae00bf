"""Drives a compute backend through a plan. Every step's time is kept; nothing is averaged here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nodes.clock import Clock
from nodes.compute import Compute
from testbed.calibrate.plan import Case, Plan

CLIENT = "calibration"
Kind = Literal["prefill", "decode"]
Progress = Callable[[int, int], None]
MakePayload = Callable[[int], bytes]
"""Hidden states of so many tokens, as the backend takes them."""
Close = Callable[[Any], None]
"""Frees a session's cache."""


@dataclass(frozen=True)
class Sample:
    """One step. ``cached_tokens`` were in the session's cache before it; ``time_s`` from its start to its answer.

    ``round`` is negative in warm-up. ``is_used``: not warm-up, and as many sessions as the case says were
    busy from its start to its end. ``started_at_s`` counts from the start of the measurement.
    """

    round: int
    kind: Kind
    n_blocks: int
    n_input_tokens: int
    cached_tokens: int
    n_sessions: int
    session: int
    step: int
    started_at_s: float
    time_s: float
    is_used: bool


async def measure(
    plan: Plan,
    compute: Compute,
    clock: Clock,
    payload: MakePayload,
    *,
    close: Close = lambda _: None,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> list[Sample]:
    """All samples of ``plan`` in the order in which they were taken.

    A session of k blocks is one of blocks ``[0, k)``; ``compute`` holds at least ``plan.max_blocks``.
    ``progress`` is told how many cases are done, of how many.
    """
    began_at_s = clock.now_s()
    total = len(plan.cases) * (plan.rounds + plan.n_warm_up)
    samples: list[Sample] = []
    for done, (number, case) in enumerate(plan.ordered(seed)):
        progress(done, total)
        run = _CaseRun(number, case, compute, clock, payload, began_at_s)
        try:
            samples += await run.measure()
        finally:
            for session in run.sessions:
                close(session)
    progress(total, total)
    return samples


class _CaseRun:
    """One case in one round."""

    def __init__(
        self, number: int, case: Case, compute: Compute, clock: Clock, payload: MakePayload, began_at_s: float
    ) -> None:
        self._round = number
        self._case = case
        self._compute = compute
        self._clock = clock
        self._payload = payload
        self._began_at_s = began_at_s
        self._first_end_at_s: float | None = None
        self.sessions: list[Any] = []

    async def measure(self) -> list[Sample]:
        case = self._case
        self.sessions += [
            self._compute.new_session(CLIENT, 0, case.n_blocks, case.max_tokens)
            for _ in range(case.n_sessions)
        ]
        prompt, token = self._payload(case.n_input_tokens), self._payload(1)
        # Prompts one after another: each is a prefill of a server that does nothing else.
        prefills = [
            await self._step("prefill", number, 0, 0, case.n_input_tokens, prompt)
            for number in range(case.n_sessions)
        ]
        decodes = await asyncio.gather(*(self._decode(number, token) for number in range(case.n_sessions)))
        samples = [self._sample("prefill", *prefill, 1) for prefill in prefills]
        return samples + [
            self._sample("decode", *step, case.n_sessions) for steps in decodes for step in steps
        ]

    async def _decode(self, number: int, token: bytes) -> list[tuple[int, int, int, float, float]]:
        case = self._case
        steps = []
        for step in range(case.n_steps):
            if self._first_end_at_s is not None:
                break  # another session is done: from here on fewer are busy than the case says
            steps.append(await self._step("decode", number, step, case.n_input_tokens + step, 1, token))
        if self._first_end_at_s is None:
            self._first_end_at_s = self._clock.now_s()
        return steps

    async def _step(
        self, kind: Kind, number: int, step: int, position: int, n_tokens: int, payload: bytes
    ) -> tuple[int, int, int, float, float]:
        started_at_s = self._clock.now_s()
        await self._compute.step(self.sessions[number], position, n_tokens, payload, started_at_s)
        return number, step, position, started_at_s, self._clock.now_s()

    def _sample(
        self,
        kind: Kind,
        number: int,
        step: int,
        position: int,
        started_at_s: float,
        ended_at_s: float,
        n_sessions: int,
    ) -> Sample:
        first_end_at_s = self._first_end_at_s
        assert first_end_at_s is not None, "a case decodes at least one token"
        return Sample(
            round=self._round,
            kind=kind,
            n_blocks=self._case.n_blocks,
            n_input_tokens=self._case.n_input_tokens,
            cached_tokens=position,
            n_sessions=n_sessions,
            session=number,
            step=step,
            started_at_s=started_at_s - self._began_at_s,
            time_s=ended_at_s - started_at_s,
            is_used=self._round >= 0 and ended_at_s <= first_end_at_s,
        )


def used(samples: list[Sample]) -> Iterator[Sample]:
    """Those that count."""
    return (sample for sample in samples if sample.is_used)

"""Runs the cases of a plan on a compute backend, and keeps the time of each step. Nothing is averaged
here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from nodes.clock import Clock
from nodes.compute import Compute, open_session
from testbed.studies.calibrate.plan import Case, Plan

CLIENT = "calibration"
Kind = Literal["prefill", "decode"]
Progress = Callable[[int, int], None]
MakePayload = Callable[[int], bytes]
"""Returns hidden states of so many tokens, in the form that the backend expects."""
Close = Callable[[Any], None]
"""Frees a session's cache."""
_Chain = list[tuple[int, Any]]
"""(first block, the backend's session) of every range."""


@dataclass(frozen=True)
class Sample:
    """One step on blocks ``[first_block, first_block + n_blocks)``.

    - ``cached_tokens``: tokens in the session's cache before the step
    - ``started_at_s``: seconds since the start of the measurement; ``time_s``: from the step's start to its
      result
    - ``round``: negative in warm-up
    - ``is_used``: the step is not warm-up, and all sessions of the case were busy until its end
    """

    round: int
    kind: Kind
    n_blocks: int
    first_block: int
    n_input_tokens: int
    cached_tokens: int
    n_sessions: int
    is_paced: bool
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
    """Returns all samples of ``plan``, in the order in which they were measured.

    ``compute`` holds at least blocks ``[0, plan.max_blocks)``, over which the chain of each case goes.
    ``progress`` is called with the number of cases that are done, and the number of all.
    """
    began_at_s = clock.now_s()
    total = len(plan.cases) * (plan.rounds + plan.n_warm_up)
    samples: list[Sample] = []
    for done, (number, case) in enumerate(plan.ordered(seed)):
        progress(done, total)
        run = _CaseRun(number, case, plan, compute, clock, payload, began_at_s)
        try:
            samples += await run.measure()
        finally:
            for session in run.opened:
                close(session)
    progress(total, total)
    return samples


@dataclass(frozen=True)
class _Step:
    kind: Kind
    first_block: int
    session: int
    step: int
    position: int
    started_at_s: float
    ended_at_s: float


class _CaseRun:
    """One case in one round. The caller closes the backend's sessions in ``opened`` afterwards."""

    def __init__(
        self,
        number: int,
        case: Case,
        plan: Plan,
        compute: Compute,
        clock: Clock,
        payload: MakePayload,
        began_at_s: float,
    ) -> None:
        self._round = number
        self._case = case
        self._ranges = case.ranges(plan.max_blocks)
        self._pause_s = plan.pause_s if case.is_paced else 0.0
        self._compute = compute
        self._clock = clock
        self._payload = payload
        self._began_at_s = began_at_s
        self._first_end_at_s: float | None = None
        self._steps: list[_Step] = []
        self.opened: list[Any] = []

    async def measure(self) -> list[Sample]:
        case = self._case
        chains = []
        for _ in range(case.n_sessions):
            chain = []
            for first, last in self._ranges:
                session = await open_session(self._compute, CLIENT, first, last, case.max_tokens)
                self.opened.append(session)
                chain.append((first, session))
            chains.append(chain)
        prompt, token = self._payload(case.n_input_tokens), self._payload(1)
        # Prompts are computed one after another, each on a backend that is otherwise idle.
        for number, chain in enumerate(chains):
            await self._step("prefill", number, chain, 0, 0, case.n_input_tokens, prompt)
        await asyncio.gather(*(self._decode(number, chain, token) for number, chain in enumerate(chains)))
        return [self._sample(step) for step in self._steps]

    async def _decode(self, number: int, chain: _Chain, token: bytes) -> None:
        case = self._case
        for step in range(case.n_steps):
            if self._first_end_at_s is not None:
                return  # another session is done, so fewer are busy now than the case requires
            await self._step("decode", number, chain, step, case.n_input_tokens + step, 1, token)
        if self._first_end_at_s is None:
            self._first_end_at_s = self._clock.now_s()

    async def _step(
        self, kind: Kind, number: int, chain: _Chain, step: int, position: int, n_tokens: int, payload: bytes
    ) -> None:
        """Computes one token, or the prompt, on each range of the chain."""
        for first, session in chain:
            if self._pause_s:
                await self._clock.sleep_until_s(self._clock.now_s() + self._pause_s)
            started_at_s = self._clock.now_s()
            await self._compute.step(session, position, n_tokens, payload, started_at_s)
            ended_at_s = self._clock.now_s()
            self._steps.append(_Step(kind, first, number, step, position, started_at_s, ended_at_s))

    def _sample(self, step: _Step) -> Sample:
        case = self._case
        assert self._first_end_at_s is not None, "a case decodes at least one token"
        return Sample(
            round=self._round,
            kind=step.kind,
            n_blocks=case.n_blocks,
            first_block=step.first_block,
            n_input_tokens=case.n_input_tokens,
            cached_tokens=step.position,
            n_sessions=case.n_sessions if step.kind == "decode" else 1,
            is_paced=case.is_paced,
            session=step.session,
            step=step.step,
            started_at_s=step.started_at_s - self._began_at_s,
            time_s=step.ended_at_s - step.started_at_s,
            is_used=self._round >= 0 and step.ended_at_s <= self._first_end_at_s,
        )

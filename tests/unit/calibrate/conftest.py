from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nodes.compute import Computed
from policies.steps import StepTimes
from testbed.studies.calibrate.fit import Fit, fit_times
from testbed.studies.calibrate.measure import Sample, measure
from testbed.studies.calibrate.plan import Plan, make_plan
from testbed.studies.calibrate.points import points_of
from tests.support.manual_clock import ManualClock

TOKEN_BYTES = 8


@dataclass
class KnownSession:
    n_blocks: int
    max_tokens: int
    position: int = 0


@dataclass
class KnownCompute:
    """Takes exactly what a known model says, on a clock that the test drives; ``noise`` is a relative sigma.

    ``is_serial``: one step at a time. Otherwise a step is slowed by the sessions that are stepping as it starts.
    """

    times: StepTimes
    clock: ManualClock
    noise: float = 0.0
    is_serial: bool = False
    token_bytes: int = TOKEN_BYTES
    n_stepping: int = 0
    free_at_s: float = 0.0
    open: list[KnownSession] = field(default_factory=list)
    most_open: int = 0
    random: random.Random = field(default_factory=lambda: random.Random(5))

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> KnownSession:
        assert client
        session = KnownSession(last - first, max_tokens)
        self.open.append(session)
        self.most_open = max(self.most_open, len(self.open))
        return session

    def opening(self, session: KnownSession) -> None:
        return None

    def close_session(self, session: KnownSession) -> None:
        """Keeps it in ``open``: those who want it gone remove it."""

    async def step(
        self, session: KnownSession, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        assert session in self.open, "a session that was closed takes no steps"
        assert position == session.position and position + n_tokens <= session.max_tokens
        assert len(payload) == n_tokens * self.token_bytes
        session.position += n_tokens
        self.n_stepping += 1
        await asyncio.sleep(0)  # all that start at this instant have counted themselves
        t = self.times
        if position:
            block_s = t.decode_s + t.context_slope_s * position
        else:
            block_s = t.prefill_base_s + t.prefill_slope_s * n_tokens + t.prefill_curve_s * n_tokens**2
        takes_s = t.step_base_s + session.n_blocks * block_s
        takes_s *= 1 + t.contention_ratio * (self.n_stepping - 1)
        takes_s *= max(0.1, 1 + self.noise * self.random.gauss(0, 1))
        start_at_s = arrived_at_s
        if self.is_serial:
            start_at_s = max(arrived_at_s, self.free_at_s)
            self.free_at_s = start_at_s + takes_s
        await self.clock.sleep_until_s(start_at_s + takes_s)
        self.n_stepping -= 1
        return Computed(payload)


Measured = tuple[KnownCompute, list[Sample]]


async def run_plan(plan: Plan, times: StepTimes, noise: float = 0.0, is_serial: bool = False) -> Measured:
    """``plan`` measured on a ``KnownCompute``."""
    clock = ManualClock()
    compute = KnownCompute(times, clock, noise, is_serial)
    work = asyncio.ensure_future(
        measure(plan, compute, clock, lambda n: bytes(n * TOKEN_BYTES), close=compute.open.remove)
    )
    while not work.done():
        await clock.advance(100.0)
    return compute, work.result()


@functools.cache
def _fits(times: StepTimes, noise: float, is_serial: bool, options: frozenset[tuple[str, int]]) -> Fit:
    plan = make_plan(8, 600, lengths=(16, 128, 512), **{"n_output_tokens": 64, "rounds": 2, **dict(options)})
    _, samples = asyncio.run(run_plan(plan, times, noise, is_serial))
    return fit_times(points_of(samples))


@pytest.fixture
def calibrate() -> Callable[..., Fit]:
    """The fits of a plan for 8 blocks and 600 tokens on known times; made once for the same arguments."""

    def run(times: StepTimes, noise: float = 0.0, is_serial: bool = False, **options: int) -> Fit:
        return _fits(times, noise, is_serial, frozenset(options.items()))

    return run

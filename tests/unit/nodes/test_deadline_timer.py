from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

import pytest
import uvloop

from nodes.timers import DeadlineTimer

Body = Callable[[DeadlineTimer], Coroutine[None, None, None]]
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS.values(), ids=LOOPS.keys())
def run(request: pytest.FixtureRequest) -> Callable[[Body], None]:
    """Runs a body with a timer of its own on a real loop."""

    async def with_timer(body: Body) -> None:
        timer = DeadlineTimer()
        try:
            async with asyncio.timeout(10):
                await body(timer)
        finally:
            timer.close()

    def run(body: Body) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(with_timer(body))

    return run


async def fired(timer: DeadlineTimer, delays_s: Sequence[float]) -> list[tuple[float, float]]:
    """What fires of deadlines after an instant that is still to come when all of them wait, however seldom this process runs.

    Returns (delay, when it fired after the instant) of those that are less than a second away.
    """
    margin_s = 0.02
    while True:
        instant_s, found = time.monotonic() + margin_s, list[tuple[float, float]]()
        futures = [timer.at(instant_s + delay_s) for delay_s in delays_s]
        for future, delay_s in zip(futures, delays_s, strict=True):
            future.add_done_callback(partial(note, found, instant_s, delay_s))
        all_wait = time.monotonic() < instant_s
        await asyncio.gather(
            *(future for future, delay_s in zip(futures, delays_s, strict=True) if delay_s < 1)
        )
        if all_wait:
            return found
        margin_s *= 2


def note(found: list[tuple[float, float]], instant_s: float, delay_s: float, _: object) -> None:
    found.append((delay_s, time.monotonic() - instant_s))


def test_deadlines_fire_in_order_and_never_early(run: Callable[[Body], None]) -> None:
    async def body(timer: DeadlineTimer) -> None:
        delays_s = [0.013, 0.001, 0.02, 0.005, 0.00501, 0.00502, 0.0001, 0.005]
        found = await fired(timer, delays_s)
        assert [delay_s for delay_s, _ in found] == sorted(delays_s)
        assert all(fired_s >= delay_s for delay_s, fired_s in found)

    run(body)


def test_an_earlier_deadline_that_is_added_later_fires_first(run: Callable[[Body], None]) -> None:
    async def body(timer: DeadlineTimer) -> None:
        assert [delay_s for delay_s, _ in await fired(timer, [3600, 0.01, 0.002])] == [0.002, 0.01]

    run(body)


def test_an_instant_that_has_passed_resolves_at_once(run: Callable[[Body], None]) -> None:
    async def body(timer: DeadlineTimer) -> None:
        for instant in (time.monotonic(), time.monotonic() - 5, 0.0, -1.0):
            assert timer.at(instant).done()

    run(body)


def test_a_cancelled_deadline_does_not_keep_later_ones_from_firing(run: Callable[[Body], None]) -> None:
    async def body(timer: DeadlineTimer) -> None:
        now = time.monotonic()
        first, second = timer.at(now + 0.002), timer.at(now + 0.004)
        first.cancel()
        await second
        assert time.monotonic() >= now + 0.004

    run(body)


def test_a_timer_serves_one_deadline_after_another(run: Callable[[Body], None]) -> None:
    async def body(timer: DeadlineTimer) -> None:
        instant = time.monotonic()
        for _ in range(50):
            instant += 0.0003
            await timer.at(instant)
            assert time.monotonic() >= instant

    run(body)


def test_closing_cancels_what_is_pending(run: Callable[[Body], None]) -> None:
    async def body(timer: DeadlineTimer) -> None:
        other = DeadlineTimer()
        pending = [other.at(time.monotonic() + 3600 + i) for i in range(3)]
        other.close()
        assert all(future.cancelled() for future in pending)
        assert not timer.at(time.monotonic() + 3600).done()

    run(body)

from __future__ import annotations

import asyncio

from nodes.clock import ScaledClock
from tests.support.manual_clock import ManualClock


async def test_sleepers_wake_in_the_order_of_their_instants_each_at_its_own() -> None:
    clock = ManualClock()
    woken: list[tuple[str, float]] = []

    async def sleep(name: str, at_s: float) -> None:
        await clock.sleep_until_s(at_s)
        woken.append((name, clock.now_s()))

    tasks = [
        asyncio.create_task(sleep(*case)) for case in (("c", 3.0), ("a", 1.0), ("b", 1.0), ("past", -1.0))
    ]
    await clock.advance(2.0)
    assert woken == [("past", 0.0), ("a", 1.0), ("b", 1.0)]
    assert clock.now_s() == 2.0
    await clock.advance(1.0)
    assert woken[-1] == ("c", 3.0)
    await asyncio.gather(*tasks)


async def test_a_sleeper_that_sleeps_again_within_one_advance_wakes_again_within_it() -> None:
    clock = ManualClock()

    async def tick() -> list[float]:
        ticks = []
        for i in range(1, 5):
            await clock.sleep_until_s(i * 0.5)
            ticks.append(clock.now_s())
        return ticks

    work = asyncio.create_task(tick())
    await clock.advance(10.0)
    assert work.result() == [0.5, 1.0, 1.5, 2.0]
    assert clock.now_s() == 10.0


async def test_a_cancelled_sleeper_holds_nobody_up() -> None:
    clock = ManualClock()
    cancelled = asyncio.create_task(clock.sleep_until_s(1.0))
    other = asyncio.create_task(clock.sleep_until_s(2.0))
    await clock.advance(0.0)
    cancelled.cancel()
    await clock.advance(2.0)
    assert cancelled.cancelled()
    assert other.done()


async def test_scaled_time_runs_scale_times_as_fast_from_the_runs_origin() -> None:
    real, fast = ScaledClock(0.0, 1.0), ScaledClock(0.0, 1000.0)
    before_s, fast_s, after_s = real.now_s(), fast.now_s(), real.now_s()
    assert before_s * 1000 <= fast_s <= after_s * 1000
    fast.origin_at = before_s
    started_s = fast.now_s()
    assert started_s >= 0.0
    await fast.sleep_until_s(started_s + 3.0)
    assert fast.now_s() >= started_s + 3.0
    fast.close()

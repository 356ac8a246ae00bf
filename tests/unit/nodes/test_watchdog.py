"""Limits in scenario time on what a task does."""

from __future__ import annotations

import asyncio
import math

import pytest

from nodes.watchdog import Overdue, Watchdog
from tests.support.manual_clock import ManualClock


async def wait_under(watchdog: Watchdog, limit_s: float) -> str:
    try:
        with watchdog.limit(limit_s):
            await asyncio.Event().wait()
    except Overdue:
        return "overdue"
    return "done"


async def test_each_of_many_limits_ends_what_it_is_for_at_its_own_instant() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    waits = [asyncio.ensure_future(wait_under(watchdog, limit_s)) for limit_s in (180.0, 5.0, 60.0)]
    await clock.advance(4.9)
    assert not any(wait.done() for wait in waits)
    await clock.advance(0.1)
    assert [wait.done() for wait in waits] == [False, True, False]
    await clock.advance(55.0)
    assert [wait.done() for wait in waits] == [False, True, True]
    await clock.advance(120.0)
    assert [wait.result() for wait in waits] == ["overdue"] * 3
    watchdog.close()


async def test_work_that_is_done_within_the_limit_is_left_alone() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    with watchdog.limit(5.0):
        await asyncio.sleep(0)
    await clock.advance(10.0)
    await asyncio.sleep(0)
    watchdog.close()


async def test_no_limit_starts_no_clock() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    with watchdog.limit(math.inf):
        await asyncio.sleep(0)
    assert not clock._sleepers


async def test_whoever_cancels_the_task_goes_before_the_limit() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    wait = asyncio.ensure_future(wait_under(watchdog, 5.0))
    await clock.advance(1.0)
    wait.cancel()
    with pytest.raises(asyncio.CancelledError):
        await wait
    watchdog.close()


async def test_many_limits_in_turn_keep_one_sleeper() -> None:
    clock = ManualClock()
    watchdog = Watchdog(clock)
    for _ in range(1000):
        with watchdog.limit(180.0):
            await asyncio.sleep(0)
    assert len(clock._sleepers) == 1
    watchdog.close()

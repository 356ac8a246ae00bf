"""The loop whose time jumps: instants are exact, ties are in order, and processes in it stop and go on."""

from __future__ import annotations

import asyncio
import contextvars
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import given
from hypothesis import strategies as st

from nodes.clock import NS, VirtualClock, nanoseconds, on_tick, run_clock
from testbed.runtime.virtual.loop import MemoryLoop
from testbed.runtime.virtual.processes import CURRENT, Process

T = TypeVar("T")


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=MemoryLoop) as runner:
        return runner.run(main())


def test_a_year_passes_in_no_time() -> None:
    async def main() -> float:
        clock = VirtualClock()
        clock.origin_at = 1
        await clock.sleep_until_s(365 * 86_400.0)
        return clock.now_s()

    began_at = time.monotonic()
    assert run(main) == 365 * 86_400.0
    assert time.monotonic() - began_at < 60


def test_time_stands_still_while_anything_is_ready() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = []
        later = asyncio.ensure_future(asyncio.sleep(1e-9))
        for _ in range(100):
            await asyncio.sleep(0)
            seen.append(loop.time())
        later.cancel()
        return seen

    assert set(run(main)) == {0.0}


def test_timers_of_one_instant_fire_in_the_order_in_which_they_were_set() -> None:
    async def main() -> list[tuple[int, float]]:
        loop = asyncio.get_running_loop()
        fired: list[tuple[int, float]] = []
        for number, at_s in enumerate([2.0, 1.0, 2.0, 1.0, 1.5]):
            loop.call_at(at_s, lambda number=number: fired.append((number, loop.time())))
        await asyncio.sleep(3)
        return fired

    assert run(main) == [(1, 1.0), (3, 1.0), (4, 1.5), (0, 2.0), (2, 2.0)]


def test_what_comes_of_a_timer_is_done_before_the_next_one_of_that_instant_fires() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        done: list[str] = []

        async def work(name: str) -> None:
            for step in range(3):
                done.append(f"{name}{step}")
                await asyncio.sleep(0)

        tasks: list[asyncio.Task[None]] = []
        for name in "ab":
            loop.call_at(1.0, lambda name=name: tasks.append(asyncio.ensure_future(work(name))))
        await asyncio.sleep(2)
        await asyncio.gather(*tasks)
        return done

    assert run(main) == ["a0", "a1", "a2", "b0", "b1", "b2"]


@given(st.lists(st.integers(1, 5 * NS), min_size=1, max_size=20), st.randoms())
def test_times_added_in_any_order_are_one_instant(times_ns: list[int], chance: random.Random) -> None:
    def added() -> float:
        at_s = 0.0
        for ns in times_ns:
            at_s = on_tick(at_s + ns / NS)
        return at_s

    first = added()
    chance.shuffle(times_ns)
    assert added() == first == sum(times_ns) / NS


@given(st.floats(0, 4e6))
def test_nobody_wakes_before_his_time(at_s: float) -> None:
    at_ns = nanoseconds(at_s)
    assert at_ns / NS >= at_s
    assert at_ns == 0 or (at_ns - 1) / NS < at_s


def test_a_cancelled_timer_does_not_fire_and_thousands_of_them_are_forgotten() -> None:
    async def main() -> tuple[int, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MemoryLoop)
        fired: list[int] = []
        for number in range(10_000):
            loop.call_later(5.0, fired.append, number).cancel()
        kept = len(loop._timers)
        await asyncio.sleep(10)
        return len(fired), kept

    n_fired, n_kept = run(main)
    assert n_fired == 0
    assert n_kept < 5000


def test_asyncios_own_limits_are_limits_in_virtual_time() -> None:
    async def main() -> float:
        try:
            async with asyncio.timeout(180.0):
                await asyncio.Event().wait()
        except TimeoutError:
            return asyncio.get_running_loop().time()
        raise AssertionError("no limit")

    assert run(main) == 180.0


def test_who_is_cancelled_while_asleep_leaves_no_timer_behind() -> None:
    async def main() -> int | None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MemoryLoop)
        sleeper = asyncio.ensure_future(VirtualClock().sleep_until_s(1000.0))
        await asyncio.sleep(1)
        sleeper.cancel()
        await asyncio.gather(sleeper, return_exceptions=True)
        return loop.next_timer_ns()

    assert run(main) is None


def test_the_clock_of_a_run_is_the_one_that_fits_its_loop() -> None:
    async def main() -> bool:
        clock = run_clock(1.0)
        assert clock.known_s() is None
        clock.origin_at = 2
        assert clock.scenario_s(2.5) == 0.5
        return clock.is_virtual

    assert run(main)
    assert not asyncio.run(main_of_real_time())


async def main_of_real_time() -> bool:
    return run_clock(1.0).is_virtual


def test_a_stopped_process_does_nothing_until_it_goes_on_and_then_all_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, MemoryLoop)
        process, done = Process(1, "server", "198.18.0.1"), []

        async def work() -> None:
            for number in range(4):
                await asyncio.sleep(1)
                done.append((f"step {number}", loop.time()))

        context = contextvars.copy_context()
        context.run(CURRENT.set, process)
        working = loop.create_task(work(), context=context)
        loop.call_at(1.5, done.append, ("timer", 1.5), context=context)
        await asyncio.sleep(1.2)
        process.parked = []
        await asyncio.sleep(3.8)
        loop.resume(process)
        await working
        return done

    assert run(main) == [("step 0", 1.0), ("timer", 1.5), ("step 1", 5.0), ("step 2", 6.0), ("step 3", 7.0)]


def test_tasks_belong_to_the_process_that_makes_them() -> None:
    async def main() -> set[str]:
        process = Process(1, "server", "198.18.0.1")
        made: list[asyncio.Task[None]] = []
        context = contextvars.copy_context()
        context.run(CURRENT.set, process)

        async def outer() -> None:
            made.append(asyncio.create_task(asyncio.sleep(5), name="inner"))
            await asyncio.sleep(1)

        asyncio.get_running_loop().create_task(outer(), context=context, name="outer")
        made.append(asyncio.create_task(asyncio.sleep(5), name="nobody's"))
        await asyncio.sleep(0.5)
        return {task.get_name() for task in process.tasks}

    assert run(main) == {"outer", "inner"}

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from nodes.compute import StubCompute, StubProfile
from nodes.digest import apply_to_rows, read_rows, write_rows
from policies.steps import StepTimes
from tests.support.manual_clock import ManualClock

TOKEN_BYTES = 8
TIMES = StepTimes(decode_s=0.25, prefill_base_s=2.0, prefill_slope_s=0.125)
PROFILE = StubProfile(TOKEN_BYTES, TIMES)
SERIAL = StubProfile(TOKEN_BYTES, TIMES, batching="serial")


class Steps:
    """Starts steps at given instants and notes when each is done."""

    def __init__(self, profile: StubProfile) -> None:
        self.clock = ManualClock()
        self.compute = StubCompute(profile, self.clock)
        self.done_at_s: dict[str, float] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def start(
        self, name: str, position: int, n_tokens: int, n_blocks: int, client: str = "c", late_s: float = 0.0
    ) -> None:
        session = self.compute.new_session(client, 0, n_blocks, 1000)
        arrived_at_s = self.clock.now_s() - late_s

        async def run() -> None:
            await self.compute.step(session, position, n_tokens, bytes(n_tokens * TOKEN_BYTES), arrived_at_s)
            self.done_at_s[name] = self.clock.now_s()

        self.tasks.append(asyncio.create_task(run()))


async def test_a_decode_takes_its_blocks_times_the_decode_time() -> None:
    steps = Steps(PROFILE)
    steps.start("decode", position=20, n_tokens=1, n_blocks=7)
    await steps.clock.advance(100)
    assert steps.done_at_s == {"decode": 7 * 0.25}


async def test_a_prefill_takes_its_blocks_times_base_and_slope() -> None:
    steps = Steps(PROFILE)
    steps.start("prefill", position=0, n_tokens=20, n_blocks=3)
    await steps.clock.advance(100)
    assert steps.done_at_s == {"prefill": 3 * (2.0 + 20 * 0.125)}


@pytest.mark.parametrize("profile", [PROFILE, SERIAL], ids=["concurrent", "serial"])
async def test_time_counts_from_the_arrival_so_that_a_late_start_is_no_later_end(
    profile: StubProfile,
) -> None:
    steps = Steps(profile)
    await steps.clock.advance(10)
    steps.start("decode", position=1, n_tokens=1, n_blocks=4, late_s=0.75)
    await steps.clock.advance(100)
    assert steps.done_at_s == {"decode": 10 - 0.75 + 1.0}


async def test_overheads_are_added_once_per_step_for_the_client_they_belong_to() -> None:
    profile = StubProfile(
        TOKEN_BYTES,
        TIMES,
        token_overhead_s={"far": 0.5},
        input_overhead_s={"far": (4.0, 0.25), "odd": (-1.0, 0.0)},
    )
    steps = Steps(profile)
    for client in ("far", "near", "odd"):
        steps.start(f"{client} decode", 1, 1, 2, client)
        steps.start(f"{client} round", 1, 4, 2, client)
        steps.start(f"{client} prefill", 0, 8, 2, client)
    await steps.clock.advance(100)
    assert steps.done_at_s == {
        "near decode": 0.5,
        "odd decode": 0.5,
        "far decode": 0.5 + 0.5,
        "near round": 5.0,
        "odd round": 5.0,
        "far round": 5.0 + 0.5,
        "near prefill": 6.0,
        "odd prefill": 6.0,
        "far prefill": 6.0 + 4.0 + 2.0,
    }


async def test_concurrent_sessions_do_not_slow_each_other() -> None:
    steps = Steps(PROFILE)
    for i in range(20):
        steps.start(f"s{i}", 5, 1, 4)
    await steps.clock.advance(100)
    assert set(steps.done_at_s.values()) == {1.0}
    assert len(steps.done_at_s) == 20


async def test_a_serial_server_serves_steps_one_after_another_in_the_order_of_arrival() -> None:
    steps = Steps(SERIAL)
    steps.start("a", 1, 1, 4)
    steps.start("b", 1, 1, 8)
    steps.start("c", 1, 1, 4)
    await steps.clock.advance(0.5)
    steps.start("d", 1, 1, 4)
    await steps.clock.advance(100)
    assert steps.done_at_s == {"a": 1.0, "b": 3.0, "c": 4.0, "d": 5.0}
    assert list(steps.done_at_s) == ["a", "b", "c", "d"]
    steps.start("after a pause", 1, 1, 4)
    await steps.clock.advance(100)
    assert steps.done_at_s["after a pause"] == 101.5


async def test_a_clients_overhead_does_not_keep_a_serial_server_busy() -> None:
    profile = StubProfile(
        TOKEN_BYTES, StepTimes(0.25, 0.0, 0.0), token_overhead_s={"c": 10.0}, batching="serial"
    )
    steps = Steps(profile)
    steps.start("a", 1, 1, 4)
    steps.start("b", 1, 1, 4)
    await steps.clock.advance(100)
    assert steps.done_at_s == {"a": 11.0, "b": 12.0}


async def test_a_thousand_steps_one_after_another_end_where_one_sum_ends() -> None:
    clock = ManualClock()
    compute = StubCompute(StubProfile(TOKEN_BYTES, StepTimes(2**-9, 0.0, 0.0)), clock)
    session = compute.new_session("c", 0, 3, 2000)

    async def run() -> None:
        for position in range(1, 1001):
            await compute.step(session, position, 1, bytes(TOKEN_BYTES), clock.now_s())

    work = asyncio.create_task(run())
    await clock.advance(3000 * 2**-9)
    assert work.done()
    assert clock.now_s() == 3000 * 2**-9


REFINED = StubProfile(
    TOKEN_BYTES,
    replace(TIMES, step_base_s=0.5, context_slope_s=2**-6, prefill_curve_s=2**-4, contention_ratio=0.25),
)


async def test_a_step_takes_its_base_once_and_more_per_block_for_cached_tokens_and_squared_lengths() -> None:
    steps = Steps(REFINED)
    steps.start("prefill", position=0, n_tokens=8, n_blocks=3)
    await steps.clock.advance(100)
    steps.start("decode", position=8, n_tokens=1, n_blocks=3)
    await steps.clock.advance(100)
    assert steps.done_at_s == {
        "prefill": 0.5 + 3 * (2.0 + 8 * 0.125 + 64 * 2**-4),
        "decode": 100.5 + 3 * (0.25 + 8 * 2**-6),
    }


async def test_a_step_is_slowed_by_those_that_compute_as_it_arrives_and_by_no_others() -> None:
    profile = StubProfile(
        TOKEN_BYTES,
        StepTimes(0.25, 0.0, 0.0, contention_ratio=0.5),
    )
    steps = Steps(profile)
    steps.start("a", 1, 1, 4)
    await steps.clock.advance(0.5)
    steps.start("b", 1, 1, 4)
    await steps.clock.advance(0.25)
    steps.start("c", 1, 1, 4)
    await steps.clock.advance(100)
    assert steps.done_at_s == {"a": 1.0, "b": 0.5 + 1.5, "c": 0.75 + 2.0}
    steps.start("alone again", 1, 1, 4)
    await steps.clock.advance(100)
    assert steps.done_at_s["alone again"] == 101.75


async def test_steps_that_wait_for_each_other_do_not_slow_each_other_too() -> None:
    steps = Steps(
        StubProfile(
            TOKEN_BYTES,
            StepTimes(0.25, 0.0, 0.0, contention_ratio=0.5),
            batching="serial",
        )
    )
    steps.start("a", 1, 1, 4)
    steps.start("b", 1, 1, 4)
    await steps.clock.advance(100)
    assert steps.done_at_s == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize("seed", range(5))
async def test_a_session_that_goes_back_again_and_again_has_the_caches_of_what_it_keeps(seed: int) -> None:
    rng, compute = (
        random.Random(seed),
        StubCompute(StubProfile(TOKEN_BYTES, StepTimes(0.0, 0.0, 0.0)), ManualClock()),
    )
    session, kept = compute.new_session("c", 0, 3, 1000), list[int]()
    for _ in range(60):
        position = rng.randint(max(len(kept) - 6, 0), len(kept))
        values = [rng.randrange(2**32) for _ in range(rng.choice((1, 1, 2, 5)))]
        kept = [*kept[:position], *values]
        answer = await compute.step(session, position, len(values), write_rows(values, TOKEN_BYTES), 0.0)
        expected = apply_to_rows(kept, 0, [0, 0, 0])[position:]
        assert read_rows(answer.payload, TOKEN_BYTES) == expected

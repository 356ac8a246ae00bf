"""Continuous batching: which steps are computed together and when they end, worked out by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.batching import Batch, Batches, Composition, Step, batches_of
from nodes.compute import StubCompute, StubProfile
from policies.steps import StepTimes
from tests.support.manual_clock import ManualClock

TIMES = StepTimes(
    1.0,
    2.0,
    0.5,
    step_base_s=0.25,
    session_slope_s=0.125,
    context_slope_s=0.0625,
    decode_context_tokens=8.0,
    prefill_curve_s=0.03125,
)
"""Times are binary fractions, so that sums are exact."""
TOKEN_BYTES = 8


def run(steps: Sequence[Step], chunk_tokens: int | None = None, times: StepTimes = TIMES) -> list[Batch]:
    return list(batches_of(steps, Batches(times, chunk_tokens)))


def decode(arrived_at_s: float, position: int = 8, n_blocks: int = 2) -> Step:
    return Step(arrived_at_s, position, 1, range(n_blocks))


def prompt(arrived_at_s: float, n_tokens: int = 4, n_blocks: int = 2) -> Step:
    return Step(arrived_at_s, 0, n_tokens, range(n_blocks))


def test_a_step_alone_takes_what_it_took_without_batching() -> None:
    for step in (decode(3.0, 20, 5), prompt(3.0, 7, 3)):
        (batch,) = run([step])
        alone_s = TIMES.step_s(step.position, step.n_tokens, step.blocks)
        context, end = (step.position, 0) if step.is_decode else (0, step.n_tokens)
        together = Composition(1, step.n_tokens, context, end, step.n_blocks, 3.0)
        assert batch == Batch(together, 3.0 + alone_s, (step,))


def test_what_waits_when_a_server_becomes_free_goes_together() -> None:
    first, second, third = decode(0.0, 8, 2), decode(0.5, 10, 4), decode(1.0, 14, 2)
    one, two = run([first, second, third])
    assert one.ended == (first,)
    assert one.end_at_s == 0.25 + 2 * 1.0
    assert two.ended == (second, third)
    # Four blocks, those of the longest step: a_d, one more session, and 24 cached tokens, of which a_d includes 8.
    assert two.end_at_s == 2.25 + 0.25 + 4 * (1.0 + 0.125 + (24 - 8) * 0.0625)
    assert two.together == Composition(2, 2, 24, 0, 4, 2.25)


def test_one_prompt_at_most_goes_with_the_decodes_and_the_next_one_later() -> None:
    busy, one, two, other = decode(0.0), prompt(0.5), prompt(0.75), decode(1.0)
    batches = run([busy, one, two, other])
    assert [batch.ended for batch in batches] == [(busy,), (other, one), (two,)]
    prompt_s = 2.0 + 0.5 * 4 + 0.03125 * 16
    assert batches[1].end_at_s - batches[1].together.began_at_s == 0.25 + 2 * (prompt_s + 1.0)
    assert batches[1].together.tokens == 5


def test_a_prompt_in_chunks_ends_with_its_last_and_lets_decodes_in_between() -> None:
    long, late = prompt(0.0, 10), decode(0.5)
    batches = run([long, late], chunk_tokens=4)
    assert [(batch.together.tokens, batch.ended) for batch in batches] == [
        (4, ()),
        (5, (late,)),
        (2, (long,)),
    ]
    first, second, last = (batch.end_at_s - batch.together.began_at_s for batch in batches)
    assert first == 0.25 + 2 * (2.0 + 0.5 * 4 + 0.03125 * 16)
    assert second == 0.25 + 2 * (2.0 + 0.5 * 4 + 0.03125 * (64 - 16) + 1.0)
    assert last == 0.25 + 2 * (2.0 + 0.5 * 2 + 0.03125 * (100 - 64))


def test_steps_of_one_instant_do_not_depend_on_what_the_machine_does_first() -> None:
    first, second = decode(0.0), decode(2.25)  # arrives as the first ends
    assert [batch.ended for batch in run([first, second])] == [(first,), (second,)]
    third = decode(2.25)
    assert [batch.ended for batch in run([decode(0.0), second, third])][1:] == [(second,), (third,)]


def test_a_draft_that_is_verified_goes_with_the_decodes() -> None:
    busy, draft, other = decode(0.0), Step(0.5, 8, 4, range(2)), decode(1.0)
    batches = run([busy, draft, other], chunk_tokens=2)
    assert batches[1].ended == (draft, other)
    assert batches[1].together.tokens == 5
    pairs = 12**2 - 8**2 + 9**2 - 8**2
    took_s = batches[1].end_at_s - batches[1].together.began_at_s
    assert took_s == 0.25 + 2 * (TIMES.prefill_base_s + 5 * 0.5 + 0.03125 * pairs)


def test_many_short_sessions_take_longer_than_one_of_the_length_that_the_law_is_for() -> None:
    busy, *short = decode(0.0), *(decode(0.5, position=1) for _ in range(40))
    last = run([busy, *short])[-1]
    assert last.together.steps == 40
    assert last.end_at_s - last.together.began_at_s == 0.25 + 2 * (1.0 + 39 * 0.125 + (40 - 8) * 0.0625)


@pytest.mark.parametrize(("slow_from_s", "slow_until_s"), [(0.5, 2.0), (2.0, 3.0)])
def test_a_slow_server_is_slow_for_the_batches_that_begin_while_it_is(
    slow_from_s: float, slow_until_s: float
) -> None:
    def factor_at(at_s: float) -> float:
        return 3.0 if slow_from_s <= at_s < slow_until_s else 1.0

    waiting = [decode(0.0), decode(0.5), decode(1.0)]
    first, last = batches_of(waiting, Batches(TIMES, factor_at=factor_at))
    assert (first.end_at_s, last.together.began_at_s) == (2.25, 2.25)
    both_s = 0.25 + 2 * (1.125 + 8 * 0.0625)
    assert last.end_at_s - 2.25 == (3 * both_s if slow_until_s > 2.25 else both_s)


def test_of_a_prompt_in_chunks_those_are_slow_that_begin_while_the_server_is() -> None:
    batches = Batches(TIMES, 4, lambda at_s: 2.0 if at_s == 0.0 else 1.0)
    alone, slowed = run([prompt(0.0, 12)], 4), list(batches_of([prompt(0.0, 12)], batches))
    took_s = [[b.end_at_s - b.together.began_at_s for b in found] for found in (alone, slowed)]
    assert took_s[1] == [2 * took_s[0][0], *took_s[0][1:]]


steps = st.builds(
    Step,
    st.floats(0, 50),
    st.integers(0, 40),
    st.integers(1, 30),
    st.integers(1, 8).map(range),
)


@given(st.lists(steps, max_size=25), st.sampled_from([None, 1, 7]))
def test_every_step_ends_once_and_no_sooner_than_alone(waiting: list[Step], chunk_tokens: int | None) -> None:
    waiting.sort(key=lambda step: step.arrived_at_s)
    batches = run(waiting, chunk_tokens)
    ended = [step for batch in batches for step in batch.ended]
    assert len(ended) == len(set(map(id, ended))) == len(waiting)
    assert sum(batch.together.tokens for batch in batches) == sum(step.n_tokens for step in waiting)
    for before, after in itertools.pairwise(batches):
        assert before.end_at_s <= after.together.began_at_s
    for batch in batches:
        assert sum(not step.is_decode for step in batch.ended) <= 1
        for step in batch.ended:
            least_s = 0.25 + step.n_blocks * (1.0 - 0.5 if step.is_decode else 2.0)
            assert step.arrived_at_s + least_s <= batch.end_at_s + 1e-9


class Bench:
    """A stub under continuous batching whose clock the test drives."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        profile = StubProfile(TOKEN_BYTES, TIMES, {"c": 100.0}, batching="continuous")
        self.compute = StubCompute(profile, self.clock)
        self.ends: dict[str, tuple[float, int, int]] = {}

    def start(self, name: str, client: str = "", position: int = 8) -> asyncio.Task[None]:
        session = self.compute.new_session(client, 0, 2, 100)
        session.caches = [position, position]

        async def work() -> None:
            computed = await self.compute.step(session, position, 1, bytes(TOKEN_BYTES), self.clock.now_s())
            self.ends[name] = (self.clock.now_s(), computed.together.steps, computed.together.tokens)

        return asyncio.create_task(work())


async def test_the_stub_computes_what_waits_together_and_says_so() -> None:
    bench = Bench()
    bench.start("first")
    await bench.clock.advance(1.0)
    bench.start("second")
    bench.start("third", client="c")
    await bench.clock.advance(20.0)
    assert bench.ends == {"first": (2.25, 1, 1), "second": (2.25 + 3.5, 2, 2)}
    await bench.clock.advance(100.0)
    assert bench.ends["third"] == (105.75, 2, 2), "the client's overhead does not delay other steps"


async def test_a_step_that_is_given_up_before_its_batch_is_not_in_it() -> None:
    bench = Bench()
    bench.start("first")
    await bench.clock.advance(1.0)
    given_up = bench.start("second")
    bench.start("third")
    await bench.clock.advance(0.5)
    given_up.cancel()
    await bench.clock.advance(20.0)
    assert bench.ends == {"first": (2.25, 1, 1), "third": (2.25 + 2.25, 1, 1)}
    with pytest.raises(asyncio.CancelledError):
        await given_up


async def test_a_stub_is_as_fast_as_before_for_what_waited_while_it_was_slow() -> None:
    bench = Bench()
    bench.start("first")
    await bench.clock.advance(1.0)
    bench.compute.factor = 10.0
    bench.start("second")
    await bench.clock.advance(1.0)
    bench.compute.factor = 1.0
    await bench.clock.advance(20.0)
    assert bench.ends == {"first": (2.25, 1, 1), "second": (4.5, 1, 1)}


async def test_a_slow_stub_shares_its_queue_with_what_came_before() -> None:
    bench = Bench()
    bench.start("first")
    await bench.clock.advance(1.0)
    bench.compute.factor = 2.0
    bench.start("second")
    await bench.clock.advance(20.0)
    assert bench.ends == {"first": (2.25, 1, 1), "second": (2.25 + 4.5, 1, 1)}

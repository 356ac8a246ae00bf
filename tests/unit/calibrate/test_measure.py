from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from policies.steps import StepTimes
from testbed.errors import UserError
from testbed.studies.calibrate.plan import Case, Plan, block_counts, make_plan
from testbed.studies.calibrate.points import points_of
from tests.unit.calibrate.conftest import run_plan

TIMES = StepTimes(decode_s=0.25, prefill_base_s=2.0, prefill_slope_s=0.125)
SMALL = Plan(
    (Case(1, 4, 2), Case(3, 8, 2), Case(3, 8, 4, n_sessions=2, is_paced=False)),
    rounds=2,
    n_warm_up=1,
    memory_blocks=(1,),
    memory_sessions=(0,),
    memory_tokens=8,
)


async def test_every_step_of_every_session_is_kept_with_its_own_time() -> None:
    _, samples = await run_plan(SMALL, TIMES)
    per_round = 3 * (1 + 2) + (1 + 2) + (2 + 8)  # a chain of three ranges of one block, then all three in one
    assert len(samples) == 3 * per_round
    for sample in samples:
        if sample.kind == "prefill":
            assert sample.time_s == sample.n_blocks * (2.0 + 0.125 * sample.n_input_tokens)
            assert (sample.cached_tokens, sample.step, sample.n_sessions) == (0, 0, 1)
        else:
            assert sample.time_s == 0.25 * sample.n_blocks
            assert sample.cached_tokens == sample.n_input_tokens + sample.step


async def test_warm_up_rounds_are_kept_but_do_not_count() -> None:
    _, samples = await run_plan(SMALL, TIMES)
    assert {sample.round for sample in samples} == {-1, 0, 1}
    assert not any(sample.is_used for sample in samples if sample.round < 0)
    assert all(sample.is_used for sample in samples if sample.round >= 0)


async def test_steps_that_end_after_the_first_session_is_done_do_not_count_as_concurrent() -> None:
    # One at a time: the second session's last step runs alone, when the first has finished.
    _, samples = await run_plan(SMALL, TIMES, is_serial=True)
    late = [s for s in samples if s.round >= 0 and not s.is_used]
    assert {(s.kind, s.n_sessions, s.session) for s in late} == {("decode", 2, 1)}
    assert all(s.time_s in (0.75, 1.5) for s in samples if s.n_sessions == 2)


async def test_sessions_are_closed_after_their_case_so_that_caches_never_add_up() -> None:
    compute, _ = await run_plan(SMALL, TIMES)
    assert compute.open == []
    assert compute.most_open == 3


def test_rounds_have_orders_of_their_own_and_hold_every_case_once() -> None:
    plan = make_plan(8, 600, rounds=3)
    orders: dict[int, list[Case]] = {}
    for number, case in plan.ordered(7):
        orders.setdefault(number, []).append(case)
    assert sorted(orders) == [-1, 0, 1, 2]
    assert all(sorted(order) == list(plan.cases) for order in orders.values())
    assert all(a != b for a, b in pairwise(orders.values()))
    assert list(plan.ordered(7)) == list(plan.ordered(7))
    assert list(plan.ordered(7)) != list(plan.ordered(8))


async def test_a_point_is_the_median_of_what_was_measured_under_equal_conditions() -> None:
    _, samples = await run_plan(SMALL, TIMES)
    points = {(p.kind, p.n_blocks, p.n_input_tokens, p.n_sessions): p for p in points_of(samples)}
    assert len(points) == 5  # of the two prefills on 3 blocks the paced one
    assert points["decode", 1, 4, 1].n_samples == 2 * 3 * 2
    alone, both = points["decode", 3, 8, 1], points["decode", 3, 8, 2]
    assert (alone.n_samples, alone.cached_tokens, alone.time_s) == (4, 8.5, 0.75)
    assert (both.n_samples, both.cached_tokens) == (16, 9.5)
    prefill = points["prefill", 3, 8, 1]
    assert (prefill.n_samples, prefill.time_s, prefill.low_s, prefill.high_s) == (2, 9.0, 9.0, 9.0)


async def test_a_case_of_few_blocks_goes_through_all_of_them_range_by_range() -> None:
    assert Case(2, 1).ranges(5) == [(0, 2), (2, 4)]
    _, samples = await run_plan(SMALL, TIMES)
    steps = [s for s in samples if s.n_blocks == 1 and s.round == 0]
    assert [s.first_block for s in steps] == [0, 1, 2] * 3
    assert [s.started_at_s for s in steps] == sorted(s.started_at_s for s in steps)


async def test_the_backend_idles_before_every_step_of_a_paced_case_and_before_no_other() -> None:
    _, samples = await run_plan(replace(SMALL, pause_s=7.0), TIMES)
    steps = [s for s in samples if s.round == 0]
    for a, b in pairwise(steps):
        idle_s = b.started_at_s - a.started_at_s - a.time_s
        if a.is_paced and b.is_paced:
            assert idle_s == 7.0
        elif not (a.is_paced or b.is_paced):
            assert idle_s <= 0.0


def test_a_long_session_gives_a_point_per_sixteen_steps() -> None:
    plan = make_plan(2, 600, lengths=(16,), sessions=(1,), n_output_tokens=64)
    assert Case(2, 16, 64) in plan.cases


@pytest.mark.parametrize(
    ("n_blocks", "counts"),
    [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (70, (1, 4, 16, 32, 70))],
)
def test_blocks_are_measured_from_one_to_all(n_blocks: int, counts: tuple[int, ...]) -> None:
    assert block_counts(n_blocks) == counts


def test_a_plan_stays_within_what_the_model_takes() -> None:
    for most in (9, 20, 40, 600):
        assert max(case.max_tokens for case in make_plan(4, most).cases) <= most


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 8}, "a calibration needs at least 9"),
        ({"max_tokens": 100, "lengths": (16, 99)}, "give shorter --lengths"),
        ({"lengths": (0,)}, "at least 1, not 0"),
        ({"rounds": 0}, "--rounds must be at least 1"),
    ],
)
def test_a_plan_without_room_is_refused_with_what_to_change(options: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_plan(4, **options)  # type: ignore[arg-type]

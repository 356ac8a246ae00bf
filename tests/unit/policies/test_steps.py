"""The law of a step's time: its values, and that all users of it agree."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies import Hop, RequestSpec, service_s
from policies.problem import decode_step_s
from policies.steps import StepTimes
from tests.support.problems import forwarded, make_problem

TIMES = StepTimes(
    decode_s=0.25,
    prefill_base_s=2.0,
    prefill_slope_s=0.125,
    step_base_s=0.5,
    context_slope_s=2**-6,
    prefill_curve_s=2**-4,
)


def test_a_prefill_grows_with_the_square_of_its_length_and_with_its_blocks() -> None:
    assert TIMES.step_s(0, 8, 3) == 0.5 + 3 * (2.0 + 8 * 0.125 + 64 * 2**-4)


def test_a_decode_step_grows_with_what_is_cached_before_it() -> None:
    assert TIMES.step_s(8, 1, 3) == 0.5 + 3 * (0.25 + 8 * 2**-6)


def test_the_decode_time_may_be_given_for_any_number_of_cached_tokens() -> None:
    at_20 = replace(TIMES, decode_s=TIMES.decode_at_s(20), decode_context_tokens=20)
    assert [at_20.step_s(n, 1, 4) for n in (1, 20, 300)] == [TIMES.step_s(n, 1, 4) for n in (1, 20, 300)]


@pytest.mark.parametrize("kind", ["hub-spoke", "forwarding", "forwarding over links"])
def test_the_steps_of_a_request_add_up_to_its_service_time(kind: str) -> None:
    problem = make_problem(
        [99.0, 99.0], rtt_s=[[0.1, 0.4]], prefill_slope_s=0.01, server_rtt_s=[[0.0, 0.3]] * 2
    )
    servers = tuple(replace(s, context_slope_s=0.125, decode_context_tokens=3.0) for s in problem.servers)
    problem = replace(problem, servers=servers, hub_token_s=0.25)
    if kind != "hub-spoke":
        problem = forwarded(problem, over_links=kind == "forwarding over links")
    request, hops = RequestSpec(0, 3, 7), [Hop(0, 0, 2), Hop(1, 2, 4)]
    first_s, all_s = service_s(problem, request, hops)
    steps_s = sum(decode_step_s(problem, request, hops, 3 + n) for n in range(6))
    assert first_s + steps_s == pytest.approx(all_s)

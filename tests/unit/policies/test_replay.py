from __future__ import annotations

import pytest

from policies.petals_routing import PetalsRouting
from policies.problem import PolicyError
from policies.replay import backoff_s, replay
from policies.workload import Backoff, RequestPlan
from policies.wsrr import WsRr
from tests.support.problems import make_problem, placed


@pytest.mark.parametrize(
    ("raw_s", "waited_s"),
    [
        (0.0, 0.0),
        (0.2, 1.0),
        (1.0, 1.0),
        (1.01, 3.0),
        (30.0, 31.0),
        (63.5, 123.0),
        (123.0, 123.0),
        (124.0, 183.0),
    ],
)
def test_a_session_waits_until_the_first_attempt_that_finds_room(raw_s: float, waited_s: float) -> None:
    assert backoff_s(raw_s, Backoff()) == waited_s


def test_a_later_request_waits_for_an_earlier_one_that_is_itself_waiting_and_being_set_up() -> None:
    # One server with cache for one session of 4 blocks; a request takes 0.14 s when served at once.
    problem = make_problem([44.0], n_output_tokens=1, decode_s=[0.0], rtt_s=[[0.0]], input_rtt_s=0.14)
    placement = placed(problem, [(0, 4)], [4.0])
    requests = [RequestPlan(i, 0, at_s, 1, 1) for i, at_s in enumerate([0.0, 0.0, 0.5, 3.0, 9.0])]
    done = replay(problem, placement, WsRr().bind(problem, placement), requests, session_setup_s=1.0)
    assert [r.waiting_s for r in done] == [0.0, 3.0, 7.0, 7.0, 3.0]
    assert [r.time_s for r in done] == pytest.approx([1.14, 4.14, 8.14, 8.14, 4.14])
    assert [r.ttft_s for r in done] == [r.time_s for r in done]


@pytest.mark.parametrize("routing", [WsRr(), PetalsRouting()])
def test_a_request_that_no_server_can_ever_hold_ends_the_replay_with_a_reason(
    routing: WsRr | PetalsRouting,
) -> None:
    problem = make_problem([44.0])
    placement = placed(problem, [(0, 4)], [4.0])
    with pytest.raises(PolicyError, match="request 0 of 3 tokens has no chain"):
        replay(problem, placement, routing.bind(problem, placement), [RequestPlan(0, 0, 0.0, 1, 2)])

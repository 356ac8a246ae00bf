"""How engines use online policies, and which settings they refuse."""

from __future__ import annotations

from itertools import pairwise

import pytest

from policies import PolicyError
from policies.online import TwoTimeScale
from policies.petals_rebalancing import PetalsRebalancing
from testbed.control.placing import place_experiment
from testbed.control.steering import Load, Steering, online_policy
from testbed.errors import UserError
from testbed.experiments import load_experiment
from tests.support.problems import make_problem, placed
from tests.support.simulation import Scripted

PROBLEM = make_problem([999.0] * 3)
START = placed(PROBLEM, [(0, 2), (2, 4), (0, 4)], [50.0] * 3)


def steering(answer: list[tuple[int, int]], **policy: object) -> Steering:
    new = placed(PROBLEM, answer, [50.0] * 3)
    return Steering(PROBLEM, START, Scripted({1.0: new}, **policy))  # type: ignore[arg-type]


def test_the_scenarios_placement_policy_and_its_times_are_those_of_the_online_policy() -> None:
    options = ["policy.name='foresight'", "policy.online='two-time-scale'", "policy.online_patience='7 s'"]
    policy = online_policy(load_experiment("clustered", options))
    assert isinstance(policy, TwoTimeScale)
    assert (policy.placement.name, policy.period_s, policy.patience_s) == ("foresight", 60.0, 7.0)
    assert TwoTimeScale().patience_s == 300.0


def test_none_is_no_online_policy_whatever_else_is_given() -> None:
    assert online_policy(load_experiment("load-shift", ["policy.online='none'"])) is None


def test_a_patience_that_a_policy_does_not_have_is_refused() -> None:
    options = ["policy.online='petals-rebalancing'", "policy.online_patience='7 s'"]
    with pytest.raises(
        PolicyError, match=r"petals-rebalancing has no patience_s; leave out policy\.online_patience"
    ):
        online_policy(load_experiment("clustered", options))


def test_an_option_that_names_another_online_policy_leaves_out_the_times_of_the_files_own() -> None:
    other = load_experiment(
        "load-shift", ["policy.online='petals-rebalancing'", "policy.online_period='7 s'"]
    )
    assert (other.policy.online_period_s, other.policy.online_patience_s) == (7.0, None)
    same = load_experiment("load-shift", ["policy.online='two-time-scale'", "policy.online_period='7 s'"])
    assert (same.policy.online_period_s, same.policy.online_patience_s) == (7.0, 60.0)


def test_times_of_no_policy_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"policy\.online_period: needs policy\.online; name an online policy there"
    ):
        load_experiment("clustered", ["policy.online_period='7 s'"])


def test_load_shift_adapts_and_both_engines_take_it() -> None:
    experiment = load_experiment("load-shift", [])
    policy = online_policy(experiment)
    assert policy is not None
    Steering(experiment.problem, place_experiment(experiment).placement, policy)


def test_moves_come_in_an_order_that_leaves_no_block_out() -> None:
    steer = steering([(0, 2), (0, 2), (2, 4)])
    # Server 1 goes first: then server 2 would be the last with the second half, which it keeps.
    order = steer.check(1.0, Load(), ())
    assert sorted(order) == [1, 2]
    assert steer.target.ranges == ((0, 2), (0, 2), (2, 4))


def test_what_cannot_be_reached_with_the_servers_that_are_there_is_refused() -> None:
    steer = steering([(0, 2), (0, 2), (0, 4)])
    with pytest.raises(PolicyError, match="cannot be reached one server after another"):
        steer.check(1.0, Load(), (), frozenset({0, 1}))


def test_a_server_that_is_away_does_not_move() -> None:
    assert steering([(0, 2), (0, 2), (0, 4)]).check(1.0, Load(), (), frozenset({0, 2})) == []
    assert steering([(0, 4), (0, 2), (0, 4)], drains=False).check(1.0, Load(), (), frozenset({0})) == [0]


def test_a_server_that_moves_is_left_alone() -> None:
    with pytest.raises(PolicyError, match="moves s1 again before it has arrived"):
        steering([(0, 2), (0, 2), (0, 4)]).check(1.0, Load(), (1,))


def test_a_given_up_move_is_no_longer_the_target() -> None:
    steer = steering([(0, 2), (0, 2), (0, 4)])
    steer.check(1.0, Load(), ())
    steer.settle(1, START.ranges[1], 7.0)
    assert (steer.target.ranges, steer.target.cache_bytes) == (START.ranges, (50.0, 7.0, 50.0))


def test_a_controller_for_which_time_stands_still_is_refused() -> None:
    steer = steering([(0, 2), (0, 2), (0, 4)])
    assert steer.next_check_at_s() == 1.0
    with pytest.raises(PolicyError, match="must be later after every check"):
        steer.next_check_at_s()


def test_a_time_of_the_next_check_that_is_no_number_is_refused() -> None:
    steer = Steering(PROBLEM, START, Scripted({"soon": None}))  # type: ignore[dict-item]
    with pytest.raises(PolicyError, match="states next_check_at_s = 'soon'; it must be a number of seconds"):
        steer.next_check_at_s()


def test_a_check_that_comes_late_does_not_lose_the_next_one() -> None:
    steer = Steering(PROBLEM, START, PetalsRebalancing(period_s=1.0))
    asked_for_s = [steer.next_check_at_s()]
    for _ in range(20):
        steer.check(asked_for_s[-1] + 0.5, Load(), ())
        asked_for_s.append(steer.next_check_at_s())
    late = [after for before, after in pairwise(asked_for_s) if after <= before + 0.5]
    assert late, "times that had passed when they were asked for"
    assert asked_for_s == sorted(set(asked_for_s))


def test_load_is_a_mean_over_time_since_the_last_look() -> None:
    load = Load()
    load.arrive(1.0)
    load.arrive(3.0)
    load.end(4.0)
    assert load.n_active == 1
    assert load.take(10.0) == pytest.approx(((2.0 + 2.0 + 6.0) / 10.0, 0.2))
    assert load.take(12.0) == (1.0, 0.0)

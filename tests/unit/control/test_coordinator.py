"""The coordinator when servers come and go: which ones it uses, what sessions hold, and what it counts."""

from __future__ import annotations

import pytest

from policies import Hop, Route
from testbed.control.coordinator import Coordinator
from testbed.control.placing import place_experiment
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment

CHURN = ["policy.name=petals-optimized-rr", "churn.until=1 s"]


class Now:
    at_s = 0.0

    def __call__(self) -> float:
        return self.at_s


@pytest.fixture
def now() -> Now:
    return Now()


def coordinator(now: Now, *settings: str) -> Coordinator:
    experiment: Experiment = load_experiment("churn", [*CHURN, *settings])
    return Coordinator(experiment, place_experiment(experiment), now)


def servers(answer: Route | None) -> set[int]:
    assert answer is not None
    return {hop.server for hop in answer.hops}


def chain(of: Coordinator, index: int) -> tuple[Hop, ...]:
    answer = of.route(index)
    assert answer is not None
    return answer.hops


def used(of: Coordinator) -> list[float]:
    state = of._view.state(-1, 0.0)
    return [state.cache_bytes[j] - state.free_bytes(j) for j in range(len(state.cache_bytes))]


def test_a_dead_server_is_in_no_chain(now: Now) -> None:
    of = coordinator(now)
    victim = chain(of, 0)[0].server
    of.membership.ends(victim, 0.0)
    for index in range(10):
        assert victim not in servers(of.route(index))
    of.membership.begins(victim, 5.0)
    now.at_s = 5.0
    assert victim in servers(of.route(20))


def test_a_lost_range_is_covered_exactly_and_only_its_cache_changes_hands(now: Now) -> None:
    of = coordinator(now)
    hops = chain(of, 0)
    server, first, last = hops[-1]
    of.membership.ends(server, 0.0)
    answer = of.reroute(0, first, last, 3)
    assert answer is not None
    new = answer.hops
    assert [new[0][1], new[-1][2]] == [first, last]
    assert [a[2] for a in new[:-1]] == [b[1] for b in new[1:]]
    assert server not in servers(answer)
    held = {j for j, n_bytes in enumerate(used(of)) if n_bytes}
    assert held == {hop[0] for hop in hops[:-1]} | servers(answer)
    of.release(0)
    assert not any(used(of))


@pytest.mark.parametrize("routing", ["sticky", "prefix-aware"])
def test_the_next_turn_may_return_to_a_chain_whose_first_hop_was_replaced(now: Now, routing: str) -> None:
    policy = ["policy.placement=petals", f"policy.routing={routing}"]
    experiment = load_experiment("churn", [*policy, "workload.turns=2", 'cache.prefix="shared"'])
    of = Coordinator(experiment, place_experiment(experiment), now)
    first, *rest = chain(of, 0)
    of.membership.ends(first.server, 0.0)
    answer = of.reroute(0, first.first, first.last, 3)
    assert answer is not None
    of.completed(0)
    of.release(0)
    assert of._prefixes is not None and of.requests[1].turn is not None
    assert of._prefixes.asking(of.requests[1], 100.0).own == (*answer.hops, *rest)
    now.at_s = 100.0
    held = of.placement.ranges
    for hops in (chain(of, 1), chain(of, 3)):
        assert [hop.last for hop in hops] == [held[hop.server].last for hop in hops]


def test_a_server_that_failed_one_client_is_left_out_for_it_until_its_ban_ends_or_it_serves(
    now: Now,
) -> None:
    of = coordinator(now)
    victim = chain(of, 0)[0].server
    of.failed(0, [victim])
    assert victim not in servers(of.route(1))
    now.at_s = 15.1
    assert victim in servers(of.route(1))
    of.failed(0, [victim])
    now.at_s = 30.0
    assert victim not in servers(of.route(1)), "the second time in a row it is banned for twice as long"
    of.served(0, [victim])
    assert victim in servers(of.route(1))


def test_bans_can_be_switched_off(now: Now) -> None:
    of = coordinator(now, "recovery.ban_failed_servers=false")
    victim = chain(of, 0)[0].server
    of.failed(0, [victim])
    assert victim in servers(of.route(1))


def test_decisions_on_an_old_view_are_counted_and_so_are_those_for_a_dead_server(now: Now) -> None:
    of = coordinator(now, "membership.kind=announced")
    victim = chain(of, 0)[0].server
    assert dict(of.decisions) == {"n_decisions": 1, "n_stale_decisions": 0, "n_misled_decisions": 0}
    now.at_s = 1.0
    of.membership.ends(victim, 1.0)
    assert victim in servers(of.route(1)), "its announcement still holds"
    of.failed(1, [victim])
    assert victim not in servers(of.route(2))
    assert dict(of.decisions) == {"n_decisions": 3, "n_stale_decisions": 2, "n_misled_decisions": 1}
    now.at_s = 1000.0
    assert victim not in servers(of.route(3)), "it has long expired"
    assert of.decisions.n_stale_decisions == 2


def test_where_all_holders_of_a_block_are_gone_there_is_no_chain(now: Now) -> None:
    of = coordinator(now)
    for server in range(len(of.placement.ranges)):
        of.membership.ends(server, 0.0)
    assert of.route(0) is None
    assert of.reroute(1, 0, 3, 0) is None
    assert not any(used(of))

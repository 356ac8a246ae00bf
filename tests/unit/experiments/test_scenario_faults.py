"""``[[fault]]``, ``[churn]``, ``[recovery]`` and ``[membership]``: what they resolve to, and what is refused."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from policies.membership import MembershipRules
from policies.rules import RecoveryRules
from testbed.control.placing import place_experiment
from testbed.errors import UserError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import After, Experiment, Fault

Load = Callable[..., Experiment]
Complain = Callable[..., str]


def faults(*tables: str) -> str:
    return f"fault=[{', '.join('{' + table + '}' for table in tables)}]"


def test_a_fault_happens_to_its_server_at_its_instant(load: Load) -> None:
    e = load(faults("kind='kill', server='a100-1', at='30 s', for='20 s'"))
    assert e.faults.planned == (Fault("kill", 1, 30.0, for_s=20.0),)


def test_a_fault_of_several_servers_is_one_fault_each_at_the_same_instant(load: Load) -> None:
    e = load(faults("kind='stop', server=['a100-1', 'a100-0'], at='1 s'"))
    assert e.faults.planned == (Fault("stop", 1, 1.0), Fault("stop", 0, 1.0))


def test_a_server_that_leaves_for_a_time_is_started_again_and_one_that_joins_leaves(load: Load) -> None:
    e = load(faults("kind='leave', server='a100-1', at='30 s', for='20 s'"))
    assert e.faults.planned == (Fault("leave", 1, 30.0), Fault("restart", 1, 50.0))
    more = '[[servers]]\nhardware = "mig-1g"\nsite = "A"\npresent = false\n[clients]'
    e = load(faults("kind='join', server='mig-1g-0', at='30 s', for='20 s'"), replace=("[clients]", more))
    assert e.faults.planned == (Fault("join", 2, 30.0), Fault("leave", 2, 50.0))


def test_a_fault_can_wait_for_tokens_of_a_request(load: Load) -> None:
    e = load(faults("kind='slow', server='a100-0', after={request=3, tokens=20}, factor=2.5"))
    assert e.faults.planned == (Fault("slow", 0, after=After(3, 20), factor=2.5),)


def test_without_tables_nothing_fails_and_everything_is_as_petals_intends_it(load: Load) -> None:
    e = load()
    assert (e.faults.planned, e.faults.absent) == ((), frozenset())
    assert (
        e.faults.recovery
        == RecoveryRules()
        == RecoveryRules(
            mode="replay",
            request_timeout_s=180.0,
            connect_timeout_s=5.0,
            retry_first_s=1.0,
            retry_max_s=60.0,
            give_up_s=300.0,
            ban_s=15.0,
            ban_failed_servers=True,
        )
    )
    assert e.faults.membership == MembershipRules("instant")


def test_recovery_and_membership_take_every_key(load: Load) -> None:
    e = load(
        "recovery={mode='head', request_timeout='9 s', connect_timeout='2 s', retry_first='3 s', retry_max='4 s', "
        "give_up='50 s', ban='6 s', ban_failed_servers=false, replay='step_by_step', jitter=0.1}",
        "membership={kind='announced', announce_period='7 s', expiry='8 s', refresh='0.5 s'}",
    )
    assert e.faults.recovery == RecoveryRules(
        mode="head",
        request_timeout_s=9.0,
        connect_timeout_s=2.0,
        retry_first_s=3.0,
        retry_max_s=4.0,
        give_up_s=50.0,
        ban_s=6.0,
        ban_failed_servers=False,
        replay="step_by_step",
        retry_jitter_ratio=0.1,
    )
    assert e.faults.membership == MembershipRules("announced", 7.0, 8.0, 0.5)


REAL = (
    "compute.backend='blocks'",
    "model={family='bloom', n_blocks=4, hidden_size=64, heads=4, vocab=300}",
)


@pytest.mark.parametrize(
    ("options", "replay"),
    [
        ((), "at_once"),
        (("recovery.replay='step_by_step'",), "step_by_step"),
        (REAL, "at_once"),
        ((*REAL, "compute.dtype='float16'"), "step_by_step"),
        ((*REAL, "compute.dtype='bfloat16'"), "step_by_step"),
        ((*REAL, "compute.dtype='bfloat16'", "recovery.replay='at_once'"), "at_once"),
        (
            (
                *REAL,
                "compute.dtype='bfloat16'",
                "policy.name='proposed'",
                "policy.communication='server-to-server'",
            ),
            "step_by_step",
        ),
    ],
)
def test_only_real_blocks_of_16_bits_are_replayed_step_by_step_unless_the_scenario_says_how(
    load: Load, options: Sequence[str], replay: str
) -> None:
    experiment = load(*options)
    assert experiment.faults.recovery.replay == experiment.document["recovery"]["replay"] == replay


def test_replacements_are_tried_at_once_and_then_with_doubling_waits() -> None:
    rules = RecoveryRules(retry_first_s=1.0, retry_max_s=5.0)
    assert [rules.retry_delay_s(k, 7) for k in range(6)] == [0.0, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert rules.retry_delay_s(100_000, 7) == 5.0


def test_jitter_tells_the_waits_of_requests_apart_and_repeats_with_the_seed() -> None:
    rules = RecoveryRules(retry_max_s=5.0, retry_jitter_ratio=0.2, seed=3)
    waits_s = [rules.retry_delay_s(k, request) for request in range(50) for k in (1, 2)]
    assert len(set(waits_s)) == 100
    assert all(0.8 <= w <= 1.2 for w in waits_s[::2]) and all(1.6 <= w <= 2.4 for w in waits_s[1::2])
    assert waits_s == [rules.retry_delay_s(k, request) for request in range(50) for k in (1, 2)]
    assert rules.retry_delay_s(0, 7) == 0.0
    assert replace(rules, seed=4).retry_delay_s(1, 7) != rules.retry_delay_s(1, 7)


def test_churn_fails_servers_at_random_and_leaves_the_workload_alone(load: Load) -> None:
    plain = load()
    e = load("churn={mtbf='2 s', mttr='5 s', until='500 s'}")
    assert e.workload.requests == plain.workload.requests
    assert e.problem == plain.problem
    times_s = [fault.at_s or 0.0 for fault in e.faults.planned]
    assert times_s == sorted(times_s)
    assert times_s[-1] <= 500.0
    # 2 servers that are away for 5 s of 9 or so: about half of the 250 failures find one that is there.
    assert 60 < len(times_s) < 200
    assert {fault.kind for fault in e.faults.planned} == {"kill"}
    assert load("churn={mtbf='2 s', mttr='5 s', until='500 s'}").faults.planned == e.faults.planned
    assert load("churn={mtbf='2 s', mttr='5 s', until='500 s'}", "seed=1").faults.planned != e.faults.planned


def test_constant_churn_is_regular_and_never_fails_a_server_that_is_away(load: Load) -> None:
    e = load("churn={mtbf='10 s', mttr='25 s', until='100 s', distribution='constant', kind='stop'}")
    assert [(f.kind, f.at_s, f.for_s) for f in e.faults.planned] == [
        ("stop", at_s, 25.0) for at_s in (10.0, 20.0, 40.0, 50.0, 70.0, 80.0, 100.0)
    ]
    assert {f.server for f in e.faults.planned[:2]} == {0, 1}


def test_instants_that_are_added_up_are_whole_nanoseconds(load: Load) -> None:
    e = load("churn={mtbf='0.7 s', mttr='0.7 s', until='5 s', distribution='constant'}")
    assert [f.at_s for f in e.faults.planned] == [0.7, 1.4, 2.1, 2.8, 3.5, 4.2, 4.9]
    left = load(faults("kind='leave', server='a100-0', at='0.1 s', for='0.2 s'"))
    assert [f.at_s for f in left.faults.planned] == [0.1, 0.3]


def test_churn_ends_with_the_last_arrival_and_spares_servers_that_are_not_named(load: Load) -> None:
    e = load("churn={mtbf='1 s', mttr='0.1 s', servers='a100-1', distribution='constant'}")
    last_s = max(request.arrival_at_s for request in e.workload.requests)
    assert [f.at_s for f in e.faults.planned] == [float(n) for n in range(1, int(last_s) + 1)]
    assert {f.server for f in e.faults.planned} == {1}


def test_a_resolved_scenario_lists_what_churn_drew_and_repeats_it(load: Load, tmp_path: Path) -> None:
    options = ("churn={mtbf='3 s', mttr='5 s', until='60 s'}", "membership.kind='announced'")
    e = load(*options, faults("kind='leave', server='a100-0', after={request=1, tokens=2}"))
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(e))
    document = tomllib.loads(path.read_text())
    assert "churn" not in document
    assert len(document["fault"]) == len(e.faults.planned) > 5
    assert load_experiment(str(path)) == e
    assert load_experiment(str(path), ["seed=7"]).faults.planned == e.faults.planned


def test_servers_that_are_not_present_hold_nothing_until_they_join(load: Load) -> None:
    more = '[[servers]]\nhardware = "mig-1g"\nsite = "A"\npresent = false\n[clients]'
    designed = ("policy.name='proposed'", "policy.design_concurrency=4")
    e = load(
        faults("kind='join', server='mig-1g-0', at='5 s'"),
        *designed,
        replace=("[clients]", more),
    )
    assert e.faults.absent == {2}
    placed = place_experiment(e).placement
    assert placed.ranges[2].n_blocks == 0 == placed.cache_bytes[2]
    assert placed.ranges[:2] == place_experiment(load(*designed)).placement.ranges


def test_a_fixed_placement_must_leave_out_those_that_are_not_there(load: Load, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[[1, 35], [36, 35]]")
    more = 'count = 1\n[[servers]]\nhardware = "a100"\nsite = "A"\npresent = false\n'
    e = load(
        f"policy.placement='fixed:{tmp_path}/plan.json'",
        "policy.routing='ws-rr'",
        faults("kind='join', server='a100-1', at='5 s'"),
        replace=("count = 2\n", more),
    )
    with pytest.raises(UserError, match=r"puts blocks on a100-1, which has present = false"):
        place_experiment(e)


WRONG: Sequence[tuple[str, str]] = (
    (faults("kind='kill', server='a100-0'"), "fault.0.at: is missing; give a time such as"),
    (
        faults("kind='kill', server='a100-0', at='1 s', after={request=1, tokens=1}"),
        "fault.0: has both at and after; keep one",
    ),
    (
        faults("kind='kil', server='a100-0', at='1 s'"),
        'fault.0.kind: unknown value "kil" (did you mean "kill"?)',
    ),
    (faults("kind='kill', server='a100-0', at='1 s', fro='1 s'"), 'unknown key (did you mean "for"?)'),
    (faults("kind='kill', server='a100-7', at='1 s'"), 'fault.0.server: unknown server "a100-7"'),
    (
        faults("kind='kill', server=3, at='1 s'"),
        "fault.0.server: must be a name or a list of names, not 3",
    ),
    ("fault={kind='kill', at='1 s'}", "fault: is one table, but there can be several: write [[fault]]"),
    ("recovery.mode=false", 'recovery.mode: unknown value "false"; valid: replay'),
    ("recovery.jitter=2", "recovery.jitter: must be from 0 to 1"),
    (faults("kind='kill', server=[], at='1 s'"), "fault.0.server: needs at least 1 entry"),
    (faults("kind='kill', server=['a100-0', 'a100-0'], at='1 s'"), 'fault.0.server: names "a100-0" twice'),
    (
        faults("kind='leave', server='a100-0', after={request=0, tokens=2}, for='2 s'"),
        'fault.0.for: of kind = "leave" needs at, a time that is known beforehand',
    ),
    (faults("kind='kill', server='a100-0', at='1 s', factor=2"), 'fault.0.factor: is only for kind = "slow"'),
    (faults("kind='slow', server='a100-0', at='1 s'"), "fault.0.factor: is missing"),
    (
        faults("kind='slow', server='a100-0', at='1 s', factor=0.5"),
        "fault.0.factor: must be at least 1, not 0.5",
    ),
    (faults("kind='join', server='a100-0', at='1 s'"), '"a100-0" is present from the start'),
    (
        faults("kind='kill', server='a100-0', after={request=10, tokens=1}"),
        "fault.0.after.request: there is no request 10; requests are 0 to 9",
    ),
    (
        faults("kind='kill', server='a100-0', after={request=1, tokens=64}"),
        "fault.0.after.tokens: must be less than the 64 output tokens of request 1",
    ),
    ("servers.0.present=false", "servers: all have present = false"),
    ("churn={mtbf='1 s'}", "churn.mttr: is missing"),
    ("churn={mtbf='1 us', mttr='1 s', until='1000 s'}", "churn.mtbf: makes about 1,000,000,000 failures"),
    ("churn={mtbf='1 s', mttr='1 s', servers=['x']}", 'churn.servers: unknown server "x"'),
    ("recovery.mode='none'", 'recovery.mode: unknown value "none"'),
    ("recovery.retry_max='0.5 s'", "recovery.retry_max: must be at least recovery.retry_first"),
    ("membership.expiry='9 s'", 'membership.expiry: is only for kind = "announced"; kind is "instant"'),
    (
        "membership={kind='announced', expiry='30 s'}",
        "membership.expiry: must be at least announce_period",
    ),
)


@pytest.mark.parametrize(("option", "sentence"), WRONG)
def test_a_combination_that_means_nothing_is_refused_in_one_sentence(
    complaint: Complain, option: str, sentence: str
) -> None:
    assert sentence in complaint(option)


def test_a_server_that_never_joins_cannot_fail(complaint: Complain) -> None:
    more = 'count = 1\n[[servers]]\nhardware = "a100"\nsite = "A"\npresent = false\n'
    option = faults("kind='kill', server='a100-1', at='1 s'")
    assert 'never joins; add a fault of kind = "join"' in complaint(option, replace=("count = 2\n", more))

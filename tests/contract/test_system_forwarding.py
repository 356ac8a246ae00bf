"""The system itself, in virtual time, when servers fail and forward to each other; times as ``chains`` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from policies import Hop, Placement, Problem
from policies.rules import RecoveryRules
from testbed.experiments.experiment import Fault
from tests.support.failing import SystemRun, fail, kill, pairs
from tests.support.simulation import arrivals

TEN = arrivals(0.0, n_output=10)
RULES = RecoveryRules(request_timeout_s=10.0, connect_timeout_s=5.0)


def chains() -> tuple[Problem, Placement]:
    """s0, s2 hold the blocks [0, 2), s1, s3 [2, 4); every message takes 0.05 s from or to the client, 0.01 s across.

    A server computes 0.02 s, for a prompt of n tokens 0.01 n s. Open at 0.1 s, tokens at 0.23 s and every 0.15 s;
    the last at 1.58 s.
    """
    problem, placement = pairs()
    return replace(problem, forwarding=True), placement


def at(at_s: float) -> Any:
    """That instant, but for the nanoseconds to which virtual time is rounded."""
    return pytest.approx(at_s, abs=1e-6)


def steps(run: SystemRun, token: int) -> list[list[float]]:
    """(hop, server, first, last, four instants, bytes up and down, tokens replayed) of a token's messages."""
    table = run.table
    columns = (
        *(table.hop, table.server, table.first, table.last),
        *(table.sent_at_s, table.arrived_at_s, table.departed_at_s, table.received_at_s),
        *(table.up_bytes, table.down_bytes, table.replayed_tokens),
    )
    return [[float(column[i]) for column in columns] for i in np.flatnonzero(table.token == token)]


def test_without_failure_a_session_takes_what_the_model_says() -> None:
    run = fail(chains(), TEN, kill(0, 99.0))
    assert run.ended_at_s() == at([1.58])
    for kind in ("metrics", "model", "model_unqueued"):
        assert run.summary[kind]["token_gap_s"]["mean"] == at(0.15), kind
    assert run.of_kind("detected", "fault") == []
    (first, last) = steps(run, 1)
    assert (first[:4], last[:4]) == ([0, 0, 0, 2], [1, 1, 2, 4])
    assert first[4:8] == at((0.23, 0.28, 0.30, 0.30))
    assert last[4:8] == at((0.30, 0.31, 0.33, 0.38))
    n_bytes = first[8]
    assert (first[8:], last[8:]) == ([n_bytes, 0, 0], [n_bytes, n_bytes, 0])


def test_a_server_that_dies_while_the_step_is_elsewhere_is_noticed_by_its_reset() -> None:
    run = fail(chains(), TEN, kill(1, 0.9))
    [detected] = run.of_kind("detected")
    assert detected["at_s"] == at(0.95)
    assert (detected["servers"], detected["blocks"], detected["position"]) == (["s1"], [0, 4], 5)
    # One connection, then 6 tokens through the whole new chain: 0.05 + 0.06 + 0.01 + 0.06 + 0.05 s.
    [recovery] = run.of_kind("replayed")
    assert (recovery["tokens"], recovery["recovery_s"], recovery["floor_s"]) == (
        6,
        at(0.05 + 0.1 + 0.23),
        at(0.05 + 0.1 + 0.23),
    )
    assert run.ended_at_s() == at([1.58 + 0.3])
    assert run.hops() == (Hop(0, 0, 2), Hop(3, 2, 4))
    assert not any(run.summary["leaks"].values())
    assert [row[-1] for row in steps(run, 5)] == [6, 6]


def test_a_replay_step_by_step_takes_a_trip_through_the_chain_per_token_and_so_does_its_floor() -> None:
    run = fail(chains(), TEN, kill(1, 0.9), recovery=RecoveryRules(replay="step_by_step"))
    [recovery] = run.of_kind("replayed")
    # One connection, the prompt of 1 token in 0.13 s, then 5 tokens in 0.15 s each.
    assert (recovery["tokens"], recovery["recovery_s"], recovery["floor_s"]) == (
        6,
        at(0.05 + 0.1 + 0.13 + 0.75),
        at(0.05 + 0.1 + 0.88),
    )
    assert [row[-1] for row in steps(run, 5)] == [1] * 12
    assert run.ended_at_s() == at([0.95 + 0.1 + 0.88 + 4 * 0.15])


@pytest.mark.parametrize("server", [0, 1])
def test_a_server_that_died_between_steps_is_noticed_by_its_reset(server: int) -> None:
    # The last result is there at 0.53 s, the reset 0.05 s after the death.
    [detected] = fail(chains(), TEN, kill(server, 0.535)).of_kind("detected")
    assert (detected["at_s"], detected["servers"]) == (at(0.585), [f"s{server}"])


def test_a_result_that_is_on_its_way_as_the_reset_comes_is_lost() -> None:
    [detected] = fail(chains(), TEN, kill(0, 0.46)).of_kind("detected")
    assert (detected["at_s"], detected["position"]) == (at(0.51), 2)


def test_a_halted_server_is_named_by_the_one_that_pushes_to_it() -> None:
    run = fail(chains(), TEN, Fault("stop", 1, 0.9), recovery=RULES)
    [detected] = run.of_kind("detected")
    # s0 is done at 0.9 s, waits for half of the client's limit, and tells.
    assert detected["at_s"] == at(0.9 + 5.0 + 0.05)
    assert (detected["servers"], detected["failed_at_s"]) == (["s1"], at(0.9))
    assert "could not push to it (not-passed-on: no answer for 5 s)" in detected["reason"]
    assert run.requests[0].status == "completed"


def test_a_halt_that_is_over_before_the_limit_only_delays() -> None:
    run = fail(chains(), TEN, Fault("stop", 1, 0.9, for_s=3.0), recovery=RULES)
    assert run.of_kind("detected") == []
    assert run.ended_at_s() == at([1.58 + 3.9 - 0.91])


def test_a_server_that_halts_with_the_step_in_it_is_named_by_its_silence() -> None:
    run = fail(chains(), TEN, Fault("stop", 1, 0.92), recovery=RULES)
    [detected] = run.of_kind("detected")
    # The step began at 0.83 s; the client asks all servers for 5 s.
    assert detected["at_s"] == at(0.83 + 10.0 + 5.0)
    assert (detected["servers"], detected["failed_at_s"]) == (["s1"], at(0.83))
    assert run.requests[0].status == "completed"


def test_a_death_while_the_client_asks_who_is_there_is_found_with_the_silent_one() -> None:
    run = fail(chains(), TEN, Fault("stop", 1, 0.92), kill(0, 12.0), recovery=RULES)
    [detected] = run.of_kind("detected")
    assert detected["at_s"] == at(0.83 + 10.0 + 5.0)
    assert (detected["servers"], detected["failed_at_s"]) == (["s1", "s0"], at(0.83))
    assert run.requests[0].status == "completed"


def test_a_step_waits_while_all_servers_answer() -> None:
    run = fail(chains(), TEN, Fault("slow", 1, 0.9, factor=300.0), recovery=RULES)
    assert run.of_kind("detected") == []
    assert run.ended_at_s()[0] > 10.0 + 10.0, "two limits"
    assert run.requests[0].status == "completed"


def test_if_all_servers_answer_for_ten_limits_all_are_to_blame() -> None:
    run = fail(chains(), TEN, Fault("slow", 1, 0.9, factor=10_000.0), recovery=RULES)
    detected = run.of_kind("detected")[0]
    assert (detected["at_s"], detected["servers"]) == (at(0.83 + 10 * (10.0 + 0.1)), ["s0", "s1"])
    assert run.hops() == (Hop(2, 0, 2), Hop(3, 2, 4))


def test_several_deaths_are_found_together_and_one_in_the_replay_again() -> None:
    run = fail(pairs_of_three(), TEN, kill(0, 0.9), kill(1, 0.9), kill(3, 1.2))
    first, second = run.of_kind("detected")
    assert (first["servers"], second["servers"]) == (["s0", "s1"], ["s3"])
    [recovery] = run.of_kind("replayed")
    assert recovery["recovery_s"] > recovery["floor_s"]
    assert run.requests[0].status == "completed"


def pairs_of_three() -> tuple[Problem, Placement]:
    problem, placement = pairs(3)
    return replace(problem, forwarding=True), placement


def test_without_recovery_the_request_fails_with_the_reason() -> None:
    run = fail(chains(), TEN, kill(1, 0.9), recovery=RecoveryRules("off"))
    assert [(r.status, r.reason) for r in run.requests] == [("failed", "s1: the connection was lost")]


def test_a_request_that_fails_keeps_its_tokens() -> None:
    [request] = fail(chains(), TEN, kill(1, 0.9), recovery=RecoveryRules(mode="off")).requests
    assert (request.status, request.n_tokens_done, request.times.ttft_s) == ("failed", 5, at(0.23))


def test_a_server_that_begins_again_at_once_takes_new_sessions() -> None:
    problem, placement = chains()
    one_chain = replace(placement, ranges=placement.ranges[:2], cache_bytes=placement.cache_bytes[:2])
    two = replace(problem, servers=problem.servers[:2])
    two = replace(
        two,
        **{
            name: tuple(tuple(row[:2]) for row in getattr(two, name)[: 1 if name != "server_rtt_s" else 2])
            for name in ("raw_rtt_s", "token_rtt_s", "input_rtt_base_s", "input_rtt_slope_s", "server_rtt_s")
        },
        join_order=(0, 1),
    )
    run = fail((two, one_chain), arrivals(5.0), Fault("restart", 0, 1.0), recovery=RULES)
    assert [r.status for r in run.requests] == ["completed"]

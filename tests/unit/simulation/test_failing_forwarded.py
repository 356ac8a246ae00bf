"""The mode ``real`` when servers fail and forward to each other; times as ``LINKS`` says."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policies import Hop, Placement, Problem
from testbed.experiment import Fault, RecoveryRules
from testbed.simulation.hub import FailingRun
from testbed.simulation.network import SteadyTimes
from testbed.simulation.record import STEP_COLUMNS
from tests.support.failing import fail, kill, pairs
from tests.support.problems import forwarded
from tests.support.simulation import arrivals

TEN = arrivals(0.0, n_output=10)
RULES = RecoveryRules(request_timeout_s=10.0, connect_timeout_s=5.0)


def chains() -> tuple[Problem, Placement]:
    """s0, s2 hold the blocks [0, 2), s1, s3 [2, 4); every message takes 0.05 s from or to the client.

    A step is 0.1 s on its way to the first server, 0.06 s from server to server, 0.05 s back; a server computes
    0.02 s, for a prompt of n tokens 0.01 n s. Open at 0.1 s, tokens at 0.33 s and every 0.25 s; the last at 2.58 s.
    """
    problem, placement = pairs()
    return forwarded(problem), placement


def events(run: FailingRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.record.events if event["event"] == kind]


def steps(run: FailingRun, token: int) -> list[tuple[float, ...]]:
    rows = [run.record.steps[i : i + STEP_COLUMNS] for i in range(0, len(run.record.steps), STEP_COLUMNS)]
    return [tuple(row[2:]) for row in rows if row[1] == token]


def test_without_failure_a_session_takes_what_the_model_says() -> None:
    run = fail(chains(), TEN, kill(0, 99.0))
    assert [r.ended_at_s for r in run.requests] == pytest.approx([2.58])
    assert run.record.events == []
    (first, last) = steps(run, 1)
    assert first[:4] == (0, 0, 0, 2) and last[:4] == (1, 1, 2, 4)
    assert first[4:8] == pytest.approx((0.33, 0.43, 0.45, 0.45))
    assert last[4:8] == pytest.approx((0.45, 0.51, 0.53, 0.58))
    n_bytes = run.record.steps[10]
    assert (first[8:], last[8:]) == ((n_bytes, 0, 0), (n_bytes, n_bytes, 0))


def test_a_server_that_dies_while_the_step_is_elsewhere_is_noticed_by_its_reset() -> None:
    changes: list[tuple[int, float]] = []
    run = fail(chains(), TEN, kill(1, 0.9), on_cache=lambda _, server, n: changes.append((server, n)))
    [detected] = events(run, "detected")
    assert detected["at_s"] == pytest.approx(0.95)
    assert (detected["servers"], detected["blocks"], detected["position"]) == (["s1"], [0, 4], 3)
    # One connection, then 4 tokens through the whole new chain: 0.1 + 0.04 + 0.06 + 0.04 + 0.05 s.
    [recovery] = run.record.recoveries
    assert recovery == (0, 4, pytest.approx(0.05 + 0.1 + 0.29), pytest.approx(0.05 + 0.1 + 0.29))
    assert [r.ended_at_s for r in run.requests] == pytest.approx([2.58 + 0.26])
    assert run.requests[0].route is not None
    assert run.requests[0].route.hops == (Hop(0, 0, 2), Hop(3, 2, 4))
    by_server = {j: [n for server, n in changes if server == j] for j in range(4)}
    assert by_server == {0: [11.0, -11.0, 11.0], 1: [11.0, -11.0], 2: [], 3: [11.0]}
    assert [row[-1] for row in steps(run, 3)] == [4, 4]


def test_a_replay_step_by_step_takes_a_trip_through_the_chain_per_token_and_so_does_its_floor() -> None:
    run = fail(chains(), TEN, kill(1, 0.9), rules=RecoveryRules(replay="step_by_step"))
    [recovery] = run.record.recoveries
    # One connection, the prompt of 1 token in 0.23 s, then 3 tokens in 0.25 s each.
    assert recovery == (0, 4, pytest.approx(0.05 + 0.1 + 0.23 + 0.75), pytest.approx(0.05 + 0.1 + 0.98))
    assert [row[-1] for row in steps(run, 3)] == [1] * 8
    assert [r.ended_at_s for r in run.requests] == pytest.approx([0.95 + 0.1 + 0.98 + 6 * 0.25])


def test_a_server_that_died_between_steps_is_noticed_once_the_first_has_its_push() -> None:
    # The last result is there at 0.58 s, its reset at 0.585 s; the first server says at 0.68 s that it has the next.
    [detected] = events(fail(chains(), TEN, kill(1, 0.535)), "detected")
    assert (detected["at_s"], detected["servers"]) == (pytest.approx(0.68), ["s1"])


def test_a_first_server_that_died_between_steps_is_noticed_at_once() -> None:
    [detected] = events(fail(chains(), TEN, kill(0, 0.535)), "detected")
    assert (detected["at_s"], detected["servers"]) == (pytest.approx(0.585), ["s0"])


def test_a_result_that_is_on_its_way_as_the_reset_comes_is_lost() -> None:
    [detected] = events(fail(chains(), TEN, kill(0, 0.525)), "detected")
    assert (detected["at_s"], detected["position"]) == (pytest.approx(0.575), 1)


def test_a_halted_server_is_named_by_the_one_that_pushes_to_it() -> None:
    run = fail(chains(), TEN, Fault("stop", 1, 0.9), rules=RULES)
    [detected] = events(run, "detected")
    # s0 is done at 0.95 s, waits for half of the client's limit, and tells.
    assert detected["at_s"] == pytest.approx(0.95 + 5.0 + 0.05)
    assert (detected["servers"], detected["failed_at_s"]) == (["s1"], pytest.approx(0.9))
    assert "could not be pushed to for 5 s" in detected["reason"]
    assert run.requests[0].status == "completed"


def test_a_halt_that_is_over_before_the_limit_only_delays() -> None:
    run = fail(chains(), TEN, Fault("stop", 1, 0.9, for_s=3.0), rules=RULES)
    assert events(run, "detected") == []
    assert [r.ended_at_s for r in run.requests] == pytest.approx([2.58 + 3.9 - 1.01])


def test_a_server_that_halts_with_the_step_in_it_is_named_by_its_silence() -> None:
    run = fail(chains(), TEN, Fault("stop", 1, 1.02), rules=RULES)
    [detected] = events(run, "detected")
    # The step began at 0.83 s; the client asks all servers for 5 s.
    assert detected["at_s"] == pytest.approx(0.83 + 10.0 + 5.0)
    assert (detected["servers"], detected["failed_at_s"]) == (["s1"], pytest.approx(0.83))
    assert run.requests[0].status == "completed"


def test_a_death_while_the_client_asks_who_is_there_is_found_with_the_silent_one() -> None:
    run = fail(chains(), TEN, Fault("stop", 1, 1.02), kill(0, 12.0), rules=RULES)
    [detected] = events(run, "detected")
    assert detected["at_s"] == pytest.approx(0.83 + 10.0 + 5.0)
    assert (detected["servers"], detected["failed_at_s"]) == (["s0", "s1"], pytest.approx(0.83))
    assert run.requests[0].status == "completed"


def test_if_all_servers_answer_all_are_to_blame() -> None:
    run = fail(chains(), TEN, Fault("slow", 1, 0.9, factor=1000.0), rules=RULES)
    detected = events(run, "detected")[0]
    assert (detected["at_s"], detected["servers"]) == (pytest.approx(0.83 + 10.0 + 0.1), ["s0", "s1"])
    assert run.requests[0].route is not None
    assert run.requests[0].route.hops == (Hop(2, 0, 2), Hop(3, 2, 4))


def test_a_death_that_the_client_does_not_hear_of_is_told_by_the_server_before() -> None:
    class Deaf(SteadyTimes):
        def returns_at_s(self, client: int, server: int, at_s: float) -> float:
            return math.inf if server == 1 and at_s > 0.5 else super().returns_at_s(client, server, at_s)

    made = chains()
    run = fail(made, TEN, kill(1, 0.9), network=Deaf(made[0]))
    [detected] = events(run, "detected")
    # Pushed to at 0.95 s, refused at 1.01 s, which s0 hears 0.01 s and the client 0.05 s later.
    assert (detected["at_s"], detected["servers"]) == (pytest.approx(1.07), ["s1"])
    assert detected["failed_at_s"] == pytest.approx(0.9)


def test_several_deaths_are_found_together_and_one_in_the_replay_again() -> None:
    run = fail(pairs_of_three(), TEN, kill(0, 0.9), kill(1, 0.9), kill(3, 1.2))
    first, second = events(run, "detected")
    assert (first["servers"], second["servers"]) == (["s0", "s1"], ["s3"])
    [recovery] = run.record.recoveries
    assert recovery.recovery_s > recovery.floor_s
    assert run.requests[0].status == "completed"


def pairs_of_three() -> tuple[Problem, Placement]:
    problem, placement = pairs(3)
    return forwarded(problem), placement


def test_without_recovery_the_request_fails_with_the_reason() -> None:
    run = fail(chains(), TEN, kill(1, 0.9), rules=RecoveryRules("off"))
    assert [(r.status, r.reason) for r in run.requests] == [("failed", "s1: connection reset")]


def test_a_request_that_fails_keeps_its_tokens() -> None:
    [request] = fail(chains(), TEN, kill(1, 0.9), rules=RecoveryRules(mode="off")).requests
    assert (request.status, request.n_done, request.ttft_s) == ("failed", 3, pytest.approx(0.33))

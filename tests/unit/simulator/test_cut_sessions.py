"""Sessions whose servers are killed, in the fast engine beside the testbed itself; times as ``tests.support.failing.pairs`` says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from policies.decoding import Decoding
from policies.rules import PagingRules, RecoveryRules
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Fault
from testbed.experiments.slo import Objectives
from testbed.simulator.cases import Case
from testbed.simulator.engine import RECOVERED, Simulation, simulate
from testbed.simulator.summary import summarize_simulation
from testbed.simulator.tables import write_simulation
from testbed.studies.explain.account import account
from tests.support.alike import served_alike
from tests.support.failing import kill, pairs
from tests.support.simulation import arrivals, run_fast
from tests.unit.simulator.test_conversations import SMALL, check_same

TWO = arrivals(0.0, 0.31, n_input=3, n_output=10)
FOR_GOOD = RecoveryRules(give_up_s=4.0)
CASES: dict[str, tuple[int, list[Fault], dict[str, Any]]] = {
    "while it opens": (2, [kill(1, 0.07)], {}),
    "in the prompt": (2, [kill(0, 0.16)], {}),
    "at work": (2, [kill(1, 0.98)], {}),
    "between two steps": (2, [kill(1, 1.0)], {}),
    "both servers of a chain": (2, [kill(0, 1.0), kill(1, 1.0)], {}),
    "a replacement in its replay": (3, [kill(1, 0.98), kill(3, 1.25)], {}),
    "both, and both replacements while they open": (
        3,
        [kill(0, 1.0), kill(1, 1.0), kill(3, 1.06), kill(2, 1.08)],
        {},
    ),
    "and nobody replaces it until it is back": (1, [kill(1, 1.0, 0.5)], {}),
    "again while its client connects": (1, [kill(1, 1.0, 1.0), kill(1, 3.14, 0.5)], {}),
    "for good": (1, [kill(1, 1.0)], {"recovery": FOR_GOOD}),
    "and its sessions are not recovered": (2, [kill(1, 1.0)], {"recovery": RecoveryRules(mode="off")}),
    "with a replay step by step": (2, [kill(1, 1.0)], {"recovery": RecoveryRules(replay="step_by_step")}),
    "in the midst of a batch": (2, [kill(1, 0.98, 0.2), kill(3, 1.9)], {"batching": "continuous"}),
}


@pytest.mark.parametrize("forwarding", [False, True], ids=["hub-spoke", "server-to-server"])
@pytest.mark.parametrize("case", CASES)
def test_a_server_is_killed(case: str, forwarding: bool) -> None:
    n_pairs, faults, options = CASES[case]
    problem, placement = pairs(n_pairs, server_rtt_s=[[0.07] * 2 * n_pairs] * 2 * n_pairs)
    made = replace(problem, forwarding=forwarding), placement
    assert run_fast(*made, TWO, planned=tuple(faults), **options).is_cut
    served_alike(made, TWO, *faults, planned=tuple(faults), within_s=1e-9, **options)


@pytest.mark.parametrize(
    ("arrivals_s", "word"), [((0.0, 3.3), "refused"), ((0.0, 2.0, 3.3), "let in at once")]
)
def test_a_server_is_back_when_a_request_comes_in_the_order_in_which_the_two_were_planned(
    arrivals_s: tuple[float, ...], word: str
) -> None:
    """A client plans its next request when the one before comes: here before or after the server is killed."""
    fault, requests = kill(1, 1.1, 2.2), arrivals(*arrivals_s, n_input=3, n_output=2)
    words = served_alike(pairs(1), requests, fault, planned=(fault,), within_s=1e-9)
    assert words[-2] == word


def test_a_server_is_killed_that_a_preempted_session_has_come_to() -> None:
    """Of its new chain the other hop has all of its history, too."""
    problem, placement = pairs(2)
    made = problem, replace(placement, cache_bytes=(60.0,) * 4)
    requests = [
        replace(plan, max_new_tokens=24) for plan in arrivals(0.0, 0.31, 0.62, n_input=3, n_output=24)
    ]
    options: dict[str, Any] = {"paging": PagingRules(1, 1.0), "expected_output": 2}
    words = served_alike(made, requests, kill(0, 7.0), planned=(kill(0, 7.0),), within_s=1e-9, **options)
    assert "preempted" in words


def test_a_server_is_killed_while_tokens_are_drafted() -> None:
    problem, placement = pairs(2)
    made = replace(problem, decoding=Decoding("ngram", 3, 0.6)), placement
    assert run_fast(*made, TWO, planned=(kill(1, 0.98),)).is_cut
    served_alike(made, TWO, kill(1, 0.98), planned=(kill(1, 0.98),), within_s=1e-9)


NEAR = (
    ", ".join(f"{{ sites = ['{site}', '{site}'], rtt = '4 ms', rate = '1 Gbit/s' }}" for site in "BC") + ","
)


@pytest.mark.parametrize("communication", ["hub-spoke", "server-to-server"])
@pytest.mark.parametrize("prefix", ["session", "shared"])
def test_a_server_is_killed_in_a_conversation(tmp_path: Path, prefix: str, communication: str) -> None:
    path = tmp_path / "talk.toml"
    path.write_text(SMALL.replace("pairs = [", f"pairs = [{NEAR}"))
    faults = "fault=[{kind='kill',server='small-0',at='0.9 s',for='1 s'},{kind='kill',server='small-1',at='6.09 s'}]"
    more = "servers=[{hardware='small',site='B',count=2},{hardware='small',site='C',count=2}]"
    options = faults, more, f"cache.prefix={prefix}", f"policy.communication={communication}"
    case = Case(load_experiment(str(path), [*options, "workload.n_output_tokens=30"]))
    fast, virtual = simulate(case, "testbed"), simulate(case, "testbed", is_virtual=True, live=False)
    assert fast.why.startswith(RECOVERED)
    assert sum(row.n_recoveries for row in fast.rows) > 0
    check_same(fast.rows, virtual.rows, 1e-4)


BUSY = ("workload.n_requests=14", "workload.rate=0.4", "workload.n_output_tokens=24")
KILL = "fault=[{kind='kill', server='a100-0', at='9 s', for='8 s'}]"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulation, Simulation, Path]:
    """A scenario on its links in both engines, and the folder of the first."""
    folder, case = tmp_path_factory.mktemp("cut"), Case(load_experiment("clustered", [*BUSY, KILL]))
    fast = simulate(case, "testbed", folder=folder / "fast")
    write_simulation(folder / "fast", fast, summarize_simulation(fast, Objectives()))
    return fast, simulate(case, "testbed", is_virtual=True, live=False), folder / "fast"


def test_on_links_every_request_takes_what_it_takes_in_the_testbed_itself(
    runs: tuple[Simulation, Simulation, Path],
) -> None:
    fast, virtual, _ = runs
    assert (fast.engine, virtual.engine) == ("fast", "virtual")
    lost = "sessions that lose a server recover; step by step, since request 0 loses a100-0, which is killed"
    assert fast.why.startswith(lost)
    for a, b in zip(fast.rows, virtual.rows, strict=True):
        assert (a.chain, a.status, a.n_rejections) == (b.chain, b.status, b.n_rejections)
        assert a.n_recoveries == b.n_recoveries
        for name in ("queue_s", "ttft_s", "e2e_s"):
            assert a.times[name] == pytest.approx(b.times[name], abs=1e-3), name


def test_the_summary_has_the_recoveries_of_the_testbed_itself(
    runs: tuple[Simulation, Simulation, Path],
) -> None:
    fast, virtual, folder = runs
    summary, expected = json.loads((folder / "summary.json").read_text()), virtual.served.summary
    assert expected is not None and expected.n_replays > 0
    assert summary["n_replays"] == expected.n_replays == sum(row.n_recoveries for row in fast.rows)
    for name in ("recovery_s", "recovery_floor_s"):
        assert summary[name]["mean"] == pytest.approx(expected[name]["mean"], abs=1e-3), name


def test_explain_has_what_a_request_lost(runs: tuple[Simulation, Simulation, Path]) -> None:
    fast, _, folder = runs
    cut = next(row for row in fast.rows if row.n_recoveries)
    found = account(folder, cut.request)
    assert [loss["servers"] for loss in found["losses"]] == [["a100-0"]]
    assert found["parts"]["replays_s"] > 0

"""The hint about blocks that no request used."""

from __future__ import annotations

import json

import pytest

from nodes.records import Failed
from testbed.cli.main import app
from testbed.records.plan import PlacementRow, Plan
from testbed.records.requests import RequestRow
from testbed.records.summary import UnusedBlocks
from testbed.results import finish_run
from testbed.results.text import summary_text
from testbed.results.unused import unused_blocks, unused_over_runs, unused_text
from tests.unit.results.conftest import MakeRun

PLAN = Plan(
    placement=PlacementRow(ranges=[(0, 4), (2, 4), (0, 0)], cache_bytes=[0.0] * 3), servers=["a", "b", "c"]
)


def unused(*chains: str) -> UnusedBlocks | None:
    return unused_blocks(PLAN, [row_with(chain) for chain in chains])


def row_with(chain: str) -> RequestRow:
    return RequestRow(
        request=0,
        client="c0",
        status="completed",
        arrival_at_s=0.0,
        arrived_at_s=0.0,
        ended_at_s=1.0,
        n_input_tokens=1,
        n_output_tokens=1,
        max_new_tokens=1,
        chain=chain,
    )


def test_blocks_count_as_used_if_any_request_went_through_them() -> None:
    assert unused("0:0-2 1:2-4", "0:1-3") == UnusedBlocks(n_held=6, n_unused=1, servers=[])


def test_a_server_is_named_if_it_holds_blocks_and_served_none() -> None:
    found = unused("0:0-4")
    assert found == UnusedBlocks(n_held=6, n_unused=2, servers=["b"])
    (hint,) = unused_text(found)
    assert hint.startswith(
        "hint: servers hold 6 blocks, and requests used 4 of them. No request reached b: fewer servers, "
    )


def test_there_is_no_hint_where_all_was_used_or_nothing_could_be() -> None:
    assert unused() is None and unused("") is None and unused_text(None) == []
    assert unused_text(unused("0:0-4", "1:2-4")) == []


def test_many_idle_servers_are_not_all_named() -> None:
    (hint,) = unused_text(UnusedBlocks(n_held=9, n_unused=8, servers=list("abcdefgh")))
    assert "a, b, c, d, e and 3 more:" in hint


def test_over_runs_counts_are_means_and_a_server_is_idle_only_if_it_always_was() -> None:
    runs = [
        UnusedBlocks(n_held=6, n_unused=2, servers=["a", "b"]),
        None,
        UnusedBlocks(n_held=8, n_unused=5, servers=["b"]),
    ]
    assert unused_over_runs(runs) == UnusedBlocks(n_held=7.0, n_unused=3.5, servers=["b"])
    assert (
        "servers hold 7 blocks, and requests used 3.5 of them on average."
        in unused_text(unused_over_runs(runs))[0]
    )
    thirds = unused_over_runs([*runs, UnusedBlocks(n_held=9, n_unused=5, servers=[])])
    assert "hold 7.7 blocks, and requests used 3.7 of them" in unused_text(thirds)[0]
    assert unused_over_runs([None]) is None


@pytest.mark.parametrize("clock", [(), ("--clock", "virtual")])
def test_a_simulation_and_the_system_itself_give_the_same_hint(
    clock: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    app(["simulate", "clustered", "--set", "workload.n_requests=3", "--json", *clock], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    used = {server for request in found["requests"] for server in request["route"]}
    held = [n for _, n in found["placement"]]
    assert found["unused_blocks"]["n_held"] == sum(held) and 0 < len(used) < 9
    assert len(found["unused_blocks"]["servers"]) == sum(n > 0 and j not in used for j, n in enumerate(held))


def test_where_servers_come_and_go_nothing_is_said_of_their_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--set", "workload.n_requests=3", "--json")
    app(["simulate", "churn", *options], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert found["n_faults"] > 0 and found["unused_blocks"] is None


def test_rows_of_a_summary_say_of_how_many_requests_they_are(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)] * 3)
    run.serve(0, 0.0, [(0, 0, 2), (1, 2, 4)])
    run.arrive(1, 1.0)
    run.log(Failed(1, 5.0, "no room within 4 s"))
    run.serve(2, 10.0, [(0, 0, 2), (1, 2, 4)], n_tokens=2)
    rows = {
        line[:29].strip(): line[29:].split()
        for line in summary_text(finish_run(run.path, run.experiment)).splitlines()
    }
    assert rows["scenario seconds"][0] == "of"
    assert rows["whole request"][:3] == ["1", "of", "3"]
    assert rows["first token (TTFT)"][:3] == ["1", "of", "3"]
    assert rows["single token gaps"][:2] == ["3", "tokens"]


def test_rows_of_a_summary_say_nothing_of_the_kind_if_all_requests_completed(make_run: MakeRun) -> None:
    run = make_run(lengths=[(2, 3)])
    run.serve(0, 0.0, [(0, 0, 2), (1, 2, 4)])
    assert " of  " not in summary_text(finish_run(run.path, run.experiment))

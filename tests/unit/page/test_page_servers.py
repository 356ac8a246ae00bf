"""The states of servers after events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from testbed.page.servers import ServerStates
from testbed.records.events import events_in
from tests.support.records import event_of

TIMES = dict.fromkeys(("decided_at_s", "closed_at_s", "drained_at_s", "open_at_s"), 0.0)
SERVERS = [
    {"name": "a", "state": "online", "first": 0, "last": 4},
    {"name": "b", "state": "absent", "first": 0, "last": 0},
]


def states(*events: dict[str, Any]) -> list[list[Any]]:
    follower = ServerStates(SERVERS)
    rows = (follower.take(event_of(at_s=float(i), **event)) for i, event in enumerate(events))
    return [row for row in rows if row is not None]


def fault(kind: str, server: str = "a", **more: Any) -> dict[str, Any]:
    return {"event": "fault", "kind": kind, "server": server, "applies": True, **more}


@pytest.mark.parametrize(
    ("kind", "state"),
    [("kill", "dead"), ("died", "dead"), ("restart", "dead"), ("stop", "halted"), ("leave", "draining")],
)
def test_a_fault_changes_the_state_of_its_server(kind: str, state: str) -> None:
    assert [row[:3] for row in states(fault(kind))] == [[0, 0.0, state]]


def test_a_fault_that_found_nothing_to_do_changes_nothing() -> None:
    assert states(fault("kill", applies=False), fault("no such kind"), fault("kill", server="nobody")) == []


def test_a_server_that_begins_again_is_as_fast_as_at_first_and_has_its_blocks() -> None:
    begun = {"event": "begun", "server": "a", "blocks": [1, 3]}
    rows = states(fault("slow", factor=3.0), fault("kill"), begun)
    assert [row[2:6] for row in rows] == [
        ["online", 0, 4, 3.0],
        ["dead", 0, 4, 1.0],
        ["online", 1, 3, 1.0],
    ]


def test_a_halted_server_that_goes_on_is_online_and_still_slow() -> None:
    over = {"event": "fault-over", "kind": "stop", "server": "a"}
    rows = states(fault("slow", factor=2.0), fault("stop"), over)
    assert rows[-1][2:6] == ["online", 0, 4, 2.0]


def test_a_server_that_moves_drains_then_loads_then_serves_its_new_blocks() -> None:
    rows = states(
        {"event": "moving", "server": "a", "old": [0, 4], "new": [2, 6], "keeps": [2, 4]},
        {"event": "drained", "server": "a"},
        {"event": "moved", "server": "a", "old": [0, 4], "new": [2, 6], **TIMES},
    )
    assert [row[2:] for row in rows] == [
        ["draining", 0, 4, 1.0, 2, 4],
        ["joining", 0, 4, 1.0, 0, 0],
        ["online", 2, 6, 1.0, 0, 0],
    ]


@pytest.mark.parametrize(
    "event", [{"event": "begun", "server": ["a"]}, {"event": "begun", "server": "a", "at_s": "x"}, {}]
)
def test_lines_that_no_run_writes_change_nothing(event: dict[str, Any]) -> None:
    lines = [json.dumps({"at_s": at_s, **event}).encode() for at_s in (None, 1.0)]
    assert [ServerStates(SERVERS).take(read) for read in events_in(lines)] == []

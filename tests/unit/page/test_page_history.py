"""The history of a growing run, as pages are sent it."""

from __future__ import annotations

import json
from pathlib import Path

import msgpack
import pytest

from nodes.eventlog import EventLog
from nodes.records import (
    Admitted,
    AnyRecord,
    Arrived,
    Completed,
    HopRecord,
    Opening,
    Preempted,
    Resumed,
    Token,
)
from testbed.page.follow import EventReader, Follower
from testbed.page.history import History, Position
from testbed.records.events import Serving, Stopped

HEADER = {
    "clients": [{"name": "c0"}],
    "servers": [{"name": "s0", "state": "online", "first": 0, "last": 4}],
}


def token(request: int, number: int, ready_s: float, took_s: float = 0.4) -> Token:
    hop = HopRecord(0, 0, 4, ready_s, ready_s + 0.1, ready_s + 0.1 + took_s - 0.2, ready_s + took_s, 1, 1)
    return Token(request, ready_s + took_s, number, ready_s, [hop], 5)


def session(request: int = 0, n_tokens: int = 6) -> list[AnyRecord]:
    steps: list[AnyRecord] = [token(request, i, 1 + 0.4 * i) for i in range(n_tokens)]
    return [
        Arrived(request, 0.5, "c0", 0.5, 3, n_tokens),
        Admitted(request, 0.7, [(0, 0, 4)]),
        Opening(request, 0.6, 0.7),
        *steps,
        Completed(request, 1 + 0.4 * n_tokens),
    ]


def test_a_page_that_asks_again_gets_only_what_it_has_not() -> None:
    history = History(["c0"], 6)
    records = session()
    for record in records[:5]:
        history.record(record)
    at = history.position
    for record in records[5:]:
        history.record(record)
    rest = history.since(at)
    assert [record[0] for record in rest["records"]] == ["e"]
    assert rest["tokens"]["number"] == [2, 3, 4, 5]
    whole = history.since(Position())
    assert [record[0] for record in whole["records"]] == ["a", "m", "o", "e"]
    assert whole["tokens"]["at_s"] == pytest.approx([1.4, 1.8, 2.2, 2.6, 3.0, 3.4])
    assert whole["last_at_s"] == pytest.approx(3.4)


def test_the_parts_of_tokens_are_sent_again_only_where_they_differ() -> None:
    history = History(["c0"], 60)
    for i in range(20):
        history.record(token(0, i, float(i), took_s=0.4 if i < 10 else 0.9))
    assert [(part[0], part[1]) for part in history.parts] == [(0, 0), (0, 1), (0, 10)]
    [server, client, up, compute, down] = history.parts[-1][3][0]
    assert (server, client) == (0, 0)
    assert (up, compute, down) == pytest.approx((0.1, 0.7, 0.1))


def test_a_page_hears_that_a_session_lost_its_chain_and_has_another() -> None:
    history = History(["c0"], 6)
    for record in (
        *session()[:5],
        Preempted(0, 1.9, 0, 5),
        Admitted(0, 4.0, [(0, 0, 4)]),
        Resumed(0, 4.0, 5),
    ):
        history.record(record)
    assert history.records[-2:] == [["v", 0, 1.9, 0, 5], ["m", 0, 4.0, [(0, 0, 4)]]]


def test_of_a_run_with_too_many_tokens_every_so_many_are_kept_and_the_last() -> None:
    history = History(["c0"], 12, max_tokens=4)
    for record in session(n_tokens=12):
        history.record(record)
    assert history.since(Position())["tokens"]["number"] == [0, 3, 6, 9, 11]


def test_logs_and_events_are_read_as_they_grow(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    log = EventLog(tmp_path / "events" / "c0.log")
    events = tmp_path / "events.jsonl"
    follower = Follower(tmp_path, HEADER, 6)
    assert not follower.poll()
    records = session()
    for record in records[:4]:
        log.write(record)
    kill = json.dumps({"event": "fault", "at_s": 1.2, "server": "s0", "kind": "kill", "applies": True})
    events.write_text(kill[:20])
    assert follower.poll()
    assert follower.history.position == Position(records=3, tokens=1, parts=1)
    events.write_text(kill + "\nno json\n[1]\n" + json.dumps({"event": "stopped", "at_s": 9.0}) + "\n")
    for record in records[4:]:
        log.write(record)
    assert follower.poll()
    assert follower.has_stopped
    assert [row[2] for row in follower.history.servers] == ["dead"]
    assert [event["event"] for event in follower.history.events] == ["fault", "stopped"]
    assert follower.history.last_at_s == 9.0
    assert not follower.poll()
    log.close()


def test_a_record_that_cannot_be_read_is_told_with_what_could(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "c0.log"
    log = EventLog(path)
    for record in session()[:4]:
        log.write(record)
    follower = Follower(tmp_path, HEADER, 6)
    follower.poll()
    assert follower.why == ""
    path.write_bytes(path.read_bytes() + msgpack.packb(["other", 1, 2]))
    follower.poll()
    assert follower.history.position.records == 3
    assert follower.why.startswith("not all of it can be read: another version of the testbed")


def test_a_line_that_is_still_being_written_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"event": "serving"}\n{"event": "sto')
    reader = EventReader(tmp_path)
    assert [type(event) for event in reader] == [Serving]
    path.write_text('{"event": "serving"}\n{"event": "stopped"}\n')
    assert [type(event) for event in reader] == [Stopped]

"""The contract of what a run leaves: what stands once is what is documented, written and read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from testbed.records.base import Record, columns_of, data_of
from testbed.records.docs import TABLES, with_tables
from testbed.records.events import (
    AnyEvent,
    EventWriter,
    FaultHappened,
    Moved,
    Serving,
    event_data,
    events_in,
    read_events,
)
from testbed.records.hops import HopRow
from testbed.records.plan import Plan
from testbed.records.requests import OPTIONAL, RequestRow, Times, flat, request_columns, row_of
from testbed.records.summary import RunSummary, summary_from
from testbed.results.tables import read_requests, request_table
from tests.support.full_disk import files_no_longer_than

ROOT = Path(__file__).parents[3]


def row(**fields: object) -> RequestRow:
    known: dict[str, object] = {
        "request": 3,
        "client": "c0",
        "status": "completed",
        "arrival_at_s": 1.0,
        "arrived_at_s": 1.5,
        "ended_at_s": 4.0,
        "n_input_tokens": 2,
        "n_output_tokens": 3,
        "max_new_tokens": 3,
        "chain": "0:0-2 4:2-4",
        "token_ids": [7, 8, 9],
        "times": Times.of(0.5, 0.1, 1.0, 2.5, 3),
    }
    return RequestRow(**(known | fields))  # type: ignore[arg-type]


def test_the_tables_of_the_metrics_page_are_those_of_the_records() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(TABLES)
    assert with_tables(page) == page, "run python -m testbed.records.docs"


@pytest.mark.parametrize("record", [RequestRow, Times, HopRow, RunSummary, Plan])
def test_every_field_of_a_table_says_what_it_means(record: type[Record]) -> None:
    assert [name for name, (_, meta) in columns_of(record).items() if not meta.description] == []


def test_events_have_names_of_their_own_and_say_what_they_mean() -> None:
    kinds = get_args(AnyEvent)
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)
    assert [kind for kind in kinds if not kind.__doc__] == []


def test_a_metric_follows_from_four_times_and_is_left_out_where_a_request_did_not_get_that_far() -> None:
    assert Times.of(0.5, 0.1, 1.0, 2.5, 3) == Times(
        queue_s=0.5, setup_s=0.1, ttft_s=1.0, tpot_s=0.75, per_token_s=2.5 / 3, e2e_s=2.5
    )
    assert Times.of(0.5, 0.1, 1.0, 1.0, 1).tpot_s is None
    assert Times.of(0.5, 0.1, 1.0, None, 3) == Times(queue_s=0.5, setup_s=0.1, ttft_s=1.0)
    assert Times.of(0.5, None, None, None, 3) == Times(queue_s=0.5)


def test_a_row_survives_its_table(tmp_path: Path) -> None:
    rows = [
        row(conversation=0, turn=1, n_cached_tokens=16, n_rounds=3, n_drafted=9, n_accepted=2, n_given_up=1),
        row(request=4, status="failed", reason="no room", times=Times(), token_ids=[], chain=""),
    ]
    table = request_table(rows)
    assert table.column_names == list(request_columns())
    assert request_table(rows[1:]).column_names == [n for n in request_columns() if n not in OPTIONAL]
    pq.write_table(table, tmp_path / "requests.parquet")
    assert read_requests(tmp_path / "requests.parquet") == rows
    assert (rows[0].waited_s, rows[1].waited_s) == (0.5, 2.5)
    assert [tuple(hop) for hop in rows[0].hops] == [(0, 0, 2), (4, 2, 4)]


def test_a_table_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """It has ``rest_s``, and neither ``ended_at_s`` nor what came later."""
    old = flat(row())
    old |= {"rest_s": old["tpot_s"], "model_rest_s": None, "unqueued_rest_s": None}
    for name in ("ended_at_s", "n_preemptions", "max_new_tokens"):
        del old[name]
    pq.write_table(pa.Table.from_pylist([old]), tmp_path / "requests.parquet")
    assert read_requests(tmp_path / "requests.parquet") == [row()]
    with pytest.raises(ValueError, match="it has no column chain"):
        row_of({name: value for name, value in old.items() if name != "chain"})


def test_a_summary_reads_as_attributes_and_as_a_mapping_and_leaves_out_what_its_engine_lacks() -> None:
    text = b'{"engine": "simulation", "scenario": "x", "seed": 0, "n_requests": 1, "n_completed": 1, '
    text += (
        b'"policy": {"placement": "cg-bp", "routing": "ws-rr"}, "metrics": {"rest_s": {"mean": 2.0, "n": 1}}}'
    )
    summary = summary_from(text)
    assert summary.metrics["rest_s"].mean == summary["metrics"]["rest_s"]["mean"] == 2.0
    assert "twin" not in summary and summary.get("twin") is None
    with pytest.raises(KeyError):
        summary["twin"]
    assert dict(summary).keys() == data_of(summary).keys()
    assert summary_from(data_of(summary)) == summary


def test_events_are_read_as_they_were_written_and_other_lines_are_left_out(tmp_path: Path) -> None:
    written = [
        Serving(at_s=-0.5),
        FaultHappened(at_s=1.0, server="s0", kind="slow", factor=2.0),
        Moved(
            at_s=2.0,
            server="s1",
            old=(0, 2),
            new=(2, 4),
            **dict.fromkeys(("decided_at_s", "closed_at_s", "drained_at_s", "open_at_s"), 2.0),
        ),
    ]
    writer = EventWriter(tmp_path)
    for event in written:
        writer.write(event)
    writer.close()
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "of another version"}\nno json\n{"event": "sto')
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    assert list(events_in(lines)) == written
    assert read_events(tmp_path, FaultHappened) == written[1:2]
    assert event_data(written[1]) == {
        "event": "fault",
        "at_s": 1.0,
        "server": "s0",
        "kind": "slow",
        "planned_at_s": None,
        "for_s": None,
        "applies": True,
        "by": "scenario",
        "factor": 2.0,
    }
    assert read_events(tmp_path / "none", Serving) == []


def test_an_event_for_which_the_disk_has_no_room_costs_no_other_event(tmp_path: Path) -> None:
    before, lost, after = (Serving(at_s=at_s) for at_s in (1.0, 2.0, 3.0))
    writer = EventWriter(tmp_path)
    writer.write(before)
    with files_no_longer_than((tmp_path / "events.jsonl").stat().st_size + 10):
        writer.write(lost)
    assert writer.failure == "cannot write events.jsonl: No space left on device"
    writer.write(after)
    writer.close()
    assert read_events(tmp_path, Serving) == [before, after]

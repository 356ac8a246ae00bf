"""Reads the hops of one request, token by token, for the page's waterfall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nodes.eventlog import LogReader
from nodes.records import Token
from testbed.records.plan import is_simulated
from testbed.rundir import parquet_path


def request_hops(run_dir: Path, request: int) -> list[list[Any]]:
    """Return ``[token, ready_at_s, at_s, hops]`` of every logged token of ``request``; scenario seconds.

    A hop is ``[server, first, last, sent, arrived, departed, received, replayed tokens]``; the middle four
    are instants.
    """
    if not is_simulated(run_dir):
        return [
            [
                record.token,
                record.ready_at_s,
                record.at_s,
                [[*hop[:7], hop.replayed_tokens] for hop in record.hops],
            ]
            for path in sorted((run_dir / "events").glob("*.log"))
            if path.is_file()
            for record in LogReader(path)
            if isinstance(record, Token) and record.request == request
        ]
    return _from_table(run_dir / "hops.parquet", request)


def _from_table(path: Path, request: int) -> list[list[Any]]:
    import pyarrow.parquet as pq

    if not path.is_file():
        return []
    table = pq.read_table(parquet_path(path), filters=[("request", "==", request)])
    numbers: dict[str, int] = {}
    names = table.column("server").combine_chunks()
    if hasattr(names, "dictionary"):
        numbers = {name: i for i, name in enumerate(names.dictionary.to_pylist())}
    tokens: dict[int, list[Any]] = {}
    for row in table.to_pylist():
        hop = [
            numbers.get(row["server"], 0),
            *(row[name] for name in ("first_block", "last_block", "sent_at_s", "arrived_at_s")),
            *(row[name] for name in ("departed_at_s", "received_at_s", "replayed_tokens")),
        ]
        ready_at_s = row["sent_at_s"] - row["hop_client_s"]
        token = tokens.setdefault(row["token"], [row["token"], ready_at_s, row["received_at_s"], []])
        token[2] = row["received_at_s"]
        token[3].append(hop)
    return [tokens[number] for number in sorted(tokens)]

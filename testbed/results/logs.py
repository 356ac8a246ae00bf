"""Reads the append-only logs that clients write (``nodes.eventlog``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from nodes.records import HopRecord
from nodes.recovery import REPLAYED
from testbed.rundir import MOVED, NETWORK_CHANGE, read_events


@dataclass
class TokenRecord:
    """One output token: its hops in order. Token 0 is the prefill; ``token_id`` is what came out."""

    token: int
    ready_at_s: float
    finished_at_s: float
    hops: list[HopRecord]
    token_id: int = -1


class Attempt(NamedTuple):
    """An attempt to open a chain that was refused, and how long the client waited then.

    ``chain`` is ``None`` where there was none; ``refused`` are the servers without room, ``broken`` those among
    them that could not be reached; ``None`` where the log does not say.
    """

    chain: list[list[int]] | None
    refused: list[int] | None
    broken: list[int] | None
    backoff_s: float


@dataclass
class RequestRecord:
    """What a client logged of one request; ``status`` is the last state that ends one."""

    index: int
    client: str
    intended_at_s: float
    arrived_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    status: str = "unfinished"
    reason: str = ""
    n_rejections: int = 0
    wait_expected_s: float = 0.0
    decision_s: list[float] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    """Those that were refused, in order."""
    asked_chain: list[list[int]] | None = None
    """That of the present attempt."""
    retried_at_s: float = 0.0
    """The last time a chain was asked for or refused."""
    opening_at_s: float | None = None
    opened_at_s: float | None = None
    ended_at_s: float | None = None
    chain: list[list[int]] = field(default_factory=list)
    tokens: list[TokenRecord] = field(default_factory=list)
    recoveries: list[tuple[str, float, dict[str, Any]]] = field(default_factory=list)
    """(event, instant, details) of ``nodes.recovery``."""

    @property
    def n_recoveries(self) -> int:
        """Standstills after which the session went on."""
        return sum(event == REPLAYED for event, _, _ in self.recoveries)

    @property
    def last_seen_at_s(self) -> float:
        """The latest instant that the log knows of this request; its end if it has ended."""
        if self.ended_at_s is not None:
            return self.ended_at_s
        known = [self.arrived_at_s if self.opened_at_s is None else self.opened_at_s, self.retried_at_s]
        return max(*known, *(t.finished_at_s for t in self.tokens[-1:]))


@dataclass
class RunRecords:
    """All requests of a run by index; ``dropped_bytes`` were cut off by a kill or a full disk."""

    requests: list[RequestRecord]
    dropped_bytes: int
    changes: list[dict[str, Any]] = field(default_factory=list)
    """The lines of ``events.jsonl`` about links that changed, in the order of the scenario's changes."""

    faults: list[dict[str, Any]] = field(default_factory=list)
    """The lines about what happened to servers: faults, their ends, servers that began again."""
    replays: list[dict[str, Any]] = field(default_factory=list)
    """The lines about sessions that went on after a failure."""
    moves: list[dict[str, Any]] = field(default_factory=list)
    """The lines about servers that have changed their blocks."""

    @property
    def changed_at_s(self) -> list[float]:
        return [change["at_s"] for change in self.changes]


_KINDS = ("state", "opening", "token", "recovery")


def read_logs(run_dir: Path) -> RunRecords:
    """Every whole record of every client's log. A tail that cannot be read is dropped and counted."""
    requests: dict[int, RequestRecord] = {}
    dropped = 0
    for path in sorted((run_dir / "events").glob("*.log")):
        data = path.read_bytes()
        unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=max(len(data), 1))
        unpacker.feed(data)
        whole = 0
        while True:
            try:
                record = unpacker.unpack()
            except (msgpack.OutOfData, ValueError):  # cut short, or bytes that are no msgpack
                break
            if not (isinstance(record, list) and record and record[0] in _KINDS):
                break  # a disk that lost power can leave zeros: what follows means nothing
            _apply(requests, record)
            whole = unpacker.tell()
        dropped += len(data) - whole
    return RunRecords(
        [requests[i] for i in sorted(requests)],
        dropped,
        read_events(run_dir, NETWORK_CHANGE),
        read_events(run_dir, "fault", "fault-over", "begun"),
        read_events(run_dir, REPLAYED),
        read_events(run_dir, MOVED),
    )


def _apply(requests: dict[int, RequestRecord], record: list[Any]) -> None:
    kind, index = record[0], record[1]
    if kind == "token":
        _, _, token, ready, finished, hops, token_id = record
        records = [HopRecord(*hop) for hop in hops]
        requests[index].tokens.append(TokenRecord(token, ready, finished, records, token_id))
    elif kind == "recovery":
        _, _, event, at_s, details = record
        requests[index].recoveries.append((event, at_s, details))
    elif kind == "opening":
        requests[index].opening_at_s, requests[index].opened_at_s = record[2], record[3]
    else:
        _apply_state(requests, index, *record[2:])


def _apply_state(
    requests: dict[int, RequestRecord], index: int, state: str, at_s: float, details: dict[str, Any]
) -> None:
    if state == "arrived":
        requests[index] = RequestRecord(
            index,
            details["client"],
            details["intended_at_s"],
            at_s,
            details["n_input_tokens"],
            details["n_output_tokens"],
        )
        return
    request = requests[index]
    if state == "routed":
        request.retried_at_s = at_s
        request.asked_chain = details["hops"]
        request.decision_s.append(details["decision_s"])
        request.asked_s.append(details["asked_s"])
        request.wait_expected_s = max(request.wait_expected_s, details["wait_s"])
    elif state == "rejected":
        request.retried_at_s = at_s
        request.n_rejections += 1
        refused, broken = details.get("refused"), details.get("broken")
        request.attempts.append(Attempt(request.asked_chain, refused, broken, details["backoff_s"]))
        request.asked_chain = None
    elif state == "admitted":
        request.chain = [list(hop) for hop in details["hops"]]
    else:  # completed, failed, interrupted
        request.status, request.ended_at_s = state, at_s
        request.reason = details.get("reason", "")

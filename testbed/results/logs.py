"""Reads the append-only logs that clients write (``nodes.eventlog``)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nodes.eventlog import read_log
from nodes.records import (
    Admitted,
    AnyRecord,
    Arrived,
    Completed,
    Failed,
    HopPlan,
    Interrupted,
    Opening,
    Recoveries,
    Rejected,
    Replayed,
    Routed,
    Token,
)
from testbed.rundir import MOVED, NETWORK_CHANGE, read_events


class Attempt(NamedTuple):
    """An attempt to open a chain that was refused; ``chain`` is ``None`` where there was none."""

    chain: list[HopPlan] | None
    refusal: Rejected


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
    asked_chain: list[HopPlan] | None = None
    """That of the present attempt."""
    retried_at_s: float = 0.0
    """The last time a chain was asked for or refused."""
    opening_at_s: float | None = None
    opened_at_s: float | None = None
    ended_at_s: float | None = None
    chain: list[HopPlan] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    recoveries: list[Recoveries] = field(default_factory=list)

    @property
    def n_recoveries(self) -> int:
        """Standstills after which the session went on."""
        return sum(isinstance(record, Replayed) for record in self.recoveries)

    @property
    def last_seen_at_s(self) -> float:
        """The latest instant that the log knows of this request; its end if it has ended."""
        if self.ended_at_s is not None:
            return self.ended_at_s
        known = [self.arrived_at_s if self.opened_at_s is None else self.opened_at_s, self.retried_at_s]
        return max(*known, *(t.at_s for t in self.tokens[-1:]))


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


def read_logs(run_dir: Path) -> RunRecords:
    """Every whole record of every client's log. A tail that cannot be read is dropped and counted."""
    requests: dict[int, RequestRecord] = {}
    dropped = 0
    for path in sorted((run_dir / "events").glob("*.log")):
        records, n_bytes = read_log(path)
        for record in records:
            _apply(requests, record)
        dropped += n_bytes
    return RunRecords(
        [requests[i] for i in sorted(requests)],
        dropped,
        read_events(run_dir, NETWORK_CHANGE),
        read_events(run_dir, "fault", "fault-over", "begun"),
        read_events(run_dir, "replayed"),
        read_events(run_dir, MOVED),
    )


def _apply(requests: dict[int, RequestRecord], record: AnyRecord) -> None:
    if isinstance(record, Arrived):
        requests[record.request] = RequestRecord(
            record.request,
            record.client,
            record.intended_at_s,
            record.at_s,
            record.n_input_tokens,
            record.n_output_tokens,
        )
        return
    request = requests[record.request]
    match record:
        case Token():
            request.tokens.append(record)
        case Opening():
            request.opening_at_s, request.opened_at_s = record.at_s, record.opened_at_s
        case Routed():
            request.retried_at_s = record.at_s
            request.asked_chain = record.hops
            request.decision_s.append(record.decision_s)
            request.asked_s.append(record.asked_s)
            request.wait_expected_s = max(request.wait_expected_s, record.wait_s)
        case Rejected():
            request.retried_at_s = record.at_s
            request.n_rejections += 1
            request.attempts.append(Attempt(request.asked_chain, record))
            request.asked_chain = None
        case Admitted():
            request.chain = record.hops
        case Completed() | Failed() | Interrupted():
            request.status, request.ended_at_s = record.kind, record.at_s
            request.reason = record.reason if isinstance(record, Failed) else ""
        case _:
            request.recoveries.append(record)

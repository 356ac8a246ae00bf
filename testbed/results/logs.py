"""Reads the append-only logs of a run's clients (``nodes.eventlog``). Times are scenario seconds."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nodes.eventlog import LogReader
from nodes.records import (
    HOP_COLUMNS,
    Admitted,
    AnyRecord,
    Arrived,
    Cancelled,
    Completed,
    Drafted,
    Failed,
    Interrupted,
    Opening,
    Preempted,
    Recoveries,
    Rejected,
    Released,
    Replayed,
    Resumed,
    Reused,
    Routed,
    Token,
)
from policies.problem import Hop
from testbed.codeversion import rules_digest
from testbed.errors import UserError
from testbed.experiments.provenance import read_provenance
from testbed.records.events import (
    OF_FAULTS,
    FaultEvent,
    LinksChanged,
    Moved,
    read_events,
)
from testbed.records.events import Replayed as SessionReplayed


class Attempt(NamedTuple):
    """A rejected attempt to open a chain, which began ``at_s``; ``chain`` is None if the coordinator found none."""

    chain: list[Hop] | None
    refusal: Rejected
    at_s: float


class TokenTimes(NamedTuple):
    """An output token of a request; its hops are in ``LoggedHops``."""

    token: int
    ready_at_s: float
    at_s: float
    token_id: int
    has_step: bool = True
    """Whether it is its step's first token. Others come with the first in a round of speculative decoding."""


class LoggedHops:
    """Every hop of every token, in the order of the logs; stored as numbers, for there may be millions."""

    NAMES = ("request", "token", "hop", *HOP_COLUMNS, "client_s", "tail_s")

    def __init__(self) -> None:
        self._values = array("d")

    def add(self, token: Token) -> None:
        """Add a token's hops. ``client_s`` is the client's time before a hop, ``tail_s`` after the last."""
        previous_s, n_after = token.ready_at_s, len(token.hops)
        for number, hop in enumerate(token.hops):
            n_after -= 1
            tail_s = 0.0 if n_after else token.at_s - hop.received_at_s
            client_s = hop.sent_at_s - previous_s
            self._values.extend((token.request, token.token, number, *hop.row(), client_s, tail_s))
            previous_s = hop.received_at_s

    def columns(self) -> dict[str, NDArray[np.float64]]:
        """Return the columns ``NAMES``, ordered by request and then as they were logged."""
        rows = np.frombuffer(self._values, dtype=np.float64).reshape(-1, len(self.NAMES))
        order = np.argsort(rows[:, 0], kind="stable")
        return {name: rows[order, column] for column, name in enumerate(self.NAMES)}


@dataclass
class RequestRecord:
    """What a client logged about one request. ``status`` is how it ended, or "unfinished"."""

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
    cost_s: float | None = None
    """What the routing policy minimised when the request first asked; ``None``: it has had no chain."""
    decision_s: list[float] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)
    queued_s: float = 0.0
    """Time in the coordinator's queue before the chain was opened."""
    n_cached_tokens: int | None = None
    """Tokens of its prompt whose caches servers had kept; ``None``: they keep none."""
    n_filled_tokens: int = 0
    """What the hub has sent its hops of these, the sum of all hops."""
    was_open: bool = False
    """Whether an earlier turn had left its chain open."""
    n_preemptions: int = 0
    preempted_tokens: int = 0
    """Cached tokens lost by preemptions, on the servers that needed the room."""
    preempted_at_s: float = 0.0
    preempted_s: float = 0.0
    """Time without a chain after preemptions, in total; replays are not included."""
    attempts: list[Attempt] = field(default_factory=list)
    """Rejected attempts to open the first chain, in order."""
    asked_chain: list[Hop] | None = None
    """The chain of the current attempt."""
    retried_at_s: float = 0.0
    """When a chain was last routed or rejected."""
    opening_at_s: float | None = None
    opened_at_s: float | None = None
    ended_at_s: float | None = None
    place: tuple[int, ...] = ()
    """The numbers of its conversation and its turn; () if it is from outside and of none, or not from outside."""
    pages: bytes = b""
    """See ``Completed``."""
    chain: list[Hop] = field(default_factory=list)
    tokens: list[TokenTimes] = field(default_factory=list)
    rounds: list[Drafted] = field(default_factory=list)
    recoveries: list[Recoveries] = field(default_factory=list)

    @property
    def decode_steps(self) -> list[TokenTimes]:
        """The first tokens of all steps but the prompt's."""
        return [token for token in self.tokens[1:] if token.has_step]

    @property
    def n_recoveries(self) -> int:
        """Number of failures after which the session continued."""
        return sum(isinstance(record, Replayed) for record in self.recoveries)

    @property
    def last_seen_at_s(self) -> float:
        """When the request ended, or the latest instant that the log has of it."""
        if self.ended_at_s is not None:
            return self.ended_at_s
        known = [self.arrived_at_s if self.opened_at_s is None else self.opened_at_s, self.retried_at_s]
        return max(*known, *(t.at_s for t in self.tokens[-1:]))


@dataclass
class RunRecords:
    """The logs of a run: requests by index; ``dropped_bytes`` is the size of incomplete records."""

    requests: list[RequestRecord]
    dropped_bytes: int
    hops: LoggedHops = field(default_factory=LoggedHops)
    changes: list[LinksChanged] = field(default_factory=list)
    """Changes of links, from ``events.jsonl`` as the next three, in order."""
    faults: list[FaultEvent] = field(default_factory=list)
    """Faults, their ends, and servers that began to serve (again)."""
    replays: list[SessionReplayed] = field(default_factory=list)
    """Sessions that continued after a failure."""
    moves: list[Moved] = field(default_factory=list)
    """Servers that have changed their blocks."""


def read_logs(run_dir: Path) -> RunRecords:
    """Read every complete record of every client's log. An unreadable end of a log is dropped and counted.

    Raises ``UserError`` if a log cannot be read at all, or other code wrote it in another form.
    """
    requests: dict[int, RequestRecord] = {}
    hops, dropped = LoggedHops(), 0
    for path in sorted((run_dir / "events").glob("*.log")):
        log = LogReader(path)
        try:
            for record in log:
                _apply(requests, hops, record)
            dropped += log.unread_bytes
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror}); copy the whole run again") from error
        if log.has_unknown_record:
            _check_code(run_dir, path)
    return RunRecords(
        [requests[i] for i in sorted(requests)],
        dropped,
        hops,
        read_events(run_dir, LinksChanged),
        read_events(run_dir, OF_FAULTS),
        read_events(run_dir, SessionReplayed),
        read_events(run_dir, Moved),
    )


def _check_code(run_dir: Path, log: Path) -> None:
    """Raise ``UserError`` if other code than this has made the run; tables made from what can be read would lack the rest."""
    made = read_provenance(run_dir)
    if made.get("code_sha256") != rules_digest():
        raise UserError(
            f"{log} has records that this version of the testbed cannot read; rebuild the run's tables with the version that "
            f"made it ({made.get('code', 'not recorded')})"
        )


def _apply(requests: dict[int, RequestRecord], hops: LoggedHops, record: AnyRecord) -> None:
    if isinstance(record, Arrived):
        requests[record.request] = RequestRecord(
            record.request,
            record.client,
            record.intended_at_s,
            record.at_s,
            record.n_input_tokens,
            record.n_output_tokens,
            place=() if record.conversation is None else (record.conversation, record.turn or 0),
        )
        return
    if isinstance(record, Released):
        return
    request = requests[record.request]
    match record:
        case Token():
            request.tokens.append(
                TokenTimes(record.token, record.ready_at_s, record.at_s, record.token_id, bool(record.hops))
            )
            hops.add(record)
        case Reused():
            request.n_cached_tokens, request.was_open = record.tokens, record.was_open
            request.n_filled_tokens = record.n_filled
        case Drafted():
            request.rounds.append(record)
        case Opening():
            request.opening_at_s, request.opened_at_s = record.at_s, record.opened_at_s
        case Routed():
            request.retried_at_s = record.at_s
            request.asked_chain = record.hops
            request.decision_s.append(record.decision_s)
            request.asked_s.append(record.asked_s)
            if request.opening_at_s is None:
                request.queued_s += record.queued_s
            request.wait_expected_s = max(request.wait_expected_s, record.wait_s)
            if request.cost_s is None:
                request.cost_s = record.cost_s
        case Rejected():
            if request.opening_at_s is None:  # otherwise it has lost an earlier chain
                request.attempts.append(Attempt(request.asked_chain, record, request.retried_at_s))
            request.retried_at_s = record.at_s
            request.n_rejections += 1
            request.asked_chain = None
        case Admitted():
            request.chain = record.hops
        case Preempted():
            request.n_preemptions += 1
            request.preempted_tokens += record.tokens
            request.preempted_at_s = record.at_s
        case Resumed():
            request.preempted_s += record.at_s - request.preempted_at_s
        case Completed() | Failed() | Cancelled() | Interrupted():
            request.status, request.ended_at_s = record.kind, record.at_s
            request.reason = record.reason if isinstance(record, Failed) else ""
            request.pages = record.pages if isinstance(record, Completed) else b""
        case _:
            request.recoveries.append(record)

"""What happened in a run, for pages: lists that only grow, so that a page is sent only what is new.

Times are scenario seconds, servers and clients are numbers in the header's order, block ranges are half-open.

``records``: ``[kind, request, at_s, ...]``

| kind | then |
| --- | --- |
| ``a`` arrived | client, input tokens, output tokens |
| ``x`` rejected | server (-1: no chain), reason, seconds until it tries again |
| ``m`` admitted | hops ``[server, first, last]`` |
| ``o`` opening a chain | the instant when it was open |
| ``d`` a hop failed | servers, blocks, position, reason |
| ``r`` lost blocks were routed again | blocks, hops |
| ``p`` replayed: the session continues | hops, the instant of the failure |
| ``v`` preempted: it has no chain until ``m`` | server, cached tokens lost |
| ``e`` ended | status, reason |

``tokens``: columns ``request``, ``number``, ``at_s``. ``parts``: ``[request, token, ready_at_s, hops]`` with
``[server, client, network, compute, network]`` of each hop in seconds, for tokens whose parts differ from
those sent before. ``servers``: see ``testbed.page.servers``. ``events``: lines of ``events.jsonl``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from nodes.records import (
    Admitted,
    AnyRecord,
    Arrived,
    Cancelled,
    Completed,
    Detected,
    Failed,
    Interrupted,
    Opening,
    Preempted,
    Rejected,
    Replayed,
    Rerouted,
    Token,
)
from testbed.records.events import Event, event_data

MAX_TOKENS = 400_000
"""About the most tokens that a page is sent; of a longer run it is sent every n-th token of a request."""
_STEADY = 0.2
"""Parts of a token are sent again only if one has changed by more than this ratio ..."""
_LEAST_S = 0.002
"""... and by more than this many seconds."""
_PAUSE_TOKENS = 4
"""Parts of a request are sent at most once in this many tokens, unless its chain has changed."""
_DIGITS = 4
"""Digits of seconds after the decimal point."""

Parts = list[list[float]]


class Position(NamedTuple):
    """How many entries of each list a page has."""

    records: int = 0
    tokens: int = 0
    parts: int = 0
    servers: int = 0
    events: int = 0


class History:
    """The history of a run so far.

    ``n_tokens_planned`` is the number of the workload's output tokens; a page is sent about ``max_tokens`` of
    them.
    """

    def __init__(self, clients: list[str], n_tokens_planned: int, max_tokens: int = MAX_TOKENS) -> None:
        self._clients = {name: number for number, name in enumerate(clients)}
        self._every = max(1, math.ceil(n_tokens_planned / max_tokens))
        self.records: list[list[Any]] = []
        self._token_request: list[int] = []
        self._token_number: list[int] = []
        self._token_at_s: list[float] = []
        self.parts: list[list[Any]] = []
        self.servers: list[list[Any]] = []
        self.events: list[dict[str, Any]] = []
        self.last_at_s = 0.0
        """The latest instant in the history."""
        self._held_back: dict[int, tuple[int, float]] = {}
        self._sent: dict[int, tuple[int, Parts]] = {}

    @property
    def position(self) -> Position:
        return Position(
            len(self.records), len(self._token_at_s), len(self.parts), len(self.servers), len(self.events)
        )

    def since(self, at: Position) -> dict[str, Any]:
        """Return the entries after ``at``."""
        return {
            "records": self.records[at.records :],
            "tokens": {
                "request": self._token_request[at.tokens :],
                "number": self._token_number[at.tokens :],
                "at_s": self._token_at_s[at.tokens :],
            },
            "parts": self.parts[at.parts :],
            "servers": self.servers[at.servers :],
            "events": self.events[at.events :],
            "last_at_s": self.last_at_s,
        }

    def record(self, record: AnyRecord) -> None:
        """Add a client's log record."""
        self._seen(record.at_s)
        request, at_s = record.request, _short(record.at_s)
        match record:
            case Token():
                self.token(request, record.token, record.at_s)
                previous_s, hops = record.ready_at_s, []
                for hop in record.hops:
                    hops.append(
                        [
                            hop.server,
                            hop.sent_at_s - previous_s,
                            hop.arrived_at_s - hop.sent_at_s,
                            hop.departed_at_s - hop.arrived_at_s,
                            hop.received_at_s - hop.departed_at_s,
                        ]
                    )
                    previous_s = hop.received_at_s
                if hops:  # others of a round have come with its first token
                    self.token_parts(request, record.token, record.ready_at_s, hops)
            case Arrived():
                client = self._clients.get(record.client, 0)
                self.add("a", request, at_s, client, record.n_input_tokens, record.n_output_tokens)
            case Rejected():
                self.add("x", request, at_s, record.server, record.reason, _short(record.backoff_s))
            case Admitted():
                self.add("m", request, at_s, record.hops)
            case Opening():
                self.add("o", request, at_s, _short(record.opened_at_s))
            case Detected():
                self.add("d", request, at_s, record.servers, record.blocks, record.position, record.reason)
            case Rerouted():
                self.add("r", request, at_s, record.blocks, record.hops)
            case Replayed():
                self.add("p", request, at_s, record.hops, _short(record.failed_at_s))
            case Preempted():
                self.add("v", request, at_s, record.server, record.tokens)
            case Completed() | Failed() | Cancelled() | Interrupted():
                reason = record.reason if isinstance(record, Failed) else ""
                self.ended(request, at_s, record.kind, reason)
            case _:
                pass

    def add(self, kind: str, request: int, at_s: float, *details: Any) -> None:
        """Append a record."""
        self._seen(at_s)
        self.records.append([kind, request, at_s, *details])

    def ended(self, request: int, at_s: float, status: str, reason: str) -> None:
        """Append a request's end, and its last token if that was held back."""
        held = self._held_back.pop(request, None)
        if held is not None:
            self._append(request, *held)
        self._sent.pop(request, None)
        self.add("e", request, at_s, status, reason)

    def token(self, request: int, number: int, at_s: float) -> None:
        """Append an output token, or hold it back if there are too many for a page."""
        self._seen(at_s)
        if number % self._every:
            self._held_back[request] = number, at_s
        else:
            self._held_back.pop(request, None)
            self._append(request, number, at_s)

    def token_parts(self, request: int, number: int, ready_at_s: float, hops: Parts) -> None:
        """Append the parts of a token's hops, unless they are close to those sent last."""
        sent_number, sent = self._sent.get(request, (-_PAUSE_TOKENS, []))
        if [hop[0] for hop in hops] == [hop[0] for hop in sent]:
            if number > 1 and (number - sent_number < _PAUSE_TOKENS or _alike(sent, hops)):
                return
            if number % self._every:
                return
        self._sent[request] = number, hops
        rows = [[int(hop[0]), *(_short(part_s) for part_s in hop[1:])] for hop in hops]
        self.parts.append([request, number, _short(ready_at_s), rows])

    def event(self, event: Event) -> None:
        """Append a line of ``events.jsonl``."""
        if event.at_s is not None:
            self._seen(event.at_s)
        self.events.append(event_data(event))

    def _append(self, request: int, number: int, at_s: float) -> None:
        self._token_request.append(request)
        self._token_number.append(number)
        self._token_at_s.append(_short(at_s))

    def _seen(self, at_s: float) -> None:
        if math.isfinite(at_s):
            self.last_at_s = max(self.last_at_s, at_s)


def _alike(sent: Parts, hops: Parts) -> bool:
    for a, b in zip(sent, hops, strict=True):
        for x, y in zip(a[1:], b[1:], strict=True):
            if abs(x - y) > max(_LEAST_S, _STEADY * x):
                return False
    return True


def _short(value: float) -> float:
    return round(value, _DIGITS)

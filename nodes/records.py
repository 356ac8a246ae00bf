"""What a client records of its requests: one type each, from the session to the tables of a run.

Clients append records to their logs (``nodes.eventlog``) and tell the orchestrator of ``States`` and
``Recoveries``. Instants are scenario seconds, blocks half-open, servers numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from nodes.batching import Composition

HopPlan = tuple[int, int, int]
"""(server, first block, last block), half-open."""
Blocks = tuple[int, int]


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """A chain to open, how long it is expected to wait for room, and the real time that choosing it took.

    ``queued_s``: it waited that long in the coordinator's queue.
    """

    hops: list[HopPlan]
    wait_s: float
    decision_s: float
    queued_s: float = 0.0


class HopRecord(NamedTuple):
    """One message to a server and its answer. Instants are scenario seconds, blocks half-open, sizes bytes."""

    server: int
    first: int
    last: int
    sent_at_s: float
    arrived_at_s: float
    departed_at_s: float
    received_at_s: float
    up_bytes: int
    down_bytes: int
    replayed_tokens: int = 0
    """Tokens of a history that it replayed; 0: it was no replay."""
    together: Composition = Composition()
    """What the server computed in the batch with which this step ended."""

    def row(self) -> tuple[float, ...]:
        """The values of ``HOP_COLUMNS``."""
        return (*self[:-1], *self.together)


BATCH = tuple(f"batch_{name}" for name in Composition._fields)
"""What tables call the fields of a ``Composition``."""
HOP_COLUMNS = (*HopRecord._fields[:-1], *BATCH)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a request at an instant."""

    request: int
    at_s: float

    @property
    def kind(self) -> str:
        """Its name in logs and in ``events.jsonl``."""
        return str(self.__struct_config__.tag)

    def details(self) -> dict[str, Any]:
        """The fields that only this kind has."""
        fields = msgspec.structs.asdict(self)
        del fields["request"], fields["at_s"]
        return fields


class Arrived(Record, frozen=True, tag="arrived"):
    """``at_s`` may be later than ``intended_at_s`` where the machine was busy."""

    client: str
    intended_at_s: float
    n_input_tokens: int
    n_output_tokens: int


class Routed(Record, frozen=True, tag="routed"):
    """A chain was chosen; asking took ``asked_s``, of which the policy needed ``decision_s`` (real).

    ``queued_s`` is what it waited in the coordinator's queue; that is no part of the former.
    """

    hops: list[HopPlan]
    wait_s: float
    decision_s: float
    asked_s: float
    queued_s: float = 0.0


class Rejected(Record, frozen=True, tag="rejected"):
    """No session: the client waits. ``server`` -1: there was no chain.

    ``refused`` had no room, or could not be reached; the latter are ``broken``.
    """

    server: int
    reason: str
    backoff_s: float
    refused: list[int]
    broken: list[int]


class Admitted(Record, frozen=True, tag="admitted"):
    """All hops are open."""

    hops: list[HopPlan]


class Opening(Record, frozen=True, tag="opening"):
    """From ``at_s``, when the chain was known, to ``opened_at_s``."""

    opened_at_s: float


class Token(Record, frozen=True, tag="token"):
    """Output token number ``token`` was there at ``at_s``; its step could begin at ``ready_at_s``."""

    token: int
    ready_at_s: float
    hops: list[HopRecord]
    token_id: int = -1


class Completed(Record, frozen=True, tag="completed"):
    """Every token came out right."""


class Failed(Record, frozen=True, tag="failed"):
    """It ended without all tokens."""

    reason: str


class Cancelled(Record, frozen=True, tag="cancelled"):
    """Whoever asked for it has gone."""


class Interrupted(Record, frozen=True, tag="interrupted"):
    """The run ended before it did."""


class Preempted(Record, frozen=True, tag="preempted"):
    """``server`` needed its cache of ``tokens`` tokens for others: it gives up its chain and waits for another."""

    server: int
    tokens: int


class Resumed(Record, frozen=True, tag="resumed"):
    """After that it has a chain again, to which it replays ``tokens`` tokens, those of the present step included."""

    tokens: int


class Detected(Record, frozen=True, tag="detected"):
    """A hop failed. ``servers`` are lost, the first of them is the one that failed.

    ``is_overdue``: it did not answer in time, asked at ``sent_at_s``.
    """

    servers: list[int]
    blocks: Blocks
    position: int
    reason: str
    sent_at_s: float
    is_overdue: bool


class Rerouted(Record, frozen=True, tag="re-routed"):
    """Other servers for lost blocks."""

    blocks: Blocks
    hops: list[HopPlan]
    attempt: int
    asked_s: float
    decision_s: float


class Replayed(Record, frozen=True, tag="replayed"):
    """The session goes on: ``hops`` have its history. The last replay, of ``tokens``, took ``took_s``."""

    hops: list[HopPlan]
    tokens: int
    took_s: float
    failed_at_s: float
    detected_at_s: float
    attempts: int


class Unreachable(Record, frozen=True, tag="unreachable"):
    """No session could be opened on these servers, though not for want of room."""

    servers: list[int]


class Reachable(Record, frozen=True, tag="reachable"):
    """Servers that had failed this client have answered again."""

    servers: list[int]


States = (
    Arrived
    | Routed
    | Rejected
    | Admitted
    | Preempted
    | Resumed
    | Completed
    | Failed
    | Cancelled
    | Interrupted
)
Recoveries = Detected | Rerouted | Replayed | Unreachable | Reachable
AnyRecord = States | Recoveries | Opening | Token
ENDED = (Completed, Failed, Cancelled, Interrupted)
"""After one of these nothing more happens to a request."""

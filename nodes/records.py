"""Records of what happens to a client's requests, one type per event; a run's tables are made from them.

Clients append all records to their logs (``nodes.eventlog``) and send ``States`` and ``Recoveries`` to the
orchestrator, too. Instants are scenario seconds, ranges of blocks are half-open, servers are numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from nodes.batching import Composition
from policies.problem import Hop

Blocks = tuple[int, int]


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """A chain to open.

    ``wait_s`` is the expected wait for room, ``queued_s`` the time spent in the coordinator's queue, both in
    scenario seconds. ``cost_s`` is what the routing policy minimised. ``decision_s`` is the time that choosing the chain took, in real seconds.
    ``round_s`` are a chain's ``RoundTimes``, if clients choose how much they draft.
    """

    hops: list[Hop]
    wait_s: float
    decision_s: float
    queued_s: float = 0.0
    cost_s: float = 0.0
    round_s: tuple[float, ...] = ()


class HopRecord(NamedTuple):
    """One message of hidden states to a server, and the result. Instants are scenario seconds."""

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
    """Tokens of the session's history that the message replayed; 0 if it was no replay."""
    together: Composition = Composition()
    """The batch in which this step ended."""

    def row(self) -> tuple[float, ...]:
        """Returns the values of ``HOP_COLUMNS``."""
        return (*self[:-1], *self.together)


BATCH = tuple(f"batch_{name}" for name in Composition._fields)
"""The columns of tables for the fields of a ``Composition``."""
HOP_COLUMNS = (*HopRecord._fields[:-1], *BATCH)


class Record(msgspec.Struct, frozen=True, array_like=True):
    """Base of all records: something happened to ``request`` (its number) at ``at_s``."""

    request: int
    at_s: float

    @property
    def kind(self) -> str:
        """The record's name in logs and in ``events.jsonl``."""
        return str(self.__struct_config__.tag)

    def details(self) -> dict[str, Any]:
        """Returns the fields that only this kind of record has."""
        fields = msgspec.structs.asdict(self)
        del fields["request"], fields["at_s"]
        return fields


class Arrived(Record, frozen=True, tag="arrived"):
    """A client started to serve a request; later than ``intended_at_s`` if the machine was busy.

    ``conversation``, ``turn``: of a request from outside, the number of the conversation that it named, and of the turn in it, from 0.
    """

    client: str
    intended_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    conversation: int | None = None
    turn: int | None = None

    def details(self) -> dict[str, Any]:
        """Returns the fields, without those of a conversation if it is of none."""
        return {name: value for name, value in super().details().items() if value is not None}


class Routed(Record, frozen=True, tag="routed"):
    """A chain was chosen. ``wait_s``, ``decision_s``, ``queued_s`` and ``cost_s``: see ``Plan``.

    Asking for it took ``asked_s``, the decision included, ``queued_s`` not.
    """

    hops: list[Hop]
    wait_s: float
    decision_s: float
    asked_s: float
    queued_s: float = 0.0
    cost_s: float = 0.0


class Rejected(Record, frozen=True, tag="rejected"):
    """The session could not be opened; the client waits for ``backoff_s`` and tries again.

    ``server`` did not open it, for ``reason``; -1: there was no chain. ``refused`` are all servers that did
    not open it, ``broken`` those of them with another reason than lack of room.
    """

    server: int
    reason: str
    backoff_s: float
    refused: list[int]
    broken: list[int]


class Admitted(Record, frozen=True, tag="admitted"):
    """The session is open on all hops."""

    hops: list[Hop]


class Opening(Record, frozen=True, tag="opening"):
    """The session was opened: from ``at_s``, when the chain was known, to ``opened_at_s``."""

    opened_at_s: float


class Reused(Record, frozen=True, tag="reused"):
    """The caches of the prompt's first ``tokens`` tokens were there, on all servers of the first chain.

    ``was_open``: an earlier turn has left the chain open. ``n_filled``: how many of these tokens hops were sent by the hub,
    which had kept their inputs; the sum of all hops.
    """

    tokens: int
    was_open: bool = False
    n_filled: int = 0


class Released(Record, frozen=True, tag="released"):
    """The chain that an earlier turn has left open for this request is closed, before it came."""


class Token(Record, frozen=True, tag="token"):
    """Output token number ``token`` (from 0) was ready. Its step could begin at ``ready_at_s``."""

    token: int
    ready_at_s: float
    hops: list[HopRecord]
    token_id: int = -1


class Drafted(Record, frozen=True, tag="drafted"):
    """A round has ended for which the client drafted ``tokens`` tokens, of which ``accepted`` agreed.

    Follows the records of the round's output tokens, of which only the first has hops. ``given_up``: rounds that were sent
    behind it in vain.
    """

    tokens: int
    accepted: int
    given_up: int = 0


class Completed(Record, frozen=True, tag="completed"):
    """The request has all its tokens.

    ``pages``: where servers keep caches and its prompt came from outside, the ids of all whole pages of what they have
    computed (``nodes.prefixes.page_ids``).
    """

    pages: bytes = b""

    def details(self) -> dict[str, Any]:
        """Returns none: a reader of events has no use for ids."""
        return {}


class Failed(Record, frozen=True, tag="failed"):
    """The request ended without all its tokens."""

    reason: str


class Cancelled(Record, frozen=True, tag="cancelled"):
    """The request was ended because its user has gone."""


class Interrupted(Record, frozen=True, tag="interrupted"):
    """The run ended before the request did."""


class Preempted(Record, frozen=True, tag="preempted"):
    """``server`` needed the session's cache of ``tokens`` tokens for others.

    The client closes the request's chain and waits for another one.
    """

    server: int
    tokens: int


class Resumed(Record, frozen=True, tag="resumed"):
    """A preempted request has a chain again, and replays ``tokens`` tokens, the present step's included."""

    tokens: int


class Detected(Record, frozen=True, tag="detected"):
    """A hop failed in the step at ``position``. ``servers`` and their ``blocks`` are lost.

    The first of ``servers`` is the one whose failure was noticed; the others follow in the chain's order.
    ``is_overdue``: the server did not answer in time a request that was sent at ``sent_at_s``.
    """

    servers: list[int]
    blocks: Blocks
    position: int
    reason: str
    sent_at_s: float
    is_overdue: bool


class Rerouted(Record, frozen=True, tag="re-routed"):
    """Other servers were chosen for lost blocks. ``asked_s`` and ``decision_s``: see ``Routed``."""

    blocks: Blocks
    hops: list[Hop]
    attempt: int
    asked_s: float
    decision_s: float


class Replayed(Record, frozen=True, tag="replayed"):
    """The session goes on: the replacements ``hops`` have its history.

    The last replay, of ``tokens`` tokens, took ``took_s``. Hops were replaced in ``attempts`` attempts.
    """

    hops: list[Hop]
    tokens: int
    took_s: float
    failed_at_s: float
    detected_at_s: float
    attempts: int


class Unreachable(Record, frozen=True, tag="unreachable"):
    """No session could be opened on these servers, for another reason than lack of room."""

    servers: list[int]


class Reachable(Record, frozen=True, tag="reachable"):
    """Servers that had failed this client answered again."""

    servers: list[int]


States = (
    Arrived
    | Routed
    | Rejected
    | Admitted
    | Released
    | Reused
    | Preempted
    | Resumed
    | Completed
    | Failed
    | Cancelled
    | Interrupted
)
Recoveries = Detected | Rerouted | Replayed | Unreachable | Reachable
AnyRecord = States | Recoveries | Opening | Token | Drafted
ENDED = (Completed, Failed, Cancelled, Interrupted)
"""The last record of a request is one of these."""

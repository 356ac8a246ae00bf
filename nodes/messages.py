"""What goes over the control plane (``nodes.control``), a type with fields for each message.

A ``Message`` is told: nobody waits for an answer. A ``Question[A]`` is asked and answered with an ``A``.
Servers are numbers in the scenario's order, instants scenario seconds.
"""

from __future__ import annotations

from functools import cache
from typing import Generic, TypeVar

import msgspec

from nodes.links import DelayProfile
from nodes.records import Plan, Recoveries, States
from nodes.request import Request

A = TypeVar("A")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """What is told."""


class Question(Message, Generic[A], frozen=True):
    """What is asked; subclasses name the type of the answer in brackets."""


class ServerEnd(msgspec.Struct, frozen=True):
    """Where a server is. ``port`` 0: it is not there yet.

    ``up`` and ``down`` are there where nodes delay messages themselves, ``seed`` for what is random in that.
    """

    address: str
    port: int
    up: DelayProfile | None = None
    down: DelayProfile | None = None
    seed: str = ""


class ChangedLink(msgspec.Struct, frozen=True):
    """Other links to a server; ``None`` leaves a direction as it is."""

    server: int
    up: DelayProfile | None = None
    down: DelayProfile | None = None


class ServerStatus(msgspec.Struct, frozen=True):
    """Health and counters of a server. ``memory``: see ``nodes.compute.Compute.memory``."""

    name: str
    first_block: int
    last_block: int
    phase: str
    n_sessions: int
    cache_used_bytes: float
    cache_capacity_bytes: float
    opened: int
    refused: int
    closed: int
    expired: int
    preempted: int
    steps: int
    errors: int
    connections: int
    compute_s: float
    memory: dict[str, float]


class Moved(msgspec.Struct, frozen=True):
    """How a server changed its blocks, and how many sessions that cut."""

    closed_at_s: float
    drained_at_s: float
    open_at_s: float
    n_cut: int


# From the orchestrator to every node.


class Start(Question[None], frozen=True):
    """Time is zero at ``origin_at`` (the machine's clock)."""

    origin_at: float


class Stop(Message, frozen=True):
    """End."""


class Reach(Question[None], frozen=True):
    """Where a server is that has just begun."""

    server: int
    address: str
    port: int


class Links(Question[float], frozen=True):
    """Change links that the node delays itself; answered with the instant at which that was done."""

    changed: list[ChangedLink]


class Warm(Question[None], frozen=True):
    """Connect to ``servers`` and send a message of ``n_bytes``, if any, each way.

    ``servers`` ``None``: those that the node is connected to.
    """

    n_bytes: int
    servers: list[int] | None = None


# From the orchestrator to servers.


class GetStatus(Question[ServerStatus], frozen=True):
    """How a server is."""


class Rehost(Question[Moved], frozen=True):
    """Change blocks: see ``nodes.moving``."""

    first: int
    last: int
    cache_bytes: float
    drain_s: float | None
    load_s: float


class Slow(Question[None], frozen=True):
    """Take ``factor`` times as long for every step from now on; 1 is as at first."""

    factor: float


class Drain(Question[None], frozen=True):
    """Take no more sessions."""


class Emptied(Question[None], frozen=True):
    """Answered when no session is left."""


class Peers(Question[None], frozen=True):
    """Where all servers are. A push may take ``limit_s``, and ``token_s`` for every token after its first."""

    servers: list[ServerEnd]
    limit_s: float
    token_s: float


# From the orchestrator to clients.


class Connect(Question[None], frozen=True):
    """Connect to all servers that are there."""

    servers: list[ServerEnd]


class Serve(Question[None], frozen=True):
    """Run a workload in the background: ``Done`` is told at its end, ``NewToken`` for ``watched`` requests.

    ``stays_open``: others may be submitted, and there is no end before ``Finish``.
    """

    requests: list[Request]
    watched: list[int]
    stays_open: bool = False


class Submit(Message, frozen=True):
    """Serve one more request now; it is watched."""

    request: Request


class End(Message, frozen=True):
    """A submitted request is over: it has tokens ``enough``, or else whoever asked for it has gone."""

    request: int
    enough: bool


class Finish(Question[None], frozen=True):
    """End the workload now; what is running counts as interrupted."""


# From nodes to the orchestrator.


class Hello(Message, frozen=True):
    """A node is there and listens on ``port``."""

    name: str
    pid: int
    port: int


class Unfit(Question[None], frozen=True):
    """Why a node cannot begin."""

    name: str
    reason: str


class Phase(Message, frozen=True):
    """What a server does to its blocks: see ``nodes.moving``."""

    server: str
    phase: str
    at_s: float


class GetRoute(Question[Plan | None], frozen=True):
    """A chain for a request that has ``n_done`` output tokens; answered with ``None`` if there is none."""

    request: int
    attempt: int
    n_done: int = 0


class GetReplacement(Question[Plan | None], frozen=True):
    """Servers for lost blocks of a request that has ``n_done`` output tokens."""

    request: int
    first: int
    last: int
    n_done: int


class Happened(Message, frozen=True):
    """What a client has recorded of a request."""

    record: States | Recoveries


class NewToken(Message, frozen=True):
    """A watched request has ``n_tokens`` output tokens: the last one is ``token_id``, which came at ``at_s``."""

    request: int
    n_tokens: int
    token_id: int
    at_s: float


class Progress(Message, frozen=True):
    """How far a client is: tokens in all, the latest TTFT and the latest time between tokens."""

    client: str
    n_tokens: int
    ttft_s: float
    gap_s: float


class Done(Message, frozen=True):
    """A client's workload is over; ``failure`` says what broke it, if anything did."""

    client: str
    failure: str


@cache
def answers(question: type[Question[A]]) -> msgspec.msgpack.Decoder[A]:
    """Reads the ``A`` that answers a ``Question[A]``."""
    return msgspec.msgpack.Decoder(question.__orig_bases__[0].__args__[0])  # type: ignore[attr-defined]

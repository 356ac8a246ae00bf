"""The messages of the control plane (``nodes.control``), one type each.

A ``Message`` has no answer. A ``Question[A]`` is answered with an ``A``.
Servers are numbered in the scenario's order. Instants are scenario seconds.
"""

from __future__ import annotations

from functools import cache
from typing import Generic, TypeVar

import msgspec

from nodes.links import DelayProfile
from nodes.records import Plan, Recoveries, States
from nodes.request import Request
from policies.outcomes import Times

A = TypeVar("A")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages. Only a ``Question`` has an answer."""


class Question(Message, Generic[A], frozen=True):
    """A message with an answer. Subclasses name the answer's type in brackets."""


class ServerEnd(msgspec.Struct, frozen=True):
    """The address of a server. ``port`` is 0 until the server has started.

    ``up`` and ``down`` are set where nodes delay messages themselves; ``seed`` is for jitter and loss.
    """

    address: str
    port: int
    up: DelayProfile | None = None
    down: DelayProfile | None = None
    seed: str = ""


class ChangedLink(msgspec.Struct, frozen=True):
    """New properties of the links to a server; ``None`` leaves a direction as it is."""

    server: int
    up: DelayProfile | None = None
    down: DelayProfile | None = None


class ServerStatus(msgspec.Struct, frozen=True):
    """Health and counters of a server.

    It holds blocks ``[first_block, last_block)``. Counters: see ``nodes.sessions.Counters``; ``memory``: see
    ``nodes.compute.Compute.memory``.
    """

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
    """A server's completed move to other blocks.

    It refused new sessions on leaving blocks from ``closed_at_s`` on, had no session on them left at
    ``drained_at_s``, and served the new blocks from ``open_at_s`` on. ``n_cut`` sessions were ended for it.
    """

    closed_at_s: float
    drained_at_s: float
    open_at_s: float
    n_cut: int


# From the orchestrator to every node.


class Start(Question[None], frozen=True):
    """Begin scenario time. Its zero is ``origin_at``: see ``nodes.clock.RunClock``."""

    origin_at: float


class Stop(Message, frozen=True):
    """End the node."""


class Reach(Question[None], frozen=True):
    """The address of a server that has just started."""

    server: int
    address: str
    port: int


class Links(Question[float], frozen=True):
    """Change links that the node emulates itself. The answer is the instant of the change."""

    changed: list[ChangedLink]


class Warm(Question[None], frozen=True):
    """Open connections and, unless ``n_bytes`` is 0, send that many bytes each way over every one.

    ``at_once_bytes`` of them are on their way at the same time. A server node does so with ``servers``; a client with all
    servers that it has been connected to.
    """

    n_bytes: int
    at_once_bytes: int
    servers: list[int] | None = None


# From the orchestrator to servers.


class GetStatus(Question[ServerStatus], frozen=True):
    """Ask for a server's health and counters."""


class Rehost(Question[Moved], frozen=True):
    """Move to other blocks: see ``nodes.moving.Moving.rehost``."""

    first: int
    last: int
    cache_bytes: float
    drain_s: float | None
    load_s: float


class Slow(Question[None], frozen=True):
    """Make every step from now on take ``factor`` times its original time; 1 restores it."""

    factor: float


class Drain(Question[None], frozen=True):
    """Refuse new sessions from now on."""


class WaitUntilEmpty(Question[None], frozen=True):
    """Wait until no session is left; answered then."""


class Peers(Question[None], frozen=True):
    """Addresses of all servers, and the time limit of a push to them, in scenario seconds.

    A push may take ``limit_s``, and ``token_s`` more for every token after its first.
    """

    servers: list[ServerEnd]
    limit_s: float
    token_s: float


# From the orchestrator to clients.


class Connect(Question[None], frozen=True):
    """Connect to all servers that have started (``port`` is not 0)."""

    servers: list[ServerEnd]


class Serve(Question[None], frozen=True):
    """Run a workload in the background.

    The client sends ``Done`` at its end, and ``NewToken`` for every token of ``watched`` requests.
    ``stays_open``: more requests may be submitted, and the workload ends only with ``Finish``.
    """

    requests: list[Request]
    watched: list[int]
    stays_open: bool = False


class Submit(Message, frozen=True):
    """Serve one more request now, and send ``NewToken`` for it."""

    request: Request


class End(Message, frozen=True):
    """End a submitted request: completed if it has tokens ``enough``, else failed for ``reason``; without one its user has gone."""

    request: int
    enough: bool
    reason: str = ""


class Finish(Question[None], frozen=True):
    """End the workload now; requests that are still running count as interrupted."""


# From nodes to the orchestrator.


class Hello(Message, frozen=True):
    """A node has started and listens on ``port``; 0 if it does not listen."""

    name: str
    pid: int
    port: int


class CannotStart(Question[None], frozen=True):
    """A node cannot start, for this reason."""

    name: str
    reason: str


class Phase(Message, frozen=True):
    """A server has entered a phase of a move to other blocks: see ``nodes.moving``."""

    server: str
    phase: str
    at_s: float


class GetRoute(Question[Plan | None], frozen=True):
    """Ask for a chain for a request that has ``n_done`` output tokens.

    ``attempt`` counts from 0. The answer is ``None`` if there is no chain.
    """

    request: int
    attempt: int
    n_done: int = 0


class GetReplacement(Question[Plan | None], frozen=True):
    """Ask for servers for the lost blocks ``[first, last)`` of a request that has ``n_done`` output tokens.

    The answer is ``None`` if there are none.
    """

    request: int
    first: int
    last: int
    n_done: int


class Recorded(Message, frozen=True):
    """A client has logged a record of a request.

    With the last one of a request come its ``times``, if ``ClientConfig.sends_times``.
    """

    record: States | Recoveries
    times: Times | None = None


class NewToken(Message, frozen=True):
    """A watched request got token ``token_id`` at ``at_s``, and has ``n_tokens`` output tokens now."""

    request: int
    n_tokens: int
    token_id: int
    at_s: float


class Progress(Message, frozen=True):
    """A client's progress: output tokens so far, the latest TTFT and the latest time between tokens."""

    client: str
    n_tokens: int
    ttft_s: float
    gap_s: float


class Done(Message, frozen=True):
    """A client's workload has ended. ``failure`` is the error that broke it; empty if none did."""

    client: str
    failure: str


@cache
def answers(question: type[Question[A]]) -> msgspec.msgpack.Decoder[A]:
    """Returns the decoder of the ``A`` that answers a ``Question[A]``."""
    return msgspec.msgpack.Decoder(question.__orig_bases__[0].__args__[0])  # type: ignore[attr-defined]

"""``events.jsonl``: one line per event of a run, as the orchestrator saw it. One type per kind of event.

``at_s`` is the event's instant in scenario seconds, None if it has none. Servers, clients and nodes are names, ranges
of blocks half-open from 0.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from testbed.errors import UserError
from testbed.records.summary import MoveRow
from testbed.rundir import owner_alive

EVENTS = "events.jsonl"
BY_HAND, BY_SCENARIO, BY_ITSELF = "hand", "scenario", "itself"
"""Who caused a fault or a change of links: the user, the scenario, or the process that ended."""

Blocks = tuple[int, int]
NamedHop = tuple[str, int, int]
"""(server, first block, last block), half-open."""
LinkRow = tuple[str, str, float, float, float, float]
"""(from, to, delay in seconds, rate in bit/s, jitter in seconds, loss ratio)."""


class Event(msgspec.Struct, kw_only=True, frozen=True, tag_field="event"):
    """Base of all events."""

    at_s: float | None = None

    @property
    def kind_of_event(self) -> str:
        """The event's name in ``events.jsonl``."""
        return str(self.__struct_config__.tag)


class NetworkOpened(Event, kw_only=True, frozen=True, tag="network"):
    """The network is open, and why it was chosen; ``shares_links``: whether pairs compete for shared links."""

    name: str
    why: str
    shares_links: bool | UnsetType = UNSET


class CpusKeptAwake(Event, kw_only=True, frozen=True, tag="cpus"):
    """Whether CPUs are kept from sleeping, and why, in words."""

    why: str


class Serving(Event, kw_only=True, frozen=True, tag="serving"):
    """Scenario time begins, and with it the workload."""


class Holding(Event, kw_only=True, frozen=True, tag="holding"):
    """The workload is done, and the run stays up."""


class Stopped(Event, kw_only=True, frozen=True, tag="stopped"):
    """The run has ended."""


class Interrupted(Event, kw_only=True, frozen=True, tag="interrupted"):
    """The user has ended the run, or with ``request`` the run's end has ended that request."""

    request: int | UnsetType = UNSET


class Broken(Event, kw_only=True, frozen=True, tag="broken"):
    """An error has ended the run."""

    reason: str


class NodeEnded(Event, kw_only=True, frozen=True, tag="node-ended"):
    """A node's process has ended, and the run cannot go on without it."""

    node: str
    status: int


class ProgramBegun(Event, kw_only=True, frozen=True, tag="program-begun"):
    """The user's program on ``node`` has begun."""

    node: str


class ProgramEnded(Event, kw_only=True, frozen=True, tag="program-ended"):
    """The user's program on ``node`` has ended."""

    node: str
    status: int


class RequestFailed(Event, kw_only=True, frozen=True, tag="failed"):
    """A request has ended without all its tokens."""

    request: int


class RequestRejected(Event, kw_only=True, frozen=True, tag="rejected"):
    """A server refused a request's session, which is tried again later."""

    request: int


class RequestCancelled(Event, kw_only=True, frozen=True, tag="cancelled"):
    """A request's caller has gone."""

    request: int


class RequestPreempted(Event, kw_only=True, frozen=True, tag="preempted"):
    """``server`` needed the session's cache of ``tokens`` tokens for others."""

    request: int
    server: str
    tokens: int


class RequestResumed(Event, kw_only=True, frozen=True, tag="resumed"):
    """A preempted request has a chain again, and replays ``tokens`` tokens."""

    request: int
    tokens: int


class FaultHappened(Event, kw_only=True, frozen=True, tag="fault"):
    """A fault of a server, or a process that ended by itself (kind ``died``, with its ``status``).

    ``planned_at_s`` is None for one after tokens or by hand; with ``applies`` false it found nothing to do. ``factor``:
    how many times as long a slow server computes.
    """

    server: str
    kind: str
    planned_at_s: float | None = None
    for_s: float | None = None
    applies: bool = True
    by: str = BY_SCENARIO
    factor: float | UnsetType = UNSET
    status: int | UnsetType = UNSET


class FaultOver(Event, kw_only=True, frozen=True, tag="fault-over"):
    """A stopped or slow server is as before."""

    applies: ClassVar[bool] = True
    server: str
    kind: str
    planned_at_s: float | None = None


class ServerBegun(Event, kw_only=True, frozen=True, tag="begun"):
    """A server serves its ``blocks`` (again)."""

    applies: ClassVar[bool] = True
    server: str
    planned_at_s: float | None = None
    blocks: Blocks


class ServerLeft(Event, kw_only=True, frozen=True, tag="left"):
    """A server that left is gone, after ``took_s`` seconds, with ``n_sessions`` sessions still on it."""

    server: str
    took_s: float
    n_sessions: int


class Leaked(Event, kw_only=True, frozen=True, tag="leak"):
    """A node has more descriptors open at the end than at the start."""

    node: str
    n_descriptors: int


class Detected(Event, kw_only=True, frozen=True, tag="detected"):
    """A client noticed that ``servers`` with ``blocks`` failed its request at ``position``, and why."""

    client: str
    request: int
    servers: list[str]
    blocks: Blocks
    position: int
    reason: str
    sent_at_s: float
    is_overdue: bool
    failed_at_s: float


class Rerouted(Event, kw_only=True, frozen=True, tag="re-routed"):
    """Other servers were chosen for lost blocks; ``decision_s`` are real seconds."""

    client: str
    request: int
    blocks: Blocks
    hops: list[NamedHop]
    attempt: int
    asked_s: float
    decision_s: float


class Replayed(Event, kw_only=True, frozen=True, tag="replayed"):
    """The session goes on: the replacements ``hops`` have its history of ``tokens`` tokens.

    ``took_s``: of the last replay; ``recovery_s``: since the failure; ``floor_s``: the part that no client can avoid.
    """

    client: str
    request: int
    hops: list[NamedHop]
    tokens: int
    took_s: float
    failed_at_s: float
    detected_at_s: float
    attempts: int
    recovery_s: float
    floor_s: float


class Unreachable(Event, kw_only=True, frozen=True, tag="unreachable"):
    """A client could not open a session on these servers, though not for want of room."""

    client: str
    request: int
    servers: list[str]


class PlacementDecided(Event, kw_only=True, frozen=True, tag="decided"):
    """The online policy has decided on another placement; ``servers`` change their blocks, in this order."""

    servers: list[str]
    design_concurrency: int | None


class MoveBegun(Event, kw_only=True, frozen=True, tag="moving"):
    """A server begins to change its blocks: it takes new sessions only on ``keeps``."""

    server: str
    old: Blocks
    new: Blocks
    keeps: Blocks


class MoveDrained(Event, kw_only=True, frozen=True, tag="drained"):
    """A moving server has no sessions on the blocks that it gives up, and begins to load."""

    server: str


class Moved(Event, kw_only=True, frozen=True, tag="moved"):
    """A server has changed its blocks, or has joined (``old`` is empty); ``n_cut`` sessions were cut by that."""

    server: str
    old: Blocks
    new: Blocks
    decided_at_s: float
    closed_at_s: float
    drained_at_s: float
    open_at_s: float
    n_cut: int = 0

    def row(self, names: list[str]) -> MoveRow:
        """Return the move as it stands in a summary; ``names`` are those of all servers, in order."""
        return MoveRow(
            server=names.index(self.server),
            old=self.old,
            new=self.new,
            decided_at_s=self.decided_at_s,
            closed_at_s=self.closed_at_s,
            drained_at_s=self.drained_at_s,
            open_at_s=self.open_at_s,
        )


class MoveLost(Event, kw_only=True, frozen=True, tag="move-lost"):
    """A moving server has died."""

    server: str
    old: Blocks


class LinksChanged(Event, kw_only=True, frozen=True, tag="network-change"):
    """Links have changed: ``links`` are the new ones, where they are not those that the scenario plans.

    A change by hand has ``asked_at_s``, and neither ``planned_at_s`` nor ``late_s``.
    """

    planned_at_s: float | None
    late_s: float | None
    why: str
    n_links: int
    by: str = BY_SCENARIO
    asked_at_s: float | UnsetType = UNSET
    links: list[LinkRow] | UnsetType = UNSET


AnyEvent = (
    NetworkOpened
    | CpusKeptAwake
    | Serving
    | Holding
    | Stopped
    | Interrupted
    | Broken
    | NodeEnded
    | ProgramBegun
    | ProgramEnded
    | RequestFailed
    | RequestRejected
    | RequestCancelled
    | RequestPreempted
    | RequestResumed
    | FaultHappened
    | FaultOver
    | ServerBegun
    | ServerLeft
    | Leaked
    | Detected
    | Rerouted
    | Replayed
    | Unreachable
    | PlacementDecided
    | MoveBegun
    | MoveDrained
    | Moved
    | MoveLost
    | LinksChanged
)
FaultEvent = FaultHappened | FaultOver | ServerBegun
RecoveryEvent = Detected | Rerouted | Replayed | Unreachable
OF_FAULTS: tuple[type[FaultEvent], ...] = (FaultHappened, FaultOver, ServerBegun)
"""What befalls servers: faults, their ends, and servers that begin to serve (again)."""
EventT = TypeVar("EventT", bound=Event)
_DECODER = msgspec.json.Decoder(AnyEvent)


def events_in(lines: Iterable[bytes]) -> Iterator[AnyEvent]:
    """Yield the events of whole lines; a line that is none (cut short, or of another version) is left out."""
    for line in lines:
        try:
            yield _DECODER.decode(line)
        except msgspec.MsgspecError:
            continue


def read_events(run_dir: Path, kinds: type[EventT] | Sequence[type[EventT]]) -> list[EventT]:
    """Return the events of a kind, or of several kinds, from ``events.jsonl``, in order; empty if there is no such file.

    Raises ``UserError`` if the file cannot be read.
    """
    try:
        lines = (run_dir / EVENTS).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"cannot read {run_dir / EVENTS} ({error.strerror}); copy the whole run again"
        ) from error
    wanted = (kinds,) if isinstance(kinds, type) else tuple(kinds)
    return [event for event in events_in(lines) if isinstance(event, wanted)]


def goes_on(run_dir: Path) -> bool:
    """Whether the run in a directory has not ended: its process lives, and has not written its end."""
    return owner_alive(run_dir) and not read_events(run_dir, Stopped)


class EventWriter:
    """Writes ``events.jsonl``: one line per event of the run, at once.

    A full disk does not stop the run: ``failure`` then holds the reason, with which the run ends.
    """

    def __init__(self, run_dir: Path) -> None:
        self._fd = os.open(run_dir / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self.failure: str | None = None

    def write(self, event: AnyEvent) -> None:
        """Append an event, whole or not at all."""
        line = msgspec.json.encode(event) + b"\n"
        try:
            written = os.write(self._fd, line)
            if written < len(line):
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.failure = f"cannot write {EVENTS}: {error.strerror}"

    def close(self) -> None:
        os.close(self._fd)


def event_data(event: Event) -> dict[str, Any]:
    """Return an event as the data of its line in ``events.jsonl``."""
    data: dict[str, Any] = msgspec.to_builtins(event)
    return data

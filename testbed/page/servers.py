"""Follows the states of servers in a run's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from testbed.faultkinds import DIED, KINDS, Kill
from testbed.records.events import (
    Event,
    FaultHappened,
    FaultOver,
    MoveBegun,
    Moved,
    MoveDrained,
    ServerBegun,
    ServerLeft,
)


@dataclass(frozen=True)
class ServerState:
    """A server's state and its blocks [first, last).

    ``state``: absent, joining, online, draining, halted or dead. ``factor``: how many times as long as
    normally its steps take. ``kept``: blocks [first, last) that a draining server still offers.
    """

    state: str
    first: int
    last: int
    factor: float = 1.0
    kept: tuple[int, int] = (0, 0)


class ServerStates:
    """Follows the servers of a run; ``servers`` are those of the header."""

    def __init__(self, servers: Sequence[Mapping[str, Any]]) -> None:
        self._number = {server["name"]: j for j, server in enumerate(servers)}
        self._now = [ServerState(s["state"], s["first"], s["last"]) for s in servers]

    def take(self, event: Event) -> list[Any] | None:
        """Apply an event; returns the server's new row if it has changed, else None.

        A row is ``[server, at_s, state, first, last, factor, kept first, kept last]``.
        """
        server = self._number.get(getattr(event, "server", ""))
        if server is None or event.at_s is None:
            return None
        before = self._now[server]
        now = _after(before, event)
        if now == before:
            return None
        self._now[server] = now
        return [server, event.at_s, now.state, now.first, now.last, now.factor, *now.kept]


def _after(before: ServerState, event: Event) -> ServerState:
    match event:
        case FaultHappened(applies=True):
            return _hit(before, event)
        case FaultOver() if event.kind in KINDS and KINDS[event.kind].has_factor:
            return replace(before, factor=1.0)
        case FaultOver() if before.state == "halted":
            return replace(before, state="online")
        case ServerBegun():
            return _holding(event.blocks, before)
        case ServerLeft():
            return replace(before, state="absent")
        case MoveBegun():
            return replace(before, state="draining", kept=event.keeps)
        case MoveDrained():
            return replace(before, state="joining", kept=(0, 0))
        case Moved():
            return _holding(event.new, before)
    return before


def _hit(before: ServerState, event: FaultHappened) -> ServerState:
    fault = KINDS.get(Kill.name if event.kind == DIED else event.kind)
    if fault is None:
        return before
    if fault.has_factor:
        return replace(before, factor=event.factor or 1.0)
    state = fault.state
    if state is None:
        return before
    kept = (before.first, before.last) if state == "draining" else (0, 0)
    return replace(before, state=state, factor=1.0 if state == "dead" else before.factor, kept=kept)


def _holding(blocks: tuple[int, int], before: ServerState) -> ServerState:
    factor = before.factor if before.state in ("online", "draining", "joining") else 1.0
    return ServerState("online", *blocks, factor)

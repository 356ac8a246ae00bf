"""Follows the states of servers in the lines of ``events.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from testbed.faultkinds import DIED, KINDS, Kill


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

    def take(self, event: Mapping[str, Any]) -> list[Any] | None:
        """Apply an event; returns the server's new row if it has changed, else None.

        A row is ``[server, at_s, state, first, last, factor, kept first, kept last]``.
        """
        server = self._number.get(str(event.get("server")))
        if server is None or not isinstance(event.get("at_s"), int | float):
            return None
        before = self._now[server]
        now = _after(before, event)
        if now == before:
            return None
        self._now[server] = now
        return [server, event["at_s"], now.state, now.first, now.last, now.factor, *now.kept]


def _after(before: ServerState, event: Mapping[str, Any]) -> ServerState:
    kind = event.get("event")
    if kind == "fault":
        return _hit(before, event) if event.get("applies", True) else before
    if kind == "fault-over":
        fault = KINDS.get(str(event.get("kind")))
        if fault is not None and fault.has_factor:
            return replace(before, factor=1.0)
        return replace(before, state="online") if before.state == "halted" else before
    if kind == "begun":
        return _holding("online", event.get("blocks"), before)
    if kind == "left":
        return replace(before, state="absent")
    if kind == "moving":
        keeps = _pair(event.get("keeps")) or (0, 0)
        return replace(before, state="draining", kept=keeps)
    if kind == "drained":
        return replace(before, state="joining", kept=(0, 0))
    if kind == "moved":
        return _holding("online", event.get("new"), before)
    return before


def _hit(before: ServerState, event: Mapping[str, Any]) -> ServerState:
    kind = str(event.get("kind"))
    fault = KINDS.get(Kill.name if kind == DIED else kind)
    if fault is None:
        return before
    if fault.has_factor:
        factor = event.get("factor")
        return replace(before, factor=float(factor)) if isinstance(factor, int | float) else before
    state = fault.state
    if state is None:
        return before
    kept = (before.first, before.last) if state == "draining" else (0, 0)
    return replace(before, state=state, factor=1.0 if state == "dead" else before.factor, kept=kept)


def _holding(state: str, blocks: Any, before: ServerState) -> ServerState:
    first, last = _pair(blocks) or (before.first, before.last)
    factor = before.factor if before.state in ("online", "draining", "joining") else 1.0
    return ServerState(state, first, last, factor)


def _pair(value: Any) -> tuple[int, int] | None:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) for v in value):
        return value[0], value[1]
    return None

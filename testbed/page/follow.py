"""Reads a run directory into a ``History`` while it grows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nodes.eventlog import LogReader
from testbed.page.history import MAX_TOKENS, History
from testbed.page.servers import ServerStates
from testbed.rundir import EVENTS

_OF_REQUESTS = ("arrived", "routed", "admitted", "rejected", "completed", "reachable")
"""Events that the clients' logs have as well."""
_MAX_LINE_BYTES = 1024**2


class EventReader:
    """Reads ``events.jsonl``, which may still grow: every iteration gives the whole lines since the last."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVENTS
        self._read_bytes = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)
                try:
                    event = json.loads(line) if len(line) <= _MAX_LINE_BYTES else None
                except ValueError:  # cut short by a kill or a full disk
                    continue
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    yield event


class Follower:
    """Fills ``history`` from the logs of ``run_dir``, whose header is ``header``."""

    def __init__(
        self, run_dir: Path, header: dict[str, Any], n_tokens_planned: int, max_tokens: int = MAX_TOKENS
    ) -> None:
        clients = [client["name"] for client in header["clients"]]
        self.history = History(clients, n_tokens_planned, max_tokens)
        self._run_dir = run_dir
        self._states = ServerStates(header["servers"])
        self._events = EventReader(run_dir)
        self._logs: dict[Path, LogReader] = {}
        self._sizes: dict[Path, int] = {}
        self.has_stopped = False
        """Whether the run said that it came to its end."""
        self.failure = ""
        """What broke it."""

    def poll(self) -> bool:
        """Read what has come; returns whether there was anything. A file that goes away in between is read no more."""
        before = self.history.position
        with contextlib.suppress(FileNotFoundError):  # the folder of a run that came to nothing is removed
            self._read()
        return self.history.position != before

    def _read(self) -> None:
        if self._has_grown(self._run_dir / EVENTS):
            for event in self._events:
                self._take(event)
        for path in sorted((self._run_dir / "events").glob("*.log")):
            if self._has_grown(path):
                for record in self._logs.setdefault(path, LogReader(path)):
                    self.history.record(record)

    def phase(self, is_live: bool) -> str:
        """How far the run is; ``is_live``: its owner is there."""
        if self.failure:
            return "interrupted" if self.failure == "interrupted" else "broken"
        if self.has_stopped:
            return "ended"
        return "running" if is_live else "killed"

    def _has_grown(self, path: Path) -> bool:
        try:
            if not path.is_file():  # a pipe of that name would be waited for
                return False
            size = path.stat().st_size
        except OSError:
            return False
        if size == self._sizes.get(path):
            return False
        self._sizes[path] = size
        return True

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("stopped", "interrupted", "broken"):
            self.has_stopped = self.has_stopped or kind == "stopped"
            self.failure = self.failure or {"interrupted": "interrupted"}.get(
                kind, str(event.get("reason", ""))
            )
        row = self._states.take(event)
        if row is not None:
            self.history.servers.append(row)
        if kind not in _OF_REQUESTS:
            self.history.event(event)

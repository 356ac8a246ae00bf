"""Reads a growing run directory into a ``History``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nodes.eventlog import LogReader
from testbed.page.history import MAX_TOKENS, History
from testbed.page.servers import ServerStates
from testbed.records.events import EVENTS, AnyEvent, Broken, Interrupted, RequestRejected, Stopped, events_in

_IN_LOGS = (RequestRejected,)
"""Events that the clients' logs have, too; they are not read twice."""
_MAX_LINE_BYTES = 1024**2


class EventReader:
    """Reads ``events.jsonl`` while it grows: each iteration yields the events of new, whole lines."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / EVENTS
        self._read_bytes = 0

    def __iter__(self) -> Iterator[AnyEvent]:
        with open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)
                if len(line) <= _MAX_LINE_BYTES:
                    yield from events_in([line])


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
        """Whether the run has reached its end."""
        self.failure = ""
        """The reason if the run broke, "interrupted" after Ctrl-C, else empty."""

    def poll(self) -> bool:
        """Read what is new; returns whether there was anything. Files that vanish meanwhile are skipped."""
        before = self.history.position
        with contextlib.suppress(FileNotFoundError):  # the directory of a run that did not begin is removed
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

    @property
    def why(self) -> str:
        """What a page says beside the phase: why the run broke, or that not all of it can be shown; else empty."""
        if self.failure or not any(log.has_unknown_record for log in self._logs.values()):
            return self.failure
        return "not all of it can be read: another version of the testbed wrote the logs, or they are damaged"

    def phase(self, is_live: bool) -> str:
        """Return the run's phase; ``is_live``: whether its owner is alive."""
        if self.failure:
            return "interrupted" if self.failure == "interrupted" else "broken"
        if self.has_stopped:
            return "ended"
        return "running" if is_live else "killed"

    def _has_grown(self, path: Path) -> bool:
        try:
            if not path.is_file():  # reading from a pipe of that name would block
                return False
            size = path.stat().st_size
        except OSError:
            return False
        if size == self._sizes.get(path):
            return False
        self._sizes[path] = size
        return True

    def _take(self, event: AnyEvent) -> None:
        if isinstance(event, Stopped):
            self.has_stopped = True
        elif isinstance(event, Interrupted | Broken):
            self.failure = self.failure or getattr(event, "reason", "interrupted")
        row = self._states.take(event)
        if row is not None:
            self.history.servers.append(row)
        if not isinstance(event, _IN_LOGS):
            self.history.event(event)

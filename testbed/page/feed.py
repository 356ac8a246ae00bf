"""One run, for all pages that watch it: its header, its history so far, and updates."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from testbed.control.live import SOCKET
from testbed.errors import TestbedError
from testbed.experiments import load_experiment
from testbed.page.follow import Follower
from testbed.page.header import header
from testbed.page.history import History, Position
from testbed.page.linkuse import use_between_sites
from testbed.page.others import finished_history
from testbed.page.simulated import read_simulation
from testbed.records.plan import is_simulated, read_plan
from testbed.results import load_run
from testbed.results.tables import LINKS
from testbed.rundir import OWNER, TWIN, not_a_run, owner_alive

UPDATE_S = 0.1
"""Real seconds between two updates of a page, at least."""
_KEPT_UPDATES = 8
"""Encoded updates that are kept for other pages at the same position."""


class Feed:
    """Follows ``run_dir``. Call ``open`` first; ``watch`` then has to run while pages are served.

    ``header`` is None until the run has written its plan, shortly after it begins.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.others = b"[]"
        """Histories of other runs as a JSON list, for intervals in charts."""
        self.name = os.urandom(6).hex()
        """Names this feed: a page's position is valid in the feed that sent it only."""
        self.header: dict[str, Any] | None = None
        self.twin: bytes | None = None
        """The twin's whole history as JSON, once there is a twin."""
        self._follower: Follower | None = None
        self._history: History | None = None
        self._status: dict[str, Any] = {}
        self._encoded: dict[tuple[Position, Position, int], bytes] = {}
        self._n_statuses = 0
        self._changed = asyncio.Event()
        self._is_real = False
        self._ahead_s: float | None = None

    def open(self) -> bool:
        """Read the run so far; returns False if the run has not written its plan yet.

        Raises ``UserError`` if ``run_dir`` is no run directory.
        """
        if is_simulated(self.run_dir):
            self.header, self._history = read_simulation(self.run_dir)
        elif not self._is_ready():
            return False
        else:
            experiment = load_run(self.run_dir)
            self.header = header(experiment, read_plan(self.run_dir))
            n_tokens = sum(request.n_output_tokens for request in experiment.workload.requests)
            self._follower = Follower(self.run_dir, self.header, n_tokens)
            self._history = self._follower.history
            self._is_real = self.header["clock"] == "real"
            self._follower.poll()
            self._read_twin()
        self._look()
        return True

    def _is_ready(self) -> bool:
        if owner_alive(self.run_dir) and not (self.run_dir / "plan.json").exists():
            return False
        load = (self.run_dir / OWNER).exists() or (self.run_dir / "plan.json").exists()
        if not load:
            raise not_a_run(self.run_dir)
        return True

    @property
    def history(self) -> History:
        assert self._history is not None, "the feed has not been opened"
        return self._history

    @property
    def is_live(self) -> bool:
        """Whether the run's owner was alive when the status was last read."""
        return bool(self._status.get("is_live"))

    async def watch(self) -> None:
        """Poll the run for news, and wake the pages that wait; never returns."""
        while True:
            await asyncio.sleep(UPDATE_S)
            if self._follower is None:
                if self.header is None:
                    with contextlib.suppress(TestbedError):
                        self.open()
                        self._notify()
                continue
            has_news = self._follower.poll()
            if self._look() or has_news:
                self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self, at: Position, n_statuses: int) -> None:
        """Wait until there is history after ``at``, or a status after number ``n_statuses``."""
        while self.header is None or (at == self.history.position and n_statuses == self._n_statuses):
            await self._changed.wait()

    def _look(self) -> bool:
        """Read the run's status; returns whether it has changed."""
        now = self._status_now()
        if now == self._status:
            return False
        self._status, self._n_statuses = now, self._n_statuses + 1
        if now["twin"] and self.twin is None:
            self._read_twin()
        return True

    def _status_now(self) -> dict[str, Any]:
        follower = self._follower
        if follower is None:
            return {
                **{"phase": "simulated", "is_live": False, "faults": False, "twin": False, "why": ""},
                "links": self._has_links,
            }
        is_live = owner_alive(self.run_dir)
        return {
            "phase": follower.phase(is_live),
            "is_live": is_live,
            "faults": is_live and (self.run_dir / SOCKET).exists(),
            "twin": (self.run_dir / TWIN / "summary.json").exists(),
            "links": self._has_links,
            "why": follower.why,
        }

    @property
    def _has_links(self) -> bool:
        """Whether the use of links can be read: of its summary, too, which a run writes last."""
        return all((self.run_dir / name).exists() for name in (LINKS, "summary.json"))

    def links(self) -> bytes:
        """Return the use of links as JSON, once the run has left it. Raises ``UserError``, ``OSError``, ``ValueError``."""
        experiment = load_experiment(str(self.run_dir / "scenario.toml"))
        return msgspec.json.encode(use_between_sites(self.run_dir, experiment))

    def _read_twin(self) -> None:
        folder = self.run_dir / TWIN
        if not (folder / "summary.json").exists():
            return
        with contextlib.suppress(TestbedError):
            self.twin = msgspec.json.encode(finished_history(folder).since(Position()))

    def update(self, at: Position) -> tuple[bytes, Position, int]:
        """Return a page's update after ``at`` as JSON, its new position, and the number of its new status."""
        now = self.history.position
        key = at, now, self._n_statuses
        if key not in self._encoded:
            while len(self._encoded) >= _KEPT_UPDATES:
                del self._encoded[next(iter(self._encoded))]
            self._encoded[key] = msgspec.json.encode(self.everything(at))
        return self._encoded[key], now, self._n_statuses

    def everything(self, at: Position) -> dict[str, Any]:
        """Return the history after ``at``, and the run's status."""
        return {
            **self.history.since(at),
            "feed": self.name,
            "position": list(self.history.position),
            "status": {**self._status, "now_s": self._now_s()},
        }

    def _now_s(self) -> float | None:
        """Estimate the run's clock from its latest records, in scenario seconds.

        None unless the run is in real time and has not ended.
        """
        if not self._is_real or not self._status["is_live"] or self._status["phase"] != "running":
            return None
        assert self.header is not None
        scaled_s = time.monotonic() * float(self.header["time_scale"])
        ahead_s = self.history.last_at_s - scaled_s
        self._ahead_s = ahead_s if self._ahead_s is None else max(self._ahead_s, ahead_s)
        return scaled_s + self._ahead_s

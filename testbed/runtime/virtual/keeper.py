"""The forwarder's view of shared virtual time: whether all processes are idle, and which one wakes next."""

from __future__ import annotations

import os
import select
import socket

import numpy as np

from testbed.runtime.virtual.page import (
    ABSENT,
    BUSY,
    DEADLINE,
    FIRST_SLOT,
    IDLE,
    SEQUENCE,
    STATE,
    WORDS,
    Page,
)

_MAX_SLOT_BYTES, _N_DESCRIPTORS = 4, 2


class Keeper:
    """A ``netem.forwarder_virtual.TimeKeeper``: moves virtual time. Only one process may use it."""

    def __init__(self, page: Page) -> None:
        self._page = page
        words = np.frombuffer(page.map, dtype=np.int64)[FIRST_SLOT:].reshape(-1, WORDS)
        self._states, self._sequences = words[:, STATE], words[:, SEQUENCE]
        self._deadlines = words[:, DEADLINE]
        self._pollers = select.epoll()
        self._known: dict[int, tuple[int, int]] = {}
        """By slot: the descriptors of a loop's poller, and of the event that wakes it."""
        self._watched: set[int] = set()
        self._roster = -1
        self.descriptors = page.changed, page.told.fileno()
        page.told.setblocking(False)

    def close(self) -> None:
        """Release the page and the descriptors of other processes."""
        for slot in list(self._known):
            self._forget(slot)
        self._pollers.close()
        del self._states, self._sequences, self._deadlines

    @property
    def now_ns(self) -> int:
        return self._page.now_ns

    def quiet(self) -> bytes | None:
        """Return ``None`` while any process is busy; else bytes that differ as soon as one was busy again."""
        if self._states.max() == BUSY:
            return None
        return self._sequences.tobytes()

    def anything_ready(self) -> bool:
        """Whether an idle process has something to read, so that it is about to be busy."""
        if self._page.roster != self._roster:
            self._roster = self._page.roster
            for slot in list(self._known):
                self._look_at(slot)
        return bool(self._pollers.poll(0, 1))

    def learn(self) -> None:
        """Read the announcements of new loops."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self._page.told, _MAX_SLOT_BYTES, _N_DESCRIPTORS)
            except BlockingIOError:
                return
            slot = int.from_bytes(message, "little")
            self._forget(slot)
            poller, wake = descriptors
            self._known[slot] = poller, wake
            self._look_at(slot)

    def _look_at(self, slot: int) -> None:
        state, poller = self._states[slot], self._known[slot][0]
        is_there = state in (IDLE, BUSY)
        if state == ABSENT:
            self._forget(slot)
        elif is_there and slot not in self._watched:
            self._pollers.register(poller, select.EPOLLIN)
            self._watched.add(slot)
        elif not is_there and slot in self._watched:
            self._pollers.unregister(poller)
            self._watched.discard(slot)

    def _forget(self, slot: int) -> None:
        if slot in self._known:
            poller, wake = self._known.pop(slot)
            if slot in self._watched:
                self._pollers.unregister(poller)
                self._watched.discard(slot)
            os.close(poller)
            os.close(wake)

    def next_timer(self) -> tuple[int, int]:
        """Return the earliest deadline in ns and its slot; ``NEVER`` if no process waits for one."""
        slot = int(self._deadlines.argmin())
        return int(self._deadlines[slot]), slot

    def move(self, at_ns: int) -> None:
        """Set the time to ``at_ns``, unless it is later already."""
        if at_ns > self._page.now_ns:
            self._page.now_ns = at_ns

    def wake(self, slot: int) -> None:
        """Wake a process, so that it runs its due timers."""
        self._page.enter(slot, BUSY)
        os.eventfd_write(self._known[slot][1], 1)

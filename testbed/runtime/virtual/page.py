"""Virtual time that processes share: a page of memory with the time, and with the state of every process.

Every process of a run has a slot. When it becomes idle, its loop writes that there, with the instant of its
next timer, and waits in the kernel. The forwarder (``keeper``) moves time when all are idle. A process that
sends another one work over a socket need not write anything: the keeper sees through the kernel that there is
something to read.
"""

from __future__ import annotations

import mmap
import os
import selectors
import socket
from typing import Any

from testbed.runtime.virtual.loop import TimerLoop

ABSENT, STOPPED, IDLE, BUSY = range(4)
"""States of a slot's process."""
NEVER = 2**62
ORCHESTRATOR, LAUNCHER = range(2)
_NOW, _ROSTER = range(2)
FIRST_SLOT = 8
STATE, SEQUENCE, DEADLINE, WORDS = range(4)
_WORD_BYTES = 8


class Page:
    """The shared page. The orchestrator makes it; children inherit its descriptors.

    ``names`` are the names of the slots, in order.
    """

    def __init__(self, names: list[str], descriptors: tuple[int, int, int, int] | None = None) -> None:
        self.names = names
        is_new = descriptors is None
        n_bytes = (FIRST_SLOT + len(names) * WORDS) * _WORD_BYTES
        if descriptors is None:
            memory = os.memfd_create("virtual-time", 0)
            os.ftruncate(memory, n_bytes)
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            told, announce = (end.detach() for end in ends)
            descriptors = memory, os.eventfd(0, os.EFD_NONBLOCK), told, announce
        self.descriptors = descriptors
        self.memory, self.changed, told, announce = descriptors
        """``changed``: an event counter that grows whenever a process stops being busy."""
        self.told, self._announce = socket.socket(fileno=told), socket.socket(fileno=announce)
        self.map = mmap.mmap(self.memory, n_bytes)
        self._words = memoryview(self.map).cast("q")
        if is_new:
            for slot in range(len(names)):
                self._words[self.at(slot) + DEADLINE] = NEVER

    @property
    def now_ns(self) -> int:
        return self._words[_NOW]

    @now_ns.setter
    def now_ns(self, at_ns: int) -> None:
        self._words[_NOW] = at_ns

    @property
    def roster(self) -> int:
        """A counter that grows whenever a process begins, ends, is stopped or continues."""
        return self._words[_ROSTER]

    def at(self, slot: int) -> int:
        return FIRST_SLOT + slot * WORDS

    def state(self, slot: int) -> tuple[int, int]:
        """Return the (state, deadline in ns) of a slot."""
        at = self.at(slot)
        return self._words[at + STATE], self._words[at + DEADLINE]

    def enter(self, slot: int, state: int, deadline_ns: int = NEVER) -> None:
        """Set the state of a slot, and increase its sequence number.

        Called by its process, or by one that acts for it. Only an idle process has a deadline.
        """
        at, words = self.at(slot), self._words
        words[at + DEADLINE] = deadline_ns
        words[at + SEQUENCE] += 1
        words[at + STATE] = state
        if state != BUSY:
            os.eventfd_write(self.changed, 1)

    def place(self, slot: int, state: int, deadline_ns: int = NEVER) -> None:
        """Set the state of a process that begins (``BUSY``), ends, is stopped, or continues as before."""
        self._words[_ROSTER] += 1
        self.enter(slot, state, deadline_ns)

    def announce(self, slot: int, *descriptors: int) -> None:
        """Send the keeper the descriptors of a loop's poller and of the event that wakes it."""
        socket.send_fds(self._announce, [slot.to_bytes(4, "little")], list(descriptors))

    def close(self) -> None:
        """Release this process's descriptors and memory."""
        self._words.release()
        self.map.close()
        self.told.close()
        self._announce.close()
        os.close(self.memory)
        os.close(self.changed)

    def busy(self) -> list[str]:
        """Return the names of the busy processes."""
        return [name for slot, name in enumerate(self.names) if self.state(slot)[0] == BUSY]


class SharedLoop(TimerLoop):
    """The loop of one process.

    When nothing is ready, it writes so to the page, and waits for the keeper or a message.
    """

    def __init__(self, page: Page, slot: int) -> None:
        self._page = page
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        selector = _Selector(self, page, slot, self._wake)
        super().__init__(selector)
        page.enter(slot, BUSY)
        page.announce(slot, selector.fileno(), self._wake)

    @property
    def now_ns(self) -> int:  # type: ignore[override]
        return self._page.now_ns

    def close(self) -> None:
        super().close()
        os.close(self._wake)


class _Selector(selectors.EpollSelector):
    def __init__(self, loop: SharedLoop, page: Page, slot: int, wake: int) -> None:
        super().__init__()
        self._loop, self._page, self._slot, self._wake = loop, page, slot, wake
        self.register(wake, selectors.EVENT_READ)

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0) if timeout is not None and timeout <= 0 else None
        if found is None:
            deadline_ns = self._loop.next_timer_ns()
            found = []
            if deadline_ns is None or deadline_ns > self._page.now_ns:
                self._page.enter(self._slot, IDLE, NEVER if deadline_ns is None else deadline_ns)
                found = super().select(None)
                self._page.enter(self._slot, BUSY)
            self._loop.fire()
        if any(key.fd == self._wake for key, _ in found):
            os.eventfd_read(self._wake)
            found = [entry for entry in found if entry[0].fd != self._wake]
        return found

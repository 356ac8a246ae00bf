"""Virtual time that processes share: who is busy, who has something to read, who wakes next."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

if not hasattr(os, "memfd_create") or not hasattr(select, "epoll"):
    pytest.skip("shared virtual time needs Linux", allow_module_level=True)

from testbed.runtime.virtual.keeper import Keeper
from testbed.runtime.virtual.page import ABSENT, BUSY, IDLE, NEVER, STOPPED, Page, SharedLoop

A, B = 2, 3


class Process:
    """Stands for a process in its slot: what it waits on is ``inbox``, what wakes it ``wake``."""

    def __init__(self, page: Page, slot: int) -> None:
        self.poller = select.epoll()
        self.inbox, self.outside = socket.socketpair()
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.poller.register(self.inbox, select.EPOLLIN)
        page.place(slot, BUSY)
        page.announce(slot, self.poller.fileno(), self.wake)

    def close(self) -> None:
        self.poller.close()
        os.close(self.wake)
        self.inbox.close()
        self.outside.close()


class Rig:
    def __init__(self) -> None:
        self.page = Page(["the orchestrator", "the launcher", "a", "b"])
        self.keeper = Keeper(self.page)
        self.a, self.b = Process(self.page, A), Process(self.page, B)
        self.keeper.learn()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.a.close()
    made.b.close()
    made.keeper.close()
    made.page.close()


def test_nothing_is_quiet_while_anybody_is_busy(rig: Rig) -> None:
    rig.page.enter(A, IDLE)
    assert rig.keeper.quiet() is None
    assert rig.page.busy() == ["b"]
    rig.page.enter(B, IDLE)
    assert rig.keeper.quiet() is not None


def test_a_process_that_was_busy_between_two_checks_is_noticed(rig: Rig) -> None:
    rig.page.enter(A, IDLE)
    rig.page.enter(B, IDLE)
    before = rig.keeper.quiet()
    assert rig.keeper.quiet() == before
    rig.page.enter(B, BUSY)
    rig.page.enter(B, IDLE)
    assert rig.keeper.quiet() not in (None, before)


def test_an_idle_process_with_something_to_read_is_about_to_be_busy(rig: Rig) -> None:
    rig.page.enter(A, IDLE)
    rig.page.enter(B, IDLE)
    assert not rig.keeper.anything_ready()
    rig.b.outside.send(b"a message")
    assert rig.keeper.anything_ready()
    rig.b.inbox.recv(100)
    assert not rig.keeper.anything_ready()


def test_the_process_with_the_earliest_timer_is_woken(rig: Rig) -> None:
    assert rig.keeper.next_timer()[0] == NEVER
    rig.page.enter(A, IDLE, 7_000)
    rig.page.enter(B, IDLE, 5_000)
    assert rig.keeper.next_timer() == (5_000, B)
    rig.keeper.move(5_000)
    rig.keeper.wake(B)
    assert (rig.page.now_ns, rig.page.busy()) == (5_000, ["b"])
    assert os.eventfd_read(rig.b.wake) == 1
    assert rig.keeper.next_timer() == (7_000, A)
    rig.keeper.move(3_000)
    assert rig.page.now_ns == 5_000  # time never goes back


def test_a_stopped_process_holds_nobody_up_and_is_woken_late_when_it_goes_on(rig: Rig) -> None:
    rig.page.enter(A, IDLE)
    rig.page.enter(B, IDLE, 5_000)
    rig.b.outside.send(b"a message")
    was = rig.page.state(B)
    rig.page.place(B, STOPPED)
    assert rig.keeper.quiet() is not None and not rig.keeper.anything_ready()
    assert rig.keeper.next_timer()[0] == NEVER
    rig.keeper.move(9_000)
    rig.page.place(B, *was)
    assert rig.keeper.anything_ready()
    assert rig.keeper.next_timer() == (5_000, B)


def test_a_process_that_is_gone_is_forgotten_and_its_next_life_is_another(rig: Rig) -> None:
    rig.page.enter(A, IDLE)
    rig.b.outside.send(b"a message")
    before = len(os.listdir("/proc/self/fd"))
    rig.page.place(B, ABSENT)
    assert rig.keeper.quiet() is not None and not rig.keeper.anything_ready()
    assert len(os.listdir("/proc/self/fd")) == before - 2
    rig.b.close()
    rig.b = Process(rig.page, B)
    rig.keeper.learn()
    assert rig.keeper.quiet() is None
    rig.page.enter(B, IDLE)
    rig.b.outside.send(b"another")
    assert rig.keeper.anything_ready()


def test_a_loop_says_when_its_next_timer_is_due_and_fires_it_when_time_has_come() -> None:
    page = Page(["the orchestrator", "the launcher", "a"])
    keeper = Keeper(page)
    woken_at_ns: list[int] = []

    def process() -> None:
        with asyncio.Runner(loop_factory=lambda: SharedLoop(page, A)) as runner:
            runner.run(main())
        page.enter(A, ABSENT)

    async def main() -> None:
        for _ in range(3):
            await asyncio.sleep(0.25)
            woken_at_ns.append(page.now_ns)

    page.place(A, BUSY)
    thread = threading.Thread(target=process)
    thread.start()
    idle = select.epoll()
    idle.register(page.changed, select.EPOLLIN | select.EPOLLET)
    instants: list[Any] = []
    while page.state(A)[0] != ABSENT:
        keeper.learn()
        at_ns, slot = keeper.next_timer()
        if keeper.quiet() is None or at_ns == NEVER or not keeper._known:
            idle.poll(0.01)
            continue
        instants.append(at_ns)
        keeper.move(at_ns)
        keeper.wake(slot)
    thread.join()
    assert instants == woken_at_ns == [250_000_000, 500_000_000, 750_000_000]
    idle.close()
    keeper.close()
    page.close()

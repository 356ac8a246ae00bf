"""Executors: who does the tasks of a study. ``local``: worker processes on this machine, which start once and then stay.

Whoever does them, the results are the same; only their order differs.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

from netem.syscalls import set_death_signal
from testbed.errors import RunError
from testbed.runtime.signals import handling

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")

POLL_S = 0.1
"""Ctrl-C is answered within this time."""
MESSAGE_S = 0.1
"""A message to a worker has tasks for about so long, ``MAX_MESSAGE`` at most."""
MAX_MESSAGE = 32
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Executor(Protocol):
    """Does tasks. ``begin(setup)`` is called once in every worker and answers what does a task there.

    ``groups`` are tasks that have something in common which a worker does once: they are kept together where they can be.
    ``n_jobs``: how many workers it has, or had at most.
    """

    n_jobs: int

    def results(
        self,
        begin: Callable[[S], Callable[[T], R]],
        setup: S,
        groups: Sequence[Sequence[T]],
        lost: Callable[[T], R] | None = None,
    ) -> Generator[tuple[T, R], None, None]:
        """Every task with its result, as they come. Leaving early drops what is not done yet.

        A task whose worker dies is given to another one; if that dies, too, its result is ``lost(task)``. Raises
        ``KeyboardInterrupt`` on Ctrl-C and SIGTERM, what a task raised, and ``RunError`` if a worker dies where ``lost`` is not
        given, or before any has answered.
        """
        ...


class Local:
    """``n_jobs`` workers on this machine; one alone is this process itself."""

    def __init__(self, n_jobs: int) -> None:
        self.n_jobs = n_jobs

    def results(
        self,
        begin: Callable[[S], Callable[[T], R]],
        setup: S,
        groups: Sequence[Sequence[T]],
        lost: Callable[[T], R] | None = None,
        more: Callable[[T, R], Sequence[Sequence[T]]] = lambda task, result: (),
    ) -> Generator[tuple[T, R], None, None]:
        """As ``Executor.results``. What this process does itself cannot be lost.

        ``more`` is asked with every result which groups it calls for: they are done by the same workers.
        """
        n_tasks = sum(map(len, groups))
        if self.n_jobs == 1 or n_tasks < 2:
            work, left = begin(setup), deque(groups)
            while left:
                for task in left.popleft():
                    result = work(task)
                    left.extend(more(task, result))
                    yield task, result
            return
        waiting, suspects = Waiting(groups), set[T]()
        has_answered = False

        def new_worker() -> _Worker[T]:
            with _signals_waiting():
                return _Worker(begin, setup, waiting)

        with stop_asked_for() as asked:
            workers = [new_worker() for _ in range(min(self.n_jobs, n_tasks))]
            try:
                busy = {worker.connection: worker for worker in workers if worker.send_next()}
                while busy:
                    for ready in wait(list(busy), POLL_S):
                        assert isinstance(ready, Connection)
                        worker = busy[ready]
                        try:
                            task, result = worker.receive()
                            has_answered = True
                            waiting.add(more(task, result))
                            yield task, result
                        except EOFError:
                            if asked():
                                raise KeyboardInterrupt from None
                            if lost is None or not has_answered:
                                raise RunError(
                                    "a worker process died; run the same command again to go on"
                                ) from None
                            workers.remove(worker)
                            worker.end()
                            del busy[ready]
                            task = worker.expects.popleft()
                            waiting.give_back(worker.left())
                            if task in suspects:
                                result = lost(task)
                                waiting.add(more(task, result))
                                yield task, result
                            else:
                                suspects.add(task)
                                waiting.give_back([task])
                            worker = new_worker()
                            workers.append(worker)
                            busy[worker.connection] = worker
                        if not worker.expects:
                            del busy[worker.connection]
                        for idle in workers:  # what a result called for may be for all of them
                            if not idle.expects and idle.send_next():
                                busy[idle.connection] = idle
                    if asked():
                        raise KeyboardInterrupt
            finally:
                for worker in workers:
                    worker.end()


class Waiting(Generic[T]):
    """Tasks that nobody has begun: a worker gets what is left of its group, then a new one, then part of another's."""

    def __init__(self, groups: Sequence[Sequence[T]]) -> None:
        self._groups = deque(deque(group) for group in groups if group)
        self._given: list[deque[T]] = []

    def add(self, groups: Sequence[Sequence[T]]) -> None:
        """Groups after all others."""
        self._groups.extend(deque(group) for group in groups if group)

    def give_back(self, tasks: Sequence[T]) -> None:
        """Tasks that somebody else has to do, before all others."""
        if tasks:
            self._groups.appendleft(deque(tasks))

    def take(self, own: deque[T], n_most: int) -> tuple[list[T], deque[T]]:
        """At most ``n_most`` tasks, none only if there are none, and the group to go on with."""
        taken: list[T] = []
        while len(taken) < n_most:
            if not own and self._groups:
                own = self._groups.popleft()
                self._given.append(own)
            if not own:
                self._given = [group for group in self._given if group]
                if taken or not self._given:
                    break
                longest = max(self._given, key=len)
                own = deque(longest.pop() for _ in range((len(longest) + 1) // 2))
                own.reverse()
                self._given.append(own)
            taken.append(own.popleft())
        return taken, own


class _Worker(Generic[T]):
    """A process, and what is expected of it. It gets tasks when it has none left, so that neither side can block the other."""

    def __init__(self, begin: Any, setup: Any, waiting: Waiting[T]) -> None:
        # Not forked: a progress bar has a thread.
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(begin, setup, theirs, os.getpid()), daemon=True)
        self._process.start()
        theirs.close()
        self._waiting = waiting
        self._own: deque[T] = deque()
        self._n_most = 1
        self._sent_at_s = 0.0
        self._n_sent = 0
        self.expects: deque[T] = deque()

    def send_next(self) -> bool:
        """Send tasks; false if there are none. The more there are in a message, the shorter they took so far."""
        if self._n_sent:
            took_s = (time.monotonic() - self._sent_at_s) / self._n_sent
            self._n_most = max(1, min(2 * self._n_most, MAX_MESSAGE, int(MESSAGE_S / max(took_s, 1e-9))))
        tasks, self._own = self._waiting.take(self._own, self._n_most)
        if not tasks:
            return False
        self._n_sent, self._sent_at_s = len(tasks), time.monotonic()
        self.expects.extend(tasks)
        with suppress(BrokenPipeError):  # it has died, as ``receive`` will say
            self.connection.send(tasks)
        return True

    def receive(self) -> tuple[T, Any]:
        """The next task and its result. Raises what the task raised; ``EOFError`` if the process has died."""
        try:
            is_done, result = self.connection.recv()
        except ConnectionResetError:
            raise EOFError from None
        if not is_done:
            raise result
        return self.expects.popleft(), result

    def left(self) -> list[T]:
        """What it was to do and has not done: nobody else has it."""
        tasks = [*self.expects, *self._own]
        self._own.clear()
        return tasks

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.connection.close()


def _serve(begin: Callable[[Any], Callable[[Any], Any]], setup: Any, parent: Connection, pid: int) -> None:
    """A worker: tasks come over ``parent``, and every result goes back as soon as it is there."""
    set_death_signal(signal.SIGKILL)
    if os.getppid() != pid:  # it died before the death signal was set
        os.kill(os.getpid(), signal.SIGKILL)
    os.setpgid(0, 0)  # Ctrl-C in a terminal is for the parent, even while a run answers signals itself
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    work = begin(setup)
    while True:
        for task in parent.recv():
            try:
                answer = True, work(task)
            except Exception as error:  # raised again where the results are wanted
                answer = False, error
            parent.send(answer)


@contextmanager
def stop_asked_for() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or SIGTERM came while the body ran: raised anywhere, they could cut a message."""
    came: list[int] = []
    with handling(lambda number, _: came.append(number), *_STOPS):
        yield lambda: bool(came)


@contextmanager
def _signals_waiting() -> Iterator[None]:
    """Ctrl-C and SIGTERM are answered after the body; a worker begun in it has them held back until it ignores them."""
    resource_tracker.ensure_running()  # begun with a worker, it would let them through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt`` in the body, once: whoever sends it often sends it twice."""

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    with handling(stop, signal.SIGTERM):
        yield


def n_cpus() -> int:
    """How many workers this process may well have."""
    return len(os.sched_getaffinity(0))

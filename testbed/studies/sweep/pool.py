"""Executors, which do the tasks of a study. ``local`` uses worker processes on this machine; each starts only
once.

The results do not depend on the executor; only their order does.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import cloudpickle

from netem.syscalls import set_death_signal
from testbed.errors import RunError, UserError
from testbed.experiments.provenance import n_cpus
from testbed.garbage import collect_seldom
from testbed.rundir import remove_scratch_of
from testbed.runtime.signals import handling, held_back, let_through
from testbed.terminal import warn_once

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")

POLL_S = 0.1
"""Ctrl-C takes effect within this time."""
MESSAGE_S = 0.1
"""Target duration of the tasks in one message to a worker; a message has at most ``MAX_MESSAGE`` tasks."""
MAX_MESSAGE = 32
_STOPS = (signal.SIGINT, signal.SIGTERM)


class Executor(Protocol):
    """Does tasks in workers. ``n_jobs``: how many workers it has, or the most that it had at once.

    ``begin(setup)`` is called once in every worker; it returns the function that does a task there.
    ``groups``: tasks of one group share work, for example the placement; if possible, one worker does them
    all.
    """

    n_jobs: int

    def results(
        self,
        begin: Callable[[S], Callable[[T], R]],
        setup: S,
        groups: Sequence[Sequence[T]],
        lost: Callable[[T], R] | None = None,
    ) -> Generator[tuple[T, R], None, None]:
        """Yields (task, result) in the order in which tasks are done. Closing the generator cancels all other
        tasks.

        A task whose worker dies is done again by another worker; if that one dies, too, the result is
        ``lost(task)``. Raises ``KeyboardInterrupt`` on Ctrl-C and SIGTERM, any exception of a task, and
        ``RunError`` if a worker dies and ``lost`` is None, or before any worker has finished a task.
        """
        ...


class Local:
    """The executor with ``n_jobs`` worker processes on this machine; with one job this process does the tasks
    itself, unless ``is_apart``.
    """

    def __init__(self, n_jobs: int, *, is_apart: bool = False) -> None:
        self.n_jobs = n_jobs
        self._is_apart = is_apart

    def results(
        self,
        begin: Callable[[S], Callable[[T], R]],
        setup: S,
        groups: Sequence[Sequence[T]],
        lost: Callable[[T], R] | None = None,
        more: Callable[[T, R], Sequence[Sequence[T]]] = lambda task, result: (),
    ) -> Generator[tuple[T, R], None, None]:
        """As ``Executor.results``.

        ``more`` is called with each task and its result, and returns further groups of tasks, which the same
        workers do.
        """
        n_tasks = sum(map(len, groups))
        if (self.n_jobs == 1 or n_tasks < 2) and not self._is_apart:
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
            with held_back():  # a worker inherits it, until it ignores them
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
                            if lost is None or not (has_answered or self._is_apart):
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
                        for idle in workers:  # ``more`` may have added tasks for idle workers, too
                            if not idle.expects and idle.send_next():
                                busy[idle.connection] = idle
                    if asked():
                        raise KeyboardInterrupt
            finally:
                for worker in workers:
                    worker.end()


class Waiting(Generic[T]):
    """The tasks that were not sent to a worker yet.

    A worker gets the rest of its own group first, then a new group, then half of the longest rest of another
    worker.
    """

    def __init__(self, groups: Sequence[Sequence[T]]) -> None:
        self._groups = deque(deque(group) for group in groups if group)
        self._given: list[deque[T]] = []

    def add(self, groups: Sequence[Sequence[T]]) -> None:
        """Add groups behind all others."""
        self._groups.extend(deque(group) for group in groups if group)

    def give_back(self, tasks: Sequence[T]) -> None:
        """Return tasks of a lost worker: they are done before all others."""
        if tasks:
            self._groups.appendleft(deque(tasks))

    def take(self, own: deque[T], n_most: int) -> tuple[list[T], deque[T]]:
        """Returns 1 to ``n_most`` tasks, none only if none is left, and the group to pass as ``own`` the next
        time.
        """
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
    """A worker process, and the tasks that it was sent and has not done (``expects``).

    It is sent tasks only when it has none left, so that neither side blocks the other while both write.
    """

    def __init__(self, begin: Any, setup: Any, waiting: Waiting[T]) -> None:
        # A new interpreter, and not a fork, since this process may have other threads; and not one of
        # ``multiprocessing``, which would run a user's script again.
        self.connection, theirs = Pipe()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BEGIN, str(number), str(os.getpid()), _as_here()],
                pass_fds=[number],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C in a terminal must reach this process alone
            )
        with suppress(BrokenPipeError):  # it has died; ``receive`` raises EOFError
            self.connection.send_bytes(cloudpickle.dumps((begin, setup)))
        self._waiting = waiting
        self._own: deque[T] = deque()
        self._n_most = 1
        self._sent_at_s = 0.0
        self._n_sent = 0
        self.expects: deque[T] = deque()

    def send_next(self) -> bool:
        """Send the worker tasks. Returns False if none is left. The shorter the last tasks took, the more are
        sent.
        """
        if self._n_sent:
            took_s = (time.monotonic() - self._sent_at_s) / self._n_sent
            self._n_most = max(1, min(2 * self._n_most, MAX_MESSAGE, int(MESSAGE_S / max(took_s, 1e-9))))
        tasks, self._own = self._waiting.take(self._own, self._n_most)
        if not tasks:
            return False
        self._n_sent, self._sent_at_s = len(tasks), time.monotonic()
        self.expects.extend(tasks)
        with suppress(BrokenPipeError):  # it has died; ``receive`` raises EOFError
            self.connection.send(tasks)
        return True

    def receive(self) -> tuple[T, Any]:
        """Returns the next task and its result. Raises the task's exception; ``EOFError`` if the process has
        died.
        """
        try:
            is_done, result = self.connection.recv()
        except ConnectionResetError:
            raise EOFError from None
        if not is_done:
            raise result
        return self.expects.popleft(), result

    def left(self) -> list[T]:
        """Returns the tasks that it was sent or that were reserved for it and that it has not done."""
        tasks = [*self.expects, *self._own]
        self._own.clear()
        return tasks

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self.connection.close()
        remove_scratch_of(self._process.pid)


_BEGIN = (
    "import json, sys; here = json.loads(sys.argv[3]); sys.path[:] = here['path']; "
    "from testbed.studies.sweep.pool import serve; serve(int(sys.argv[1]), int(sys.argv[2]), here['argv'])"
)


def _as_here() -> str:
    """Returns what a worker has of this process: where it finds modules, and the command that it belongs to."""
    return json.dumps({"path": sys.path, "argv": sys.argv})


def serve(descriptor: int, parent_pid: int, argv: Sequence[str]) -> None:
    """Main function of a worker: receives tasks over the pipe ``descriptor``, and sends each result back at once."""
    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the death signal was set
        os.kill(os.getpid(), signal.SIGKILL)
    # A run handles signals itself for a while; all else is the parent's.
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    let_through()
    sys.argv[:] = argv
    warn_once()
    collect_seldom()
    parent = Connection(descriptor)
    with suppress(EOFError):
        begin, setup = cloudpickle.loads(parent.recv_bytes())
        work = begin(setup)
        while True:
            for task in parent.recv():
                try:
                    answer = True, work(task)
                except Exception as error:  # raised again in the parent
                    answer = False, error
                with suppress(OSError):  # what a policy prints must not be lost when the process is killed
                    sys.stdout.flush()
                parent.send(answer)


_DRAWN = re.compile(rb"[0-9a-f]{32}|ipykernel_[0-9]+")
"""What differs from process to process in a pickle of the same class: its drawn id, and the kernel's number."""


def digest_of(value: object) -> str:
    """Returns a SHA-256 (hex) of an object and of the code of its class, as far as a worker would get it.

    Raises what pickling raises.
    """
    kind = value if isinstance(value, type) else type(value)
    digest = hashlib.sha256(_DRAWN.sub(b"", cloudpickle.dumps(value)))
    # A class of the main program is in there itself; of a module there is only the name.
    file = (
        None if kind.__module__ == "__main__" else getattr(sys.modules.get(kind.__module__), "__file__", None)
    )
    if file is not None and Path(file).is_file():
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def n_workers(jobs: int | None) -> int:
    """Returns how many workers ``--jobs`` asks for; None: one per CPU. Raises ``UserError`` if it is less than 1."""
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs must be at least 1, not {jobs}")
    return n_cpus() if jobs is None else jobs


@contextmanager
def stop_asked_for() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns whether Ctrl-C or SIGTERM arrived while the body ran.

    They raise nothing themselves: an exception at any place could cut a message short.
    """
    came: list[int] = []
    with handling(lambda number, _: came.append(number), *_STOPS):
        yield lambda: bool(came)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises ``KeyboardInterrupt`` in the body; a second SIGTERM, which is often sent, too, is
    ignored.
    """

    def stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    with handling(stop, signal.SIGTERM):
        yield

"""Executor ``ray``: the workers are actors of a Ray cluster, one per CPU. Needs the extra ``[ray]``.

One call to an actor does many tasks. A lost worker is replaced if the cluster has a CPU for a new one, and
its unfinished tasks go to other workers. Nodes that join the cluster later are used, too.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayError, RayTaskError

from testbed.cluster import answers, check_version, connected, other_version
from testbed.codeversion import code_version
from testbed.errors import RunError, TestbedError, UserError
from testbed.studies.sweep.pool import POLL_S, Waiting, stop_asked_for

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")

CALL_S = 1.0
"""Target duration of a call: it has as many tasks as take about so long, but at most ``MAX_CALL``.

With more than ``MAX_CALLS_PER_S`` workers calls are longer.
"""
MAX_CALLS_PER_S = 100
"""Limit on the calls of all workers together: each costs this process one to three milliseconds."""
MAX_CALL = 1000
"""The most tasks of one call."""
AHEAD_S = 2.0
"""A worker whose calls are shorter than this has a second one queued, so that it never waits for this
process.
"""
LOOK_S = 1.0
"""How often the cluster is asked for its number of CPUs."""
HEAD_S = 10.0
"""The cluster's head counts as lost after so long without a reply."""
SILENCE_S = 30.0
"""After so long without any worker the command prints what it waits for."""
MAX_FAILED_STARTS = 3
_BY_PROCESS, _BY_MACHINE, _GIVEN_UP = 3, 2, 6
"""Points of suspicion that a task gets when its worker's process dies, or when its worker is lost in another
way, for example with its machine. A task with ``_GIVEN_UP`` points is given up: its process died twice, or its
worker was lost three times.
"""


class OnRay:
    """The executor: at most ``n_most`` workers, by default as many as the cluster has CPUs.

    The cluster is the one at ``RAY_ADDRESS``, or else the one that was started on this machine.
    """

    def __init__(self, n_most: int | None = None) -> None:
        self._n_most = n_most
        self.n_jobs = 0

    def results(
        self,
        begin: Callable[[S], Callable[[T], R]],
        setup: S,
        groups: Sequence[Sequence[T]],
        lost: Callable[[T], R] | None = None,
    ) -> Generator[tuple[T, R], None, None]:
        """As ``Executor.results``. Raises ``UserError`` if there is no cluster, or if its machines have
        another version of the testbed; ``RunError`` if the cluster's head is lost.
        """
        with connected() as address, stop_asked_for() as asked:
            crew = _Crew(begin, setup, groups, lost, self._n_most, address)
            try:
                while crew.n_left:
                    yield from crew.step()
                    self.n_jobs = max(self.n_jobs, crew.n_workers)
                    if asked():
                        raise KeyboardInterrupt
            finally:
                crew.end()


class _Actor:
    """The part that runs in a worker process.

    ``about`` is called first: another version of the testbed may not understand the other calls.
    """

    def __init__(self) -> None:
        self._work: Callable[[Any], Any] | None = None

    def about(self) -> tuple[str, str]:
        """Returns the testbed's version on this machine, and the machine's address."""
        return code_version(), ray.util.get_node_ip_address()

    def begin(self, begin: Callable[[Any], Callable[[Any], Any]], setup: Any, folder: str) -> None:
        with suppress(OSError):  # another machine may lack the folder; only relative paths need it
            os.chdir(folder)
        self._work = begin(setup)

    def work(self, tasks: Sequence[Any]) -> tuple[float, list[Any], Exception | None]:
        """Do tasks until one raises. Returns the real seconds, the results in order, and the exception, or
        None.
        """
        assert self._work is not None, "a worker begins before it works"
        began_at_s = time.monotonic()
        results: list[Any] = []
        try:
            for task in tasks:
                results.append(self._work(task))
        except Exception as error:  # raised again in the main process
            return time.monotonic() - began_at_s, results, error
        return time.monotonic() - began_at_s, results, None


class _Call(NamedTuple):
    """A call to an actor: its pending result, and the tasks that it does (none for ``about`` and ``begin``)."""

    ref: Any
    tasks: list[Any]


class _Worker:
    """An actor and its pending calls, the oldest first.

    ``own``: the tasks that are reserved for it. ``task_s``: mean seconds per task in its last call; None
    before that.
    """

    def __init__(self) -> None:
        self.actor = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor).remote()
        self.calls = deque([_Call(self.actor.about.remote(), [])])
        self.has_answered = False
        self.is_ready = False
        self.own: deque[Any] = deque()
        self.task_s: float | None = None
        self._n_most = 1

    def n_next(self, n_share: int, call_s: float) -> int:
        """Returns how many tasks its next call may have: as many as take about ``call_s`` seconds, at most
        ``n_share``.
        """
        if self.task_s is not None:
            n_in_time = int(call_s / max(self.task_s, 1e-9))
            self._n_most = max(1, min(2 * self._n_most, MAX_CALL, n_in_time))
        return max(1, min(self._n_most, n_share))

    @property
    def n_ahead(self) -> int:
        """How many calls it may have pending."""
        return 2 if self.task_s is not None and self.task_s * self._n_most < AHEAD_S else 1


class _Crew(Generic[T, R]):
    """All workers, and the tasks that are left."""

    def __init__(
        self,
        begin: Callable[[Any], Callable[[T], R]],
        setup: Any,
        groups: Sequence[Sequence[T]],
        lost: Callable[[T], R] | None,
        n_most: int | None,
        address: str,
    ) -> None:
        self._begin, self._lost, self._n_most, self._address = begin, lost, n_most, address
        self._setup = ray.put(setup)
        self._folder = str(Path.cwd())
        self._waiting = Waiting(groups)
        self._suspects: deque[T] = deque()
        self._blame: Counter[T] = Counter()
        self._workers: list[_Worker] = []
        self._n_failed_starts = 0
        self._look_at_s = time.monotonic()
        self._silent_at_s: float | None = None
        self._warn_at_s: float | None = self._look_at_s + SILENCE_S
        self.n_left = sum(map(len, groups))

    @property
    def n_workers(self) -> int:
        return sum(worker.is_ready for worker in self._workers)

    def step(self) -> Iterator[tuple[T, R]]:
        """Send calls to workers, wait at most ``POLL_S`` for results, and yield those that have arrived."""
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_S
            if self._head_answers():
                self._fill_up()
        for worker in self._workers:
            while worker.is_ready and len(worker.calls) < worker.n_ahead and self._send_next(worker):
                pass
        first = {worker.calls[0].ref: worker for worker in self._workers if worker.calls}
        # The first call waits until one result has arrived, the second one collects all that have.
        if first and ray.wait(list(first), num_returns=1, timeout=POLL_S)[0]:
            for ref in ray.wait(list(first), num_returns=len(first), timeout=0)[0]:
                yield from self._take(first[ref])
        elif not first:
            time.sleep(POLL_S)

    def end(self) -> None:
        for worker in self._workers:
            ray.kill(worker.actor)

    def _head_answers(self) -> bool:
        """Whether the cluster's head replies. Raises ``RunError`` if it has not for ``HEAD_S``.

        It is checked before Ray is called: without a head, Ray's calls block for a minute and then end this
        process.
        """
        if answers(self._address, LOOK_S):
            self._silent_at_s = None
            return True
        if self._silent_at_s is None:
            self._silent_at_s = time.monotonic()
        if time.monotonic() >= self._silent_at_s + HEAD_S:
            raise RunError(
                f"the head of the Ray cluster at {self._address} has not answered for {HEAD_S:g} s: "
                "start a new cluster, and run the same command to go on"
            )
        return False

    def _fill_up(self) -> None:
        """Start workers: one per CPU of the cluster, at most ``n_most``, and at most one per task that is
        left.

        Raises ``RunError`` if the cluster has no CPU. Prints a warning if no worker has begun within
        ``SILENCE_S``.
        """
        n_cpus = int(ray.cluster_resources().get("CPU", 0))
        if not n_cpus and not any(worker.is_ready for worker in self._workers):
            raise RunError(
                "no node of the Ray cluster has a CPU: add one with `ray start --address=…`, "
                "and run the same command to go on"
            )
        n_wanted = min(n_cpus, self.n_left, *([self._n_most] if self._n_most else []))
        self._workers += [_Worker() for _ in range(n_wanted - len(self._workers))]
        if self._warn_at_s is not None and time.monotonic() >= self._warn_at_s:
            self._warn_at_s = None
            print(
                f"no worker of the Ray cluster has begun in {SILENCE_S:g} s: `ray status` shows what uses "
                "its CPUs",
                file=sys.stderr,
            )

    def _send_next(self, worker: _Worker) -> bool:
        """Send the worker its next call. Returns False if no task is left.

        A task whose worker was lost is sent alone: if its worker is lost again, that task alone is suspected.
        """
        if self._suspects:
            tasks = [self._suspects.popleft()]
        else:
            n_share = self.n_left // (4 * len(self._workers))
            call_s = max(CALL_S, len(self._workers) / MAX_CALLS_PER_S)
            tasks, worker.own = self._waiting.take(worker.own, worker.n_next(n_share, call_s))
        if tasks:
            worker.calls.append(_Call(worker.actor.work.remote(tasks), tasks))
        return bool(tasks)

    def _take(self, worker: _Worker) -> Iterator[tuple[T, R]]:
        """Handle the result of the worker's oldest call, and yield the results of its tasks."""
        call = worker.calls.popleft()
        try:
            answer = ray.get(call.ref)
        except RayTaskError as error:
            raise _not_begun(error) from None
        except RayError as error:
            yield from self._lose(worker, call, error)
            return
        if not worker.has_answered:
            check_version(*answer)
            worker.has_answered = True
            begun = worker.actor.begin.remote(self._begin, self._setup, self._folder)
            worker.calls.append(_Call(begun, []))
        elif not worker.is_ready:
            worker.is_ready = True
            self._n_failed_starts, self._warn_at_s = 0, None
        else:
            took_s, results, raised = answer
            worker.task_s = took_s / len(call.tasks)
            for task, result in zip(call.tasks, results, strict=False):
                self.n_left -= 1
                yield task, result
            if raised is not None:
                raise raised

    def _lose(self, worker: _Worker, call: _Call, error: RayError) -> Iterator[tuple[T, R]]:
        """Handle the loss of a worker during ``call``: retry that call's tasks one by one, and requeue its
        other tasks.

        Yields the substitute results of tasks that are given up. Raises ``RunError`` if too many workers in a
        row died before they had begun, or if lost workers are not allowed.
        """
        self._workers.remove(worker)
        ray.kill(worker.actor)
        if getattr(error, "actor_init_failed", False):
            raise _not_begun(error)
        if not worker.is_ready:
            self._n_failed_starts += 1
            if self._n_failed_starts == MAX_FAILED_STARTS:
                raise RunError(f"{MAX_FAILED_STARTS} workers in a row died before they had begun")
            return
        if self._lost is None:
            raise RunError("a worker process died; run the same command again to go on")
        self._waiting.give_back([task for later in worker.calls for task in later.tasks])
        self._waiting.give_back(list(worker.own))
        worker.own.clear()
        for task in call.tasks:
            self._blame[task] += _BY_PROCESS if isinstance(error, ActorDiedError) else _BY_MACHINE
            if self._blame[task] < _GIVEN_UP:
                self._suspects.append(task)
            else:
                self.n_left -= 1
                yield task, self._lost(task)


def _not_begun(error: RayError) -> TestbedError:
    """Returns the error to raise for a worker that failed before it could do a task."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, TestbedError):
        return cause
    return UserError(other_version(str(cause or error).strip().rpartition("\n")[2]))

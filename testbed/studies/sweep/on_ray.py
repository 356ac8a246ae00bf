"""Executor ``ray``: the workers are actors of a Ray cluster, one per CPU. Needs the extra ``[ray]``.

A call to an actor does many tasks. Workers that are lost are replaced as far as the cluster has CPUs, and what they had not
answered goes to others; nodes that join are used.
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
"""A call has tasks for about so long, ``MAX_CALL`` at most; for longer where workers are more than ``MAX_CALLS_PER_S``."""
MAX_CALLS_PER_S = 100
"""A call costs this process one to three milliseconds."""
MAX_CALL = 1000
AHEAD_S = 2.0
"""A worker whose calls are shorter has a second one waiting, so that it never waits for this process."""
LOOK_S = 1.0
"""How often the cluster is asked for its CPUs."""
HEAD_S = 10.0
"""A head that has not answered for this time is lost."""
SILENCE_S = 30.0
"""After so long without any worker the command says what it waits for."""
MAX_FAILED_STARTS = 3
_BY_PROCESS, _BY_MACHINE, _GIVEN_UP = 3, 2, 6
"""A task is given up when its process died twice, or the machine was lost three times."""


class OnRay:
    """At most ``n_most`` workers, by default as many as the cluster has CPUs.

    The cluster is that of ``RAY_ADDRESS``, or the one that was started on this machine.
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
        """As ``Executor.results``. Raises ``UserError`` if there is no cluster, or another version on its machines."""
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
    """What lives in a worker process. ``about`` is asked first: other versions may not understand the rest."""

    def __init__(self) -> None:
        self._work: Callable[[Any], Any] | None = None

    def about(self) -> tuple[str, str]:
        """The version that runs here, and the machine's address."""
        return code_version(), ray.util.get_node_ip_address()

    def begin(self, begin: Callable[[Any], Callable[[Any], Any]], setup: Any, folder: str) -> None:
        with suppress(OSError):  # another machine need not have it: then only relative paths are not found
            os.chdir(folder)
        self._work = begin(setup)

    def work(self, tasks: Sequence[Any]) -> tuple[float, list[Any], Exception | None]:
        """Seconds that it took, the results in order, and what the task after the last of them raised."""
        assert self._work is not None, "a worker begins before it works"
        began_at_s = time.monotonic()
        results: list[Any] = []
        try:
            for task in tasks:
                results.append(self._work(task))
        except Exception as error:  # raised again where the results are wanted
            return time.monotonic() - began_at_s, results, error
        return time.monotonic() - began_at_s, results, None


class _Call(NamedTuple):
    """Tasks that a worker does with one call; none: it begins."""

    ref: Any
    tasks: list[Any]


class _Worker:
    """An actor, and what is expected of it, in order."""

    def __init__(self) -> None:
        self.actor = ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0)(_Actor).remote()
        self.calls = deque([_Call(self.actor.about.remote(), [])])
        self.has_answered = False
        self.is_ready = False
        self.own: deque[Any] = deque()
        self.task_s: float | None = None
        self._n_most = 1

    def n_next(self, n_share: int, call_s: float) -> int:
        """How many tasks its next call, of about ``call_s`` seconds, may have, not more than its share of what is left."""
        if self.task_s is not None:
            n_in_time = int(call_s / max(self.task_s, 1e-9))
            self._n_most = max(1, min(2 * self._n_most, MAX_CALL, n_in_time))
        return max(1, min(self._n_most, n_share))

    @property
    def n_ahead(self) -> int:
        """How many calls it may have."""
        return 2 if self.task_s is not None and self.task_s * self._n_most < AHEAD_S else 1


class _Crew(Generic[T, R]):
    """The workers that there are and the tasks that are left."""

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
        self._says_at_s: float | None = self._look_at_s + SILENCE_S
        self.n_left = sum(map(len, groups))

    @property
    def n_workers(self) -> int:
        return sum(worker.is_ready for worker in self._workers)

    def step(self) -> Iterator[tuple[T, R]]:
        """Give out calls, wait at most ``POLL_S``, and answer what has come."""
        if time.monotonic() >= self._look_at_s:
            self._look_at_s = time.monotonic() + LOOK_S
            if self._head_answers():
                self._fill_up()
        for worker in self._workers:
            while worker.is_ready and len(worker.calls) < worker.n_ahead and self._send_next(worker):
                pass
        first = {worker.calls[0].ref: worker for worker in self._workers if worker.calls}
        # One that is there ends the waiting; then all that are there are taken at once.
        if first and ray.wait(list(first), num_returns=1, timeout=POLL_S)[0]:
            for ref in ray.wait(list(first), num_returns=len(first), timeout=0)[0]:
                yield from self._take(first[ref])
        elif not first:
            time.sleep(POLL_S)

    def end(self) -> None:
        for worker in self._workers:
            ray.kill(worker.actor)

    def _head_answers(self) -> bool:
        """Asked before Ray is, whose answer would take a minute and then end this process. Raises ``RunError`` if it is lost."""
        if answers(self._address, LOOK_S):
            self._silent_at_s = None
            return True
        if self._silent_at_s is None:
            self._silent_at_s = time.monotonic()
        if time.monotonic() >= self._silent_at_s + HEAD_S:
            raise RunError(
                f"the head of the Ray cluster at {self._address} has not answered for {HEAD_S:g} s: begin a cluster anew, and run the "
                "same command to go on"
            )
        return False

    def _fill_up(self) -> None:
        """As many workers as there are CPUs, but no more than asked for and than there are tasks."""
        n_cpus = int(ray.cluster_resources().get("CPU", 0))
        if not n_cpus and not any(worker.is_ready for worker in self._workers):
            raise RunError(
                "no node of the Ray cluster has a CPU: add one with `ray start --address=…`, and run the same command to go on"
            )
        n_wanted = min(n_cpus, self.n_left, *([self._n_most] if self._n_most else []))
        self._workers += [_Worker() for _ in range(n_wanted - len(self._workers))]
        if self._says_at_s is not None and time.monotonic() >= self._says_at_s:
            self._says_at_s = None
            print(
                f"no worker of the Ray cluster has begun in {SILENCE_S:g} s: `ray status` says who uses its CPUs",
                file=sys.stderr,
            )

    def _send_next(self, worker: _Worker) -> bool:
        """A task that its worker did not survive goes alone, so that it alone is suspected."""
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
        """What the worker's oldest call came to."""
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
            self._n_failed_starts, self._says_at_s = 0, None
        else:
            took_s, results, raised = answer
            worker.task_s = took_s / len(call.tasks)
            for task, result in zip(call.tasks, results, strict=False):
                self.n_left -= 1
                yield task, result
            if raised is not None:
                raise raised

    def _lose(self, worker: _Worker, call: _Call, error: RayError) -> Iterator[tuple[T, R]]:
        """The worker is lost while it did ``call``: its tasks are suspects, what it had not begun is not."""
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
    """What is to be said of a worker that raised something before it could work."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, TestbedError):
        return cause
    return UserError(other_version(str(cause or error).strip().rpartition("\n")[2]))

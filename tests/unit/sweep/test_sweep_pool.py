from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable

import pytest

from testbed.errors import RunError, UserError
from testbed.studies.sweep.pool import Local, Waiting
from tests.support.mortal import mortal


def squares(offset: int) -> Callable[[int], tuple[int, int]]:
    return lambda task: (task * task + offset, os.getpid())


def picky(_: None) -> Callable[[int], int]:
    def work(task: int) -> int:
        if task == 3:
            raise UserError("not that one")
        return task

    return work


def test_every_task_comes_back_once_with_its_result() -> None:
    groups = [list(range(i, i + 7)) for i in range(0, 70, 7)]
    for jobs in (1, 2):
        found = list(Local(jobs).results(squares, 5, groups))
        assert sorted((task, value) for task, (value, _) in found) == [(i, i * i + 5) for i in range(70)]
        assert (os.getpid() in {pid for _, (_, pid) in found}) == (jobs == 1)


def test_what_a_task_raises_is_raised_where_results_are_wanted() -> None:
    for jobs in (1, 2):
        with pytest.raises(UserError, match="not that one"):
            list(Local(jobs).results(picky, None, [[1, 2, 3, 4]]))


def test_a_task_that_ends_its_worker_twice_is_lost_and_all_others_are_done() -> None:
    found = dict(Local(2).results(mortal, None, [[0, 1, 2, 3, 4, 5], list(range(6, 60))], lambda task: -task))
    assert found == {task: -3 if task == 3 else task for task in range(60)}


def test_a_worker_that_dies_before_any_answer_is_no_task_s_fault() -> None:
    with pytest.raises(RunError, match="a worker process died"):
        list(Local(2).results(mortal, None, [[3], [3]], lambda task: -task))


def test_a_worker_that_dies_is_said() -> None:
    with pytest.raises(RunError, match="a worker process died; run the same command again to go on"):
        list(Local(2).results(mortal, None, [[1, 2, 3, 4, 5, 6]]))


def test_a_stop_that_is_asked_for_ends_the_workers() -> None:
    found = Local(2).results(squares, 0, [list(range(100_000))])
    _, (_, worker) = next(found)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        list(found)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_a_worker_keeps_its_group_takes_new_ones_then_shares_the_longest() -> None:
    waiting = Waiting([[1, 2, 3, 4, 5, 6], [7, 8]])
    first, mine = waiting.take(deque(), 2)
    second, other = waiting.take(deque(), 2)
    assert (first, second) == ([1, 2], [7, 8])
    shared, other = waiting.take(other, 4)
    assert shared == [5, 6]
    assert waiting.take(mine, 4)[0] == [3, 4]
    assert waiting.take(other, 4)[0] == []

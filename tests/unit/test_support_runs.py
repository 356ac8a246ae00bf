"""The helpers for tests of whole runs."""

from __future__ import annotations

import os

import pytest

from tests.support import runs
from tests.support.runs import _is_of_another_worker


def test_processes_of_tests_that_run_beside_this_one_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    own, controller = os.getpid(), os.getppid()
    mine, other, others, orphan = -1, -2, -3, -4
    parents = {own: controller, controller: 1, 1: 0, mine: own, other: controller, others: other, orphan: 1}
    shared, forker, forked, others_forker, others_forked = -5, -6, -7, -8, -9
    parents |= {shared: controller, forker: shared, forked: forker, others_forker: shared}
    parents[others_forked] = others_forker
    monkeypatch.setattr(runs, "forker_pid", lambda: forker)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    found = {pid for pid in parents if _is_of_another_worker(pid, parents)}
    assert found == {other, others, shared, others_forker, others_forked}
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert not any(_is_of_another_worker(pid, parents) for pid in parents)

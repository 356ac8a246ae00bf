"""The order of all tests; how many examples Hypothesis draws; and what tests themselves begin, which is forked."""

from __future__ import annotations

import gc
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings

from testbed.garbage import collect_seldom
from tests.support.effort import register_profiles
from tests.support.forked import fork_python, share

# Here, not in a folder's conftest: --hypothesis-profile is read between the two.
register_profiles()
settings.load_profile("testbed")

FOLDER = Path(__file__).parent
WAITING = ("vm", "system", "browser", "contract")
"""Folders whose tests mostly wait, for processes and for real time."""


def pytest_configure(config: pytest.Config) -> None:
    """Have workers share what they fork commands from."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        share()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files whose tests wait among those whose tests compute: while some workers wait, others compute.

    All that wait have begun a while before the end, so that no worker is left alone with one.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    is_waiting = {path: path.relative_to(FOLDER).parts[0] in WAITING for path in files}
    n_of = {kind: sum(waits is kind for waits in is_waiting.values()) for kind in (True, False)}
    n_before = {True: 0, False: 0}
    place: dict[Path, float] = {}
    for path, waits in is_waiting.items():
        place[path] = (0.8 if waits else 1.0) * n_before[waits] / n_of[waits]
        n_before[waits] += 1
    items[:] = [item for path in sorted(files, key=place.__getitem__) for item in files[path]]


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of garbage collections, which are as rare as in commands.

    It lives to the end, and is most of all objects.
    """
    gc.collect()
    gc.freeze()
    collect_seldom()


@pytest.fixture(autouse=True)
def forked_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers and launchers that a test itself begins are forks: what new ones import takes longer than most of their work."""
    from testbed.runtime.real import handle
    from testbed.studies.sweep import pool

    for module in (handle, pool):
        begun_by = SimpleNamespace(
            Popen=fork_python, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
        )
        monkeypatch.setattr(module, "subprocess", begun_by)

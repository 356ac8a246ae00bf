"""Which code this is: what a stored result depends on, and what the machines of one run must have in common."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.resources.abc import Traversable

_RULES = (
    *("policies", "nodes", "testbed.scenario", "testbed.control", "testbed.fast", "testbed.simulate"),
    *("testbed.results", "testbed.runtime"),
)
"""Packages whose code says what a run comes to."""


@cache
def rules_digest() -> str:
    """Fingerprint of the code that says what a run comes to, and what is measured of it."""
    digest = hashlib.sha256((resources.files("testbed.studies.sweep") / "measures.py").read_bytes())
    for package in _RULES:
        for file in _files(resources.files(package)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _files(folder: Traversable) -> list[Traversable]:
    found = []
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            found += _files(entry)
        elif entry.name.endswith(".py"):
            found.append(entry)
    return found


def code_version() -> str:
    """Of all that decides what a run comes to."""
    return f"testbed {version('testbed')} ({rules_digest()[:8]}), Python {platform.python_version()}"

"""The version of the code. A stored result is valid for one version; a run's machines need the same one."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from importlib import resources
from importlib.metadata import version
from importlib.resources.abc import Traversable

_RULES = (
    *(
        "policies",
        "netem",
        "nodes",
        "testbed.scenario",
        "testbed.control",
        "testbed.fast",
        "testbed.simulate",
    ),
    *("testbed.results", "testbed.runtime"),
)
"""Packages whose code decides the results of a run."""


@cache
def rules_digest() -> str:
    """Return the SHA-256 (hex) of the code that decides a run's results, and what sweeps measure of them."""
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
    """Return the testbed's version with a digest of its code, and the Python version, as one text."""
    return f"testbed {version('testbed')} ({rules_digest()[:8]}), Python {platform.python_version()}"

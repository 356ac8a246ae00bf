"""The version of the code. A stored result is valid for one version; a run's machines need the same one."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import tomllib
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

_RULES = (
    *("policies", "netem", "nodes", "testbed.experiments", "testbed.control", "testbed.fast"),
    *("testbed.simulator", "testbed.results", "testbed.runtime"),
)
"""Packages whose code decides the results of a run."""
_CHECKOUT = Path(__file__).parents[1]


@cache
def rules_digest() -> str:
    """Return the SHA-256 (hex) of the code that decides a run's results, and what studies measure of them."""
    digest = hashlib.sha256()
    for study in ("sweep", "capacity", "score"):
        digest.update((_folder(f"testbed.studies.{study}") / "measures.py").read_bytes())
    digest.update((_folder("testbed") / "faultkinds.py").read_bytes())
    for package in _RULES:
        for file in _files(_folder(package)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _folder(package: str) -> Traversable:
    """Return a package's folder, without importing more than the package that is the first part of its name."""
    top, *within = package.split(".")
    return resources.files(top).joinpath(*within)


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
    return f"testbed {project_version()} ({rules_digest()[:8]}), Python {platform.python_version()}"


@cache
def commit() -> str | None:
    """Return the git commit of the checkout that this code is in, with "-dirty" if files were changed since.

    None if the code is not in a checkout of its own, or git cannot be asked. Nothing is written to the checkout: a
    killed git would leave its lock there, and every later command of git that writes would fail.
    """
    if not (_CHECKOUT / ".git").exists():
        return None
    ask = ["git", "--no-optional-locks", "-C", str(_CHECKOUT), "status", "--porcelain=v2", "--branch", "-uno"]
    try:
        asked = subprocess.run(ask, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"^# branch\.oid ([0-9a-f]+)$", asked.stdout, re.MULTILINE)
    if found is None:  # nothing has been committed
        return None
    return found[1] + ("-dirty" if re.search("^[^#]", asked.stdout, re.MULTILINE) else "")


def project_version() -> str:
    """Return the testbed's version, such as "0.1.0"."""
    try:
        return version("testbed")
    except PackageNotFoundError:
        return str(_pyproject()["version"])


def requirements() -> list[str]:
    """Return which packages the testbed and its extras for users require, such as "numpy>=1.26"."""
    try:
        return [text for text in requires("testbed") or () if "extra == 'dev'" not in text]
    except PackageNotFoundError:
        project = _pyproject()
    wanted: list[str] = project["dependencies"]
    for name, texts in project["optional-dependencies"].items():
        if name != "dev":
            wanted += [text for text in texts if not text.startswith("testbed[")]  # an extra within another
    return wanted


def _pyproject() -> dict[str, Any]:
    """Return the table of the project, for code that is on the path and not installed.

    Its version is "unknown" if only the packages were copied there.
    """
    path = Path(__file__).parents[1] / "pyproject.toml"
    if not path.is_file():
        return {"version": "unknown", "dependencies": [], "optional-dependencies": {}}
    return dict(tomllib.loads(path.read_text(encoding="utf-8"))["project"])

"""``provenance.json``: which code, packages, machine and command a run's numbers come from."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from testbed.codeversion import code_version, commit, requirements, rules_digest
from testbed.experiments.experiment import Experiment
from testbed.experiments.policy import FIXED

PROVENANCE = "provenance.json"
_SECRET = "--api-key"
"""Option whose value is left out of the command."""


def provenance(experiment: Experiment | None = None, gpus: Sequence[str] = ()) -> dict[str, Any]:
    """Return the content of ``provenance.json`` for a run, or a study, that begins now.

    ``experiment``: the run's, whose policies are looked up; None for a study of many runs. ``gpus``: those of
    this machine, if the run uses them. ``docs/metrics.md`` describes the keys.
    """
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(sys.argv),
        "code": code_version(),
        "code_sha256": rules_digest(),
        "commit": commit(),
        "policies": None if experiment is None else _policies(experiment),
        "packages": _packages(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu(),
        "n_cpus": n_cpus(),
        "gpus": list(gpus),
    }


def _command(argv: Sequence[str]) -> str:
    """Return the command line as a shell takes it, without a key that it holds."""
    program = Path(argv[0])
    words = ["python", "-m", program.parent.name] if program.name == "__main__.py" else [program.name]
    for before, word in pairwise(argv):
        option, is_joined, _ = word.partition("=")
        if before == _SECRET:
            word = "..."
        elif is_joined and option == _SECRET:
            word = f"{option}=..."
        words.append(word)
    return shlex.join(words)


def _policies(experiment: Experiment) -> dict[str, str]:
    """Return the digest of each policy that is read from a file of the user's, by its name."""
    names = (experiment.policy.placement, experiment.policy.routing, experiment.policy.online or "")
    digests = {name: source_digest(name) for name in names}
    return {name: digest for name, digest in digests.items() if digest}


def read_provenance(folder: Path) -> dict[str, Any]:
    """Return a run's ``provenance.json``; empty if there is none, or it cannot be read."""
    path = folder / PROVENANCE
    try:
        if not path.is_file():  # reading from a pipe of that name would block
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def source_digest(policy: str) -> str:
    """Return the SHA-256 (hex) of the file that a policy is read from; empty if it is not from a file."""
    if ":" not in policy:
        return ""
    if policy.startswith(FIXED):
        file = Path(policy.removeprefix(FIXED))
    else:
        try:
            spec = find_spec(policy.partition(":")[0])
        except (ImportError, ValueError):
            return ""
        file = Path(spec.origin or "") if spec is not None else Path()
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


@cache
def _packages() -> dict[str, str]:
    """Return the versions of the packages that the testbed requires, and of its extras where installed."""
    found = {}
    for requirement in requirements():
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return dict(sorted(found.items()))


def n_cpus() -> int:
    """Return the number of CPUs that this process may use, or of all where the system does not tell that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def _cpu() -> str | None:
    """Return the name of this machine's CPU, or None if the system does not have it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or None
    named = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return named[1] if named else None

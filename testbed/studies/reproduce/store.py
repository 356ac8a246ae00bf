"""Results on disk: one JSON line per finished run of a setting, so that a stopped command goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.studies.reproduce.disk import writing
from testbed.studies.reproduce.lines import LINES
from testbed.studies.reproduce.record import fault_of
from testbed.studies.reproduce.settings import Setting, settings_of

RESULTS = "results.jsonl"

_SOURCES = ("policies", "scenarios", "testbed.scenario")
_MODULES = ("runs.py", "windows.py")

Done = dict[tuple[str, int], dict[str, Any]]
"""Results by id of the setting and seed of the run."""


def inputs_digest() -> str:
    """Fingerprint of all that determines a result besides the seed: settings, scenarios, policies' code."""
    digest = hashlib.sha256()
    about = {"settings": [asdict(s) for s in settings_of(None)], "lines": [line.name for line in LINES]}
    digest.update(json.dumps(about, sort_keys=True).encode())
    for package in _SOURCES:
        for file in _files(resources.files(package)):
            digest.update(file.read_bytes())
    for name in _MODULES:
        digest.update((resources.files("testbed.studies.reproduce") / name).read_bytes())
    return digest.hexdigest()[:16]


def _files(folder: Traversable) -> Iterator[Traversable]:
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            yield from _files(entry)
        elif entry.name.endswith((".py", ".toml")):
            yield entry


class Store:
    """The results file of one output folder. A line's ``key`` is inputs, setting and seed."""

    def __init__(self, folder: Path, inputs: str) -> None:
        self._path = folder / RESULTS
        self._inputs = inputs

    def load(self) -> Done:
        """What is there. A last line that a kill cut short is removed.

        Raises ``UserError`` for results of other inputs, and for a file that is not a results file; ``RunError`` if
        what was cut short cannot be removed.
        """
        if not self._path.exists():
            return {}
        try:
            content = self._path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{self._path}: cannot be read ({error.strerror}); choose another --out"
            ) from None
        whole, _, torn = content.rpartition(b"\n")
        if torn:
            with writing(self._path), open(self._path, "r+b") as file:
                file.truncate(len(whole) + 1 if whole else 0)
        done: Done = {}
        explained = [setting.id for setting in settings_of(None) if setting.factors]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                inputs, setting, seed = record["key"]
            except (ValueError, TypeError, KeyError):
                raise self._no_result(number) from None
            if inputs != self._inputs:
                raise UserError(
                    f"{self._path.parent} holds results of other settings or another version of the policies; "
                    "choose another --out, or remove it"
                )
            fault = fault_of(line, explained=setting in explained)
            if fault is not None:
                raise self._no_result(number, f" ({fault})")
            done[setting, seed] = record
        return done

    def _no_result(self, line: int, why: str = "") -> UserError:
        return UserError(
            f"{self._path}: line {line} is no result of this command{why}; remove that line, or choose another --out"
        )

    def append(self, setting: Setting, seed: int, result: dict[str, Any]) -> dict[str, Any]:
        """Write one result as a line; returns the record. Raises ``RunError`` if the disk does not take it."""
        record = {"key": [self._inputs, setting.id, seed], **result}
        with writing(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record

"""The form of stored results, by which a damaged one is found when it is read, and the digest of their
inputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FiniteFloat, Tag, TypeAdapter, ValidationError

from testbed.errors import UserError
from testbed.studies.reproduce.lines import LINES
from testbed.studies.reproduce.settings import Setting, settings_of
from testbed.studies.sweep.store import Lines

RESULTS = "results.jsonl"
_SOURCES = ("policies", "scenarios", "testbed.scenario")
_MODULES = ("runs.py", "windows.py")

Done = dict[tuple[str, int], dict[str, Any]]
"""(id of the setting, seed of the run) -> result."""


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _Infeasible(_Form):
    infeasible: str


class _Means(_Form):
    setup: str
    per_token_s: FiniteFloat
    ttft_s: FiniteFloat
    rest_s: FiniteFloat


class _Policy(_Means):
    policy: str
    decision_s: FiniteFloat
    blocks: dict[str, int]


class _Factors(_Means):
    on: list[str]


class _Concurrency(_Means):
    choice: str
    design_concurrency: int


def _kind(row: Any) -> str:
    return "infeasible" if isinstance(row, dict) and "infeasible" in row else "means"


_Row = TypeVar("_Row", bound=_Means)
_OrInfeasible = Annotated[
    Annotated[_Row, Tag("means")] | Annotated[_Infeasible, Tag("infeasible")], Discriminator(_kind)
]


class _Record(_Form):
    key: tuple[str, str, int]
    policies: list[_OrInfeasible[_Policy]]


class _Explained(_Record):
    factors: list[_OrInfeasible[_Factors]]
    concurrencies: list[_OrInfeasible[_Concurrency]]


_RECORD: dict[bool, TypeAdapter[Any]] = {False: TypeAdapter(_Record), True: TypeAdapter(_Explained)}


def fault_of(line: bytes, *, explained: bool) -> str | None:
    """Returns what is wrong with a line of the results file, or None. ``explained``: its setting has
    ``factors``.
    """
    try:
        _RECORD[explained].validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "means"]  # the tag is not a key of the file
        return f"{'.'.join(where)}: {first['msg']}"
    return None


def inputs_digest() -> str:
    """Returns a digest of all that determines a result besides the seed: settings, scenarios,
    policies' code.
    """
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


def record_of(inputs: str, setting: Setting, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    """Returns a result in the form in which it is stored."""
    return {"key": [inputs, setting.id, seed], **result}


def read_done(lines: Lines, inputs: str) -> Done:
    """Reads the stored results. Raises ``UserError`` for results of other inputs, and for a malformed
    line.
    """
    done: Done = {}
    explained = [setting.id for setting in settings_of(None) if setting.factors]
    for number, line in lines.read():
        try:
            record = json.loads(line)
            of, setting, seed = record["key"]
        except (ValueError, TypeError, KeyError):
            raise _no_result(lines, number) from None
        if of != inputs:
            raise UserError(
                f"{lines.path.parent} holds results of other settings or another version of the policies; "
                "choose another --out, or remove it"
            )
        fault = fault_of(line, explained=setting in explained)
        if fault is not None:
            raise _no_result(lines, number, f" ({fault})")
        done[setting, seed] = record
    return done


def _no_result(lines: Lines, number: int, why: str = "") -> UserError:
    return UserError(
        f"{lines.path}: line {number} is no result of this command{why}; "
        "remove that line, or choose another --out"
    )

"""Finds and reads scenario files, and applies ``--set`` to their data before they are checked."""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from testbed.errors import ScenarioError
from testbed.experiments.changes import Change, Override
from testbed.experiments.filesread import note_file
from testbed.experiments.limits import MAX_KEY_PARTS, MAX_TOML_BYTES
from testbed.experiments.policy import FIXED, HALVES, settle_overrides
from testbed.experiments.problems import Key, KeyedError, key_in_document, nearest, shown

_PART = r"""(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)"""
_DOT = r"[ \t]*+\.[ \t]*+"
_KEYS = re.compile(
    r'''"""(?:[^"\\]|\\[\s\S]|"(?!""))*+(?:"{3,5})?'''
    r"""|'''(?:[^']|'(?!''))*+(?:'{3,5})?"""
    rf"|\#[^\n]*+|{_PART}(?:{_DOT}{_PART}){{0,{MAX_KEY_PARTS - 1}}}+(?P<deep>{_DOT}{_PART})?"
)
"""Matches strings of several lines, comments, and keys (or what looks like one).

Keys with too many parts match the group ``deep``. Unclosed strings match, too, so that the search time is
proportional to the length of the text.
"""


@dataclass(frozen=True)
class Document:
    """A scenario that is no file: its tables, as TOML data. Relative paths in it start in the current folder."""

    tables: Mapping[str, Any] = field(hash=False)
    name: str = "scenario"

    def __str__(self) -> str:
        return self.name


Target = str | Document
"""A scenario: the path of a file, the name of a shipped one, or its tables."""


@dataclass
class Source:
    """A file that was read: its data, its name in messages (``label``), and the ``--set`` options applied."""

    label: str
    stem: str
    folder: Path
    document: dict[str, Any]
    overridden: dict[tuple[str, ...], str] = field(default_factory=dict)

    def folder_of(self, *key: str) -> Path:
        """Return the folder that a relative path at ``key`` starts in: the current one after ``--set``."""
        return Path() if any(key[: len(k)] == k for k in self.overridden) else self.folder

    def error(self, wrong: KeyedError) -> ScenarioError:
        """Return ``wrong`` as one sentence, with the ``--set`` options that the value came from."""
        key = tuple(str(part) for part in key_in_document(self.document, wrong.key))
        options = self.overridden.items()
        below = [o for k, o in options if key and k[: len(key)] == key]
        above = [o for k, o in options if key[: len(k)] == k][:1]
        given = " ".join(f"--set {option}" for option in above or below)
        where = f"{self.label} with {given}" if given else self.label
        return ScenarioError(": ".join(filter(None, (where, ".".join(key), wrong.what))))


def shipped_files() -> dict[str, Traversable]:
    """Return the files of all shipped scenarios, by name."""
    files = [f for f in resources.files("scenarios").iterdir() if f.name.endswith(".toml")]
    return dict(sorted((file.name.removesuffix(".toml"), file) for file in files))


def shipped_documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, data) of every shipped scenario, ordered by name."""
    for name, file in shipped_files().items():
        yield name, _parse(file.read_text(encoding="utf-8"), f"scenarios/{name}.toml")


def read_source(target: Target) -> Source:
    """Read the file at a path, the shipped scenario of that name, or tables. Raises ``ScenarioError``."""
    if isinstance(target, Document):
        return Source(target.name, target.name, Path(), copy.deepcopy(dict(target.tables)))
    name_or_path = target
    path = Path(name_or_path)
    try:
        is_file = path.is_file()
    except OSError as error:  # such as a name that is too long
        raise ScenarioError(f"{shown(name_or_path)}: {error.strerror}") from None
    if not is_file:
        shipped = shipped_files()
        if name_or_path in shipped:
            text = shipped[name_or_path].read_text(encoding="utf-8")
            label = f"scenarios/{name_or_path}.toml"
            folder = Path(str(resources.files("scenarios")))
            note_file(folder / f"{name_or_path}.toml")
            return Source(label, name_or_path, folder, _parse(text, label))
        if path.exists():
            raise ScenarioError(
                f"{path}: is not a file; give a scenario file, or a shipped scenario: {', '.join(shipped)}"
            )
        hint = nearest(path.stem, shipped)
        raise ScenarioError(
            f"{name_or_path}: no such file or shipped scenario{hint}; shipped: {', '.join(shipped)}"
        )
    if path.suffix.lower() == ".json":
        raise ScenarioError(
            f"{path}: is an instance file, since it ends in .json; use it with `testbed simulate`, or give a "
            "scenario (.toml)"
        )
    return Source(str(path), path.stem, path.parent, read_toml(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the data of a TOML file. Raises ``ScenarioError``."""
    try:
        with note_file(path).open("rb") as file:
            data = file.read(MAX_TOML_BYTES + 1)
        if len(data) > MAX_TOML_BYTES:
            raise ScenarioError(
                f"{path}: is larger than {MAX_TOML_BYTES >> 20} MiB, the largest file that is read"
            )
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: is not UTF-8 text (byte {error.start})") from None
    return _parse(text, str(path))


def _parse(text: str, label: str) -> dict[str, Any]:
    # Checked before parsing, whose time and memory grow with the square of the number of parts.
    deep = next((key for key in _KEYS.finditer(text) if key["deep"]), None)
    if deep is not None:
        n_lines = text.count("\n", 0, deep.start()) + 1
        raise ScenarioError(
            f"{label}:{n_lines}: a key has more than {MAX_KEY_PARTS} parts; no key of a scenario is nested "
            "so deeply"
        )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ScenarioError(f"{label}: is nested too deeply for a scenario") from None
    except ValueError as error:
        if not isinstance(error, tomllib.TOMLDecodeError):  # a number with thousands of digits
            raise ScenarioError(f"{label}: cannot be read: {str(error).partition(';')[0]}") from None
        raise ScenarioError(f"{label}: not valid TOML: {error}") from None


def override(source: Source, options: Sequence[Override]) -> None:
    """Apply options to ``source.document``, in order. Raises ``ScenarioError``."""
    of_file = source.document.get("policy")
    online = of_file.get("online") if isinstance(of_file, dict) else None
    for option in options:
        parts, value = _parsed(option)
        _check_resolved(source, parts, str(option))
        try:
            put(source.document, parts, value)
        except KeyedError as wrong:
            key = ".".join(str(part) for part in wrong.key)
            raise ScenarioError(f"{source.label} with --set {option}: {key}: {wrong.what}") from None
        source.overridden[parts] = str(option)
    policy = source.document.get("policy")
    if isinstance(policy, dict):
        given = {parts[1] for parts in source.overridden if len(parts) == 2 and parts[0] == "policy"}
        settle_overrides(policy, given, online, is_resolved=source.document.get("resolved") is True)


def _parsed(option: Override) -> tuple[tuple[str, ...], Any]:
    if isinstance(option, Change):
        return tuple(option.key.split(".")), copy.deepcopy(option.value)
    path, equals, text = option.partition("=")
    parts = tuple(part.strip() for part in path.split("."))
    if not equals or not all(parts):
        raise ScenarioError(
            f"--set {option}: must have the form key.path=value, for example workload.rate=0.5"
        )
    return parts, value_of(text.strip())


def code_in_file(source: Source) -> tuple[str, ...]:
    """Return the policies ``module:Class`` that the file names itself, not an option."""
    policy = source.document.get("policy", {})
    names = []
    for key in (*HALVES, "online"):
        name = policy.get(key) or ""
        is_given = any(given in source.overridden for given in (("policy",), ("policy", key)))
        if ":" in name and not name.startswith(FIXED) and not is_given:
            names.append(name)
    return tuple(dict.fromkeys(names))


def value_of(text: str) -> Any:
    """Parse the value of ``--set``: TOML, a number such as .5, which TOML does not have, or else plain text."""
    if re.fullmatch(r"[+-]?(\.\d+|\d+\.)", text):
        return float(text)
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if list(parsed) == ["value"] else text


def put(document: dict[str, Any], parts: tuple[str, ...], value: Any) -> None:
    """Set the value at a key path; tables on the way are made. Raises ``KeyedError``."""
    here: Any = document
    for depth, part in enumerate(parts):
        key: Key = parts[:depth]
        last = depth == len(parts) - 1
        if isinstance(here, list):
            if not part.isdecimal() or int(part) >= len(here):
                entries = f"0 to {len(here) - 1}" if here else "none"
                raise KeyedError(key, f'is a list with the entries {entries}, and has no entry "{part}"')
            index: Any = int(part)
        elif isinstance(here, dict):
            index = part
            if not last:
                here.setdefault(part, {})
        else:
            raise KeyedError(key, f'is a single value and has no key "{part}"')
        if last:
            here[index] = value
        else:
            here = here[index]


def _check_resolved(source: Source, parts: tuple[str, ...], option: str) -> None:
    """Raise ``ScenarioError`` for a profile or set of a resolved file, whose numbers would not change."""
    if source.document.get("resolved") is True and parts in (("model", "profile"), ("calibration", "set")):
        raise ScenarioError(
            f"{source.label} with --set {option}: this is a resolved scenario, whose numbers no longer "
            "follow from names; use --set on the scenario that it was made from"
        )

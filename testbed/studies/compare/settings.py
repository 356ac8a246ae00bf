"""Finds the settings that differ between two runs, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from testbed.studies.compare.load import Run

_BACKEND = "compute.backend"
_LABELS = ("name", "sites")
"""Keys whose values name the entries of a list, if all of these differ; else entries are numbered."""


def differences(a: Run, b: Run) -> list[dict[str, Any]] | None:
    """Returns ``{"key", "a", "b"}`` for each value that differs; a side that lacks the key has None.

    Returns None if one run was made from a scenario and the other from an instance file.
    """
    if a.form != b.form:
        return None
    of_a, of_b = dict(_flat(a.settings)), dict(_flat(b.settings))
    keys = [*of_a, *(key for key in of_b if key not in of_a)]
    # Each backend has keys that the other lacks. Listing these would only repeat that the backends differ.
    if of_a.get(_BACKEND) != of_b.get(_BACKEND):
        keys = [key for key in keys if not key.startswith("compute.") or (key in of_a and key in of_b)]
    return [
        {"key": key, "a": of_a.get(key), "b": of_b.get(key)} for key in keys if of_a.get(key) != of_b.get(key)
    ]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for label, inner in zip(_labels(value), value, strict=True):
            yield from _flat(inner, f"{key}[{label}]")
    else:
        yield key, value


def _labels(values: list[Any]) -> list[str]:
    if all(isinstance(value, dict) for value in values):
        for name in _LABELS:
            labels = [_label(value[name]) for value in values if name in value]
            if len(set(labels)) == len(values):
                return labels
    return [str(number) for number in range(len(values))]


def _label(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

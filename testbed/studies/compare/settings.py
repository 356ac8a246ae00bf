"""What differs between the settings of two runs, key by key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from testbed.studies.compare.load import Run

_BACKEND = "compute.backend"
_LABELS = ("name", "sites")
"""Keys that name an entry of a list better than its number does, where every entry has one of its own."""


def differences(a: Run, b: Run) -> list[dict[str, Any]] | None:
    """``{"key", "a", "b"}`` of every value that differs; ``None`` on the side that has no such key.

    ``None`` instead of a list if one run was made from a scenario and the other from an instance file.
    """
    if a.form != b.form:
        return None
    of_a, of_b = dict(_flat(a.settings)), dict(_flat(b.settings))
    keys = [*of_a, *(key for key in of_b if key not in of_a)]
    if of_a.get(_BACKEND) != of_b.get(_BACKEND):  # each has settings of its own, which only repeat that
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

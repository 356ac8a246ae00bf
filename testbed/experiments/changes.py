"""Changes to a scenario: as a user writes them after ``--set``, or as data that a command has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Change:
    """A change that a command makes to a scenario: the path of a key, and its new value as TOML data.

    As text it is the ``--set`` option that would make it.
    """

    key: str
    value: Any

    def __str__(self) -> str:
        return f"{self.key}={toml_text(self.value)}"

    def __hash__(self) -> int:
        return hash(str(self))


Override = str | Change
"""A change to a scenario: an option ``key.path=value`` as a user writes it, or data."""


def toml_text(value: Any) -> str:
    """Return a value of a TOML file as text that ``--set`` parses to the same value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(toml_text, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(k)} = {toml_text(v)}' for k, v in value.items())}}}"
    return str(value)

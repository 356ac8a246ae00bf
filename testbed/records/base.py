"""What all records have: fields with a meaning and a unit, readable as attributes and as a mapping."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec
from msgspec import UNSET, Meta


def column(meaning: str, unit: str = "", engines: str = "") -> Meta:
    """Return what a record's field means, for ``Annotated``.

    ``unit`` of a number: "s" (scenario seconds), "real s", "bytes"; empty: it has none, or the field's name says it.
    ``engines``: which engines have the field, in words; empty: all.
    """
    return Meta(description=meaning, extra={"unit": unit, "engines": engines})


class Record(msgspec.Struct, kw_only=True):
    """Base of all records.

    ``dict(record)`` works. A field with the value ``UNSET`` is absent, in JSON, too: the engine does not have it.
    """

    def keys(self) -> Iterator[str]:
        """Yields the names of the fields that are present."""
        return (name for name in self.__struct_fields__ if getattr(self, name) is not UNSET)

    def __iter__(self) -> Iterator[str]:
        return self.keys()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and getattr(self, name, UNSET) is not UNSET

    def get(self, name: str) -> Any:
        """Return the field's value; None if it is absent."""
        value = getattr(self, name, UNSET)
        return None if value is UNSET else value

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)


def data_of(record: Record) -> dict[str, Any]:
    """Return a record as plain data for JSON; absent fields are left out."""
    data: dict[str, Any] = msgspec.to_builtins(record)
    return data


def columns_of(record: type[msgspec.Struct]) -> dict[str, tuple[Any, Meta]]:
    """Return the type and the meaning of every field of ``record``, by its name, in order."""
    hints = get_type_hints(record, include_extras=True)
    found = {}
    for name in record.__struct_fields__:
        meta = next((m for m in getattr(hints[name], "__metadata__", ()) if isinstance(m, Meta)), Meta())
        found[name] = getattr(hints[name], "__origin__", hints[name]), meta
    return found

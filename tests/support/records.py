"""Records of runs, made from plain data."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from testbed.records.base import Record, data_of
from testbed.records.events import AnyEvent


def event_of(**line: Any) -> AnyEvent:
    """Returns the event with this line in ``events.jsonl``."""
    return msgspec.convert(line, AnyEvent)  # type: ignore[return-value, arg-type]


RecordT = TypeVar("RecordT", bound=Record)


def changed(record: RecordT, **fields: Any) -> RecordT:
    """Returns ``record`` with other fields, given as plain data."""
    return msgspec.convert(data_of(record) | fields, type(record))

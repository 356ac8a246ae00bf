"""A node's append-only log: what happened is in the kernel's hands before the next thing happens.

One msgpack array per record (``nodes.records``), one ``write`` per record, so that a killed process loses
nothing that it has logged. When the disk is full the file ends after the last whole record.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgpack
import msgspec

from nodes.records import AnyRecord


class LogFullError(Exception):
    """The log cannot grow: no space left, or a quota."""


class EventLog:
    """Appends records to ``path``. After ``LogFullError`` it takes no more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        self._full = False

    def write(self, record: AnyRecord) -> None:
        """Append one record. Raises ``LogFullError`` if it does not fit; earlier records stay whole."""
        if self._full:
            raise LogFullError(f"no space left for {self.path}")
        data = msgspec.msgpack.encode(record)
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            self._full = True
            raise LogFullError(f"cannot write {self.path}: {error.strerror}") from error
        if written < len(data):
            os.ftruncate(self._fd, self._size)
            self._full = True
            raise LogFullError(f"no space left for {self.path}")
        self._size += written

    def close(self) -> None:
        os.close(self._fd)


_records: msgspec.msgpack.Decoder[AnyRecord] = msgspec.msgpack.Decoder(AnyRecord)


def read_log(path: Path) -> tuple[list[AnyRecord], int]:
    """Every whole record of a log, and the size in bytes of a tail that cannot be read."""
    data = path.read_bytes()
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
    unpacker.feed(data)
    records: list[AnyRecord] = []
    whole = 0
    while True:
        try:
            unpacker.skip()
            records.append(_records.decode(memoryview(data)[whole : unpacker.tell()]))
        except (msgpack.OutOfData, ValueError, msgspec.DecodeError):
            break  # cut short, or zeros of a disk that lost power: what follows means nothing
        whole = unpacker.tell()
    return records, len(data) - whole

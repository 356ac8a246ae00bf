"""A node's append-only log: every record is handed to the kernel before the node goes on.

One msgpack array per record (``nodes.records``), one ``write`` per record, so that a killed process loses
nothing that it has logged. When the disk is full, the file ends after the last whole record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgpack
import msgspec

from nodes.records import AnyRecord


class LogFullError(Exception):
    """The log cannot grow: no space left, or a quota."""


class EventLog:
    """Appends records to ``path``. After a ``LogFullError``, all further writes raise it, too.

    Raises ``LogFullError`` if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise LogFullError(f"cannot write {path}: {error.strerror}; make room") from error
        self._size = os.fstat(self._fd).st_size
        self._full = False

    def write(self, record: AnyRecord) -> None:
        """Appends one record. Raises ``LogFullError`` if it does not fit; earlier records stay whole."""
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
_CHUNK_BYTES = 1024**2


class LogReader:
    """Reads a log that may still grow: every iteration yields the whole records added since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0
        self._is_broken = False
        self.has_unknown_record = False
        """Whether reading ended at a whole record that this code does not write: other code wrote it, or it is damaged."""

    def __iter__(self) -> Iterator[AnyRecord]:
        with open(self._path, "rb") as file:
            file.seek(self._read_bytes)
            rest = b""
            while not self._is_broken and (chunk := file.read(_CHUNK_BYTES)):
                data = rest + chunk
                whole = 0
                for end, record in self._whole(data):
                    yield record
                    self._read_bytes += end - whole
                    whole = end
                rest = data[whole:]

    def _whole(self, data: bytes) -> Iterator[tuple[int, AnyRecord]]:
        """Yields the end of every whole record in ``data``, and the record."""
        unpacker = msgpack.Unpacker(max_buffer_size=len(data))
        unpacker.feed(data)
        begin = 0
        while True:
            try:
                unpacker.skip()
                end = unpacker.tell()
                record = _records.decode(memoryview(data)[begin:end])
            except msgpack.OutOfData:
                return
            except (ValueError, msgspec.DecodeError) as error:
                self._is_broken = True  # such as zeros after a power loss: what follows cannot be trusted
                is_whole = isinstance(error, msgspec.ValidationError)
                self.has_unknown_record = is_whole and isinstance(msgpack.unpackb(data[begin:end]), list)
                return
            yield end, record
            begin = end

    @property
    def unread_bytes(self) -> int:
        """The size in bytes of a tail that cannot be read, or has not been read yet."""
        return self._path.stat().st_size - self._read_bytes


def read_log(path: Path) -> tuple[list[AnyRecord], int]:
    """Returns every whole record of a log, and the size in bytes of a tail that cannot be read."""
    log = LogReader(path)
    return list(log), log.unread_bytes

"""Results on disk, one line of JSON each. A line is written at once, so that a stopped command can be
continued.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from testbed.errors import UserError
from testbed.studies.sweep.disk import writing
from testbed.studies.sweep.runs import Record


class Lines:
    """A file of lines. As a context manager it opens the file and locks it against other processes.

    Each line is written with one system call. A kill or a full disk can cut the last line short; ``read``
    removes such a line. Raises ``UserError`` on entry if another command has the lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def __enter__(self) -> Self:
        with writing(self.path):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise UserError(
                f"{self.path.parent}: another command writes there now; wait until it ends, or choose "
                "another --out"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yields the complete lines with their numbers, from 1. An incomplete last line is removed from the
        file.
        """
        with _reading(self.path):
            content = self.path.read_bytes()
        whole, _, torn = content.rpartition(b"\n")
        if torn:
            with writing(self.path):
                os.truncate(self.path, len(content) - len(torn))
        yield from enumerate(whole.splitlines(), 1)

    def places(self, key_of: Callable[[bytes], str]) -> Iterator[tuple[str, int]]:
        """Yields the key of each line and its place in the file, without all lines in memory at once.

        An incomplete last line is removed from the file. Raises ``UserError`` if a line has no key.
        """
        place = 0
        with _reading(self.path), self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                with decoding(self.path, number):
                    key = key_of(line)
                yield key, place
                place += len(line)
        with writing(self.path):
            os.truncate(self.path, place)

    def append(self, record: Any) -> int:
        """Write ``record`` as a line, and return its place in the file.

        Raises ``RunError`` if it cannot be written.
        """
        assert self._fd is not None, "the lines are entered before they are written"
        line = msgspec.json.encode(record) + b"\n"
        with writing(self.path):
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.lseek(self._fd, 0, os.SEEK_CUR) - len(line)


def read_records(lines: Lines) -> dict[str, Record]:
    """Returns the stored records by key, without those that are to be tried again.

    Raises ``UserError`` if a line is not a record.
    """
    known: dict[str, Record] = {}
    decoder = msgspec.json.Decoder(Record)
    for number, line in lines.read():
        with decoding(lines.path, number):
            record = decoder.decode(line)
        known[record.key] = record
    return {key: record for key, record in known.items() if not record.again}


@contextmanager
def decoding(path: Path, number: int) -> Iterator[None]:
    """Raises ``UserError`` if the body cannot decode line ``number``."""
    try:
        yield
    except msgspec.DecodeError as error:
        raise UserError(
            f"{path}: line {number} is no result of this command ({error}); "
            "remove that line, or choose another --out"
        ) from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); choose another --out") from None

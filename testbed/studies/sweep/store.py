"""Results on disk, one line of JSON each. A line is written at once, so that a stopped command can be
continued.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from testbed.errors import TestbedError, UserError
from testbed.experiments.units import counted
from testbed.studies.sweep.disk import make_folder, writing
from testbed.studies.sweep.runs import Record, Run
from testbed.terminal import say


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


class KeptRuns:
    """The runs of a search, which a later command finds by their keys: in ``file`` of ``folder``.

    ``lines`` is None if nothing can be stored. ``known``: the records of earlier commands, by key.
    """

    def __init__(self, folder: Path, lines: Lines | None, known: Mapping[str, Record]) -> None:
        self.folder, self.known = folder, known
        self._lines = lines
        self.n_computed = self.n_found = 0

    @property
    def is_stored(self) -> bool:
        """Whether the runs are stored in ``folder``."""
        return self._lines is not None

    def result(self, record: Record) -> Record:
        """Returns the result of a run that a worker has done, or has found to be known."""
        return self.known[record.key] if record.is_known else record

    def keep(self, record: Record) -> None:
        """Store a run's result unless it is stored already. Raises as ``Lines.append``."""
        self.n_found += record.is_known
        self.n_computed += not record.is_known
        if self._lines is not None and record.key and not record.is_known:
            self._lines.append(record)

    def keep_all(self, runs: Generator[tuple[Run, Record], None, None]) -> None:
        """Store the results of all runs as they come, and close ``runs``. Raises as ``Lines.append``."""
        with closing(runs):
            for _, record in runs:
                self.keep(record)

    @property
    def in_words(self) -> str:
        """How many runs there were, and where they are kept."""
        n_runs = counted(self.n_found + self.n_computed, "runs")
        if self._lines is None:
            return f"{n_runs}, which are not kept"
        return f"{n_runs}: {self.n_computed} computed, {self.n_found} found in {self.folder}"

    def stopped(self) -> str:
        """Returns the sentence for a command that was stopped: what it leaves, and how to go on."""
        n_runs = self.n_found + self.n_computed
        if self._lines is None or not n_runs:
            return "stopped; no run is kept, so the same command begins anew"
        return f"stopped; {self.folder} keeps {counted(n_runs, 'runs')}: the same command goes on"


def default_folder(command: str, target: str, *asked: object) -> Path:
    """Returns where ``command`` keeps runs without ``--out``: one folder in ``runs`` for all that is ``asked``."""
    digest = hashlib.sha256(msgspec.json.encode([target, *asked])).hexdigest()[:8]
    return Path("runs") / f"{command}-{Path(target).stem}-{digest}"


@contextmanager
def kept_runs(out: Path | None, default: Path, file: str) -> Iterator[KeptRuns]:
    """Yields the runs in ``file`` of the folder ``out``, which is locked against other commands.

    Without ``out`` it is the folder ``default``; if that cannot be used, nothing is kept, and stderr has the
    reason. Raises ``UserError`` and ``RunError`` if ``out`` cannot be used.
    """
    folder = default if out is None else out
    with ExitStack() as stack:
        lines: Lines | None
        try:
            make_folder(folder, file)
            lines = stack.enter_context(Lines(folder / file))
            known = read_records(lines)
        except TestbedError as error:
            if out is not None:
                raise
            say(f"runs are not kept: {error}")
            lines, known = None, {}
        yield KeptRuns(folder, lines, known)


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

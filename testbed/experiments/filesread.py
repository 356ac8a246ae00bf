"""Which files, and which code of users' policies, were read for a scenario or a study, so that they can be kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class FilesRead:
    """What was read: ``files`` as they are named, and ``policies`` as ``module:Class``."""

    files: set[Path] = field(default_factory=set)
    policies: set[str] = field(default_factory=set)

    def add(self, other: FilesRead) -> None:
        self.files |= other.files
        self.policies |= other.policies


_READ: ContextVar[FilesRead | None] = ContextVar("files_read", default=None)


@contextmanager
def files_read() -> Iterator[FilesRead]:
    """Yield what the body reads by ``note_file`` and ``note_policy``; an outer ``files_read`` has it, too."""
    outer, read = _READ.get(), FilesRead()
    token = _READ.set(read)
    try:
        yield read
    finally:
        _READ.reset(token)
        if outer is not None:
            outer.add(read)


def note_file(path: Path) -> Path:
    """Note that ``path`` is about to be read, and return it."""
    if (read := _READ.get()) is not None:
        read.files.add(path)
    return path


def note_policy(name: str) -> None:
    """Note that the code of the policy ``module:Class`` is about to be read."""
    if (read := _READ.get()) is not None:
        read.policies.add(name)

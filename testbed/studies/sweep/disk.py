"""Errors of the file system in an output folder, as one sentence for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import RunError, UserError
from testbed.rundir import check_writable, replacing

FIGURES = "figures"


def make_folder(out: Path, mark: str, documents: Iterable[str] = ()) -> None:
    """Make the folder ``out`` and check, before anything is computed, that files and figures can be written.

    ``mark`` is the file by which an existing folder is known as one that this command can continue;
    ``documents`` are other files that the command writes. Raises ``UserError`` if a file is in the place of a
    folder or a folder in the place of a file, if the folder holds anything but no ``mark``, or if it is not
    writable; ``RunError`` for any other error of the file system.
    """
    check_writable(out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    for name in (mark, *documents):
        if (out / name).is_dir():
            raise UserError(f"{out / name} is a folder, but a file belongs there; {_REMEDY}")
    if (out / FIGURES).exists() and not (out / FIGURES).is_dir():
        raise UserError(f"{out / FIGURES} is a file, but a folder belongs there; {_REMEDY}")
    if any(out.iterdir()) and not (out / mark).exists():
        raise UserError(f"{out} holds something else already; give a new folder with --out")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` in the body, which writes ``path``, into a sentence for the user.

    Raises ``UserError`` if a file is in the place of a folder or the reverse, ``RunError`` for any other
    error.
    """
    try:
        yield
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        raise UserError(
            f"{path}: a file is in the place of a folder, or a folder in the place of a file "
            f"({error.strerror}); "
            f"{_REMEDY}"
        ) from None
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}); once that is fixed, run the same "
            "command again: "
            "it keeps the runs that are done"
        ) from None


def save_text(path: Path, text: str) -> Path:
    """Write a file whole or not at all, and return its path. Raises as ``writing``."""
    with writing(path), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


_REMEDY = "move it away, or choose another --out"

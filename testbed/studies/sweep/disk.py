"""What a disk can do to the output folder, as one sentence for the user."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from testbed.errors import RunError, UserError
from testbed.rundir import check_writable

FIGURES = "figures"


def make_folder(out: Path, documents: Iterable[str]) -> None:
    """Make ``out`` and see that ``documents`` and figures can be written there, before anything is computed for it.

    Raises ``UserError`` if a file is where a folder belongs, a folder where a file does, or nothing can be written
    there; ``RunError`` if the folder cannot be made all the same.
    """
    check_writable(out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    for name in documents:
        if (out / name).is_dir():
            raise UserError(f"{out / name} is a folder, but a file belongs there; {_REMEDY}")
    if (out / FIGURES).exists() and not (out / FIGURES).is_dir():
        raise UserError(f"{out / FIGURES} is a file, but a folder belongs there; {_REMEDY}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Writing ``path``: an ``OSError`` in the body becomes ``UserError`` or ``RunError``, as in ``make_folder``."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as error:
        raise UserError(
            f"{path}: something of another kind is in its place ({error.strerror}); {_REMEDY}"
        ) from None
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror or error}); mend that, and the same command goes on with "
            "the runs that are done"
        ) from None


_REMEDY = "move it away, or choose another --out"

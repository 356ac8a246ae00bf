"""Paths as users give them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.experiments.problems import shown


def path_of(given: Any, rule: str) -> Path:
    """Return a path, with a user's folder for a leading ``~``.

    Raises ``UserError``, which begins with ``rule``, such as "out is a folder's path", for what can be none.
    """
    if not isinstance(given, str | os.PathLike):
        raise UserError(f"{rule}, not {given!r}")
    if "\0" in os.fspath(given):
        raise UserError(f"{rule}, which can have no NUL character as {given!r} has")
    try:
        path = Path(given).expanduser()
        path.is_dir()
    except RuntimeError:
        raise UserError(f"{rule}, but {given!r} begins with the name of no user") from None
    except OSError as error:  # such as a name that is too long
        raise UserError(f"{rule}, but {shown(str(given))} cannot be one: {error.strerror}") from None
    return path


def folder_of(out: Any) -> Path | None:
    """Return the folder that a parameter ``out`` gives; ``None``: none. Raises ``UserError``."""
    return None if out is None else path_of(out, "out is a folder's path")

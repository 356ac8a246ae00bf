"""Reads JSON files that users write, with one error sentence for whatever is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testbed.errors import UserError


def read_json(path: Path, remedy: str) -> Any:
    """Return the data of a JSON file. Raises ``UserError`` with the file, what is wrong, and ``remedy``."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {remedy}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not JSON (byte {error.start} is not UTF-8 text); {remedy}") from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and _is_json(text.lstrip().partition("\n")[0]):
            raise UserError(
                f"{path}: has several lines of JSON, one result each, as `testbed simulate --json` prints "
                f"them; keep one line"
            ) from error
        raise UserError(f"{path}: is not JSON ({error}); {remedy}") from error
    except ValueError as error:  # a number with thousands of digits
        raise UserError(f"{path}: cannot be read ({error}); {remedy}") from error
    except RecursionError as error:
        raise UserError(f"{path}: is nested too deeply; {remedy}") from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True

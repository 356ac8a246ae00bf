"""Errors in scenarios, each turned into one sentence with file, key path and remedy."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

Key = tuple[str | int, ...]
LONGEST_SHOWN = 60
_LIKENESS = 0.65
"""Of what is suggested, by difflib."""
_LONGEST_LIST = 1000
"""Characters; longer lists of valid names are cut to the first and the last."""
"""Most characters of a value that a sentence repeats."""


class KeyedError(Exception):
    """Something is wrong at ``key``. The loader adds the file and makes it a ``ScenarioError``."""

    def __init__(self, key: Key, what: str) -> None:
        super().__init__(what)
        self.key = key
        self.what = what


def nearest(word: object, valid: Iterable[str]) -> str:
    """Return `` (did you mean "x"?)`` with the nearest of ``valid``; empty text if none is a likely slip of the pen.

    A part with digits must be the same: h100 is no slip for a100, nor int4 for int8.
    """
    written, names = str(word).lower(), list(valid)
    by_lower = {n.lower(): n for n in reversed(names) if _numbered(n.lower()) >= _numbered(written)}
    found = difflib.get_close_matches(written, by_lower, n=1, cutoff=_LIKENESS)
    return f' (did you mean "{by_lower[found[0]]}"?)' if found else ""


def _numbered(name: str) -> set[str]:
    return {part for part in re.split(r"[^a-z0-9]+", name) if any(map(str.isdigit, part))}


def shown(value: object) -> str:
    """Return a value as it is written in the file, cut to about ``LONGEST_SHOWN`` characters."""
    if isinstance(value, str):
        return f'"{cut(value)}"'
    if isinstance(value, list | tuple | dict):
        return cut(_BRIEF.repr(value))
    return cut(str(value).lower() if isinstance(value, bool) else str(value))


def cut(text: str) -> str:
    """Return a text that is cut to ``LONGEST_SHOWN`` characters."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


_BRIEF = reprlib.Repr()  # str() of a large document would first write all of it


def unknown(what: str, word: object, valid: Iterable[str]) -> str:
    """Return the sentence for a name that does not exist, with the nearest name and all valid ones."""
    names = list(valid)
    text = word if isinstance(word, str) else shown(word)
    listed = ", ".join(names)
    if len(listed) > _LONGEST_LIST:
        listed = f"{cut(names[0])} to {cut(names[-1])} ({len(names):,})"
    return f"unknown {what} {shown(text)}{nearest(word, names)}; valid: {listed}"


def key_in_document(document: Any, key: Sequence[str | int]) -> Key:
    """Return ``key`` as in the file, without the parts that only the schema has (union tags, list forms)."""
    kept: list[str | int] = []
    here = document
    for position, part in enumerate(key):
        in_table = isinstance(here, dict) and part in here
        if in_table and not isinstance(here[part], dict | list) and key[position + 1 : position + 2]:
            # Here a union tag has the name of a key: kind = "topology" beside topology = "...".
            in_table = key[position + 1] not in here
        if in_table or (isinstance(here, list) and isinstance(part, int) and part < len(here)):
            here = here[part]
        elif not (isinstance(here, dict) and isinstance(part, str) and position == len(key) - 1):
            continue
        kept.append(part)
    return tuple(kept)


def explain(error: ValidationError) -> KeyedError:
    """Return the first problem of a pydantic error, in words. Unknown keys come first: they cause others."""
    details = error.errors(include_url=False)
    first = next((d for d in details if d["type"] == "unknown_key"), details[0])
    key: Key = tuple(part for part in first["loc"] if part != "[key]")
    context: dict[str, Any] = first.get("ctx", {})
    if "key" in context:
        key = (*key, context["key"])
    elif "discriminator" in context:
        key = (*key, context["discriminator"].strip("'"))
    if first["type"] == "list_type" and isinstance(first.get("input"), dict):
        return KeyedError(key, f"is one table, but there can be several: write [[{'.'.join(map(str, key))}]]")
    return KeyedError(key, _sentence(first["type"], first["msg"], first.get("input"), context))


_MUST_BE = {
    **dict.fromkeys(("int_type", "int_parsing"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "a table",
    "dict_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}
_BOUND = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _sentence(kind: str, message: str, given: Any, context: dict[str, Any]) -> str:
    if kind in _MUST_BE:
        return f"must be {_MUST_BE[kind]}, not {shown(given)}"
    if kind in _BOUND:
        words, name = _BOUND[kind]
        bound = context[name]
        number = f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"
        return f"must be {words} {number}, not {shown(given)}"
    if kind == "literal_error":
        return unknown("value", given, re.findall(r"'([^']*)'", str(context["expected"])))
    if kind == "union_tag_invalid":
        return unknown("value", context["tag"], re.findall(r"'([^']*)'", str(context["expected_tags"])))
    if kind in ("missing", "union_tag_not_found"):
        return "is missing"
    if given == "" and kind in ("too_short", "string_too_short"):
        return "must not be empty"
    if kind == "too_short":
        n = context["min_length"]
        return f"needs at least {n} {'entry' if n == 1 else 'entries'}"
    if kind == "too_long":
        return f"can have at most {context['max_length']} entries"
    return message

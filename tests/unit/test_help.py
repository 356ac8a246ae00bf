"""``--help`` of every command: each shared option is stated once, and all text fits into 80 columns."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from testbed.cli.main import COMMANDS, app

_COLUMNS = 80
_MOST_LINES = 4
_LEAST_WIDTH = 45
"""Columns that the text of an option has."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


ALL = dict(commands(typer.main.get_command(app)))


def parts(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Rows of all groups of ``text``: names, the column in which the text begins, and its lines."""
    _, *lines = re.split(r"^\w[\w ,]*:$", text, flags=re.MULTILINE)
    for group in lines:
        rows = re.split(r"\n  (?=\S)", group.rstrip().partition("\n\n")[0])
        for row in rows[1:]:
            head, _, rest = row.partition("\n")
            names, gap, about = head.partition("  ")
            lines_of = [*([about.strip()] if about.strip() else []), *rest.splitlines()]
            indents = {len(line) - len(line.lstrip()) for line in rest.splitlines()}
            column = indents.pop() if indents else 2 + len(names + gap + about) - len((gap + about).lstrip())
            assert not indents, row
            yield names, column, lines_of


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_fits_into_80_columns_most_of_which_are_text(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(_COLUMNS))
    text = CliRunner().invoke(app, [*path, "--help"]).output
    assert max(map(len, text.splitlines())) <= _COLUMNS
    rows = list(parts(text))
    named = {name for names, _, _ in rows for name in re.findall(r"--[\w-]+", names.replace("[no-]", ""))}
    assert named == {option for each in ALL[path].params for option in each.opts if "--" in option} | {
        "--help"
    }
    for names, column, lines in rows:
        assert column <= _COLUMNS - _LEAST_WIDTH and 1 <= len(lines) <= _MOST_LINES, names
        assert "<" not in names, f"{names}: give it a metavar"


def test_an_option_is_stated_once_wherever_it_means_the_same() -> None:
    stated: dict[tuple[str, str], set[int]] = {}
    kept = []  # so that no two have the same id
    for path, command in ALL.items():
        if command.callback is None:
            continue
        flags = {each.name: " ".join(each.opts) for each in command.params}
        hints = typing.get_type_hints(inspect.unwrap(command.callback), include_extras=True)
        for name, hint in hints.items():
            for option in getattr(hint, "__metadata__", ()):
                kept.append(option)
                stated.setdefault((flags[name], option.help), set()).add(id(option))
                assert option.help, f"{path}: {name}"
    assert len(stated) > 50
    assert [names for names, objects in stated.items() if len(objects) > 1] == []


def test_commands_are_in_groups_by_what_a_user_wants() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    titles = [line.removesuffix(":") for line in text.splitlines() if re.fullmatch(r"[A-Z][^:]*:", line)]
    assert titles == [*COMMANDS, "Options"]
    names = [name for group in COMMANDS.values() for name in group]
    assert len(names) == len(set(names)) == len(ALL) - 1 - sum(len(path) == 2 for path in ALL)
    assert all(re.search(rf"^  {name}  ", text, re.MULTILINE) for name in names)


def test_the_short_form_of_reproduce_stands_in_its_help() -> None:
    text = CliRunner().invoke(app, ["reproduce", "--help"]).output
    assert "testbed reproduce FOLDER" in " ".join(text.split())

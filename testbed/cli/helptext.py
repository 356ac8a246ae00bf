"""The text of ``--help``: options in two columns and in groups, readable in a terminal of 80 columns.

Typer's own tables give more than half of the width to the types of values and to the negative forms of flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from testbed.cli.options import RESULTS

_NAMES_WIDTH = 24
"""Longer names have a line of their own."""
_FEW = 14
"""So many options are one group, whatever groups they are of."""


class Command(TyperCommand):
    """A command whose options are shown in the groups that ``rich_help_panel`` names, if there are many."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, ctx, formatter)


class Group(TyperGroup):
    """Commands in the groups that ``rich_help_panel`` names, each with the first paragraph of its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            about = (command.help or "").strip().partition("\n\n")[0]
            groups.setdefault(command.rich_help_panel or "Commands", []).append((name, about))
        for title, rows in groups.items():
            _write(formatter, title, rows, max(map(len, self.commands)))
        _write_parameters(self, ctx, formatter)


def group(about: str, commands: Mapping[str, Callable[..., None]], **options: Any) -> typer.Typer:
    """Return an application of ``commands`` by name; ``options`` are those of ``typer.Typer``."""
    app = typer.Typer(
        **{"cls": Group, "help": about, **options},
        rich_markup_mode=None,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name, command in commands.items():
        app.command(name, cls=Command)(command)
    return app


def _write_parameters(command: Any, ctx: Any, formatter: Any) -> None:
    shown = [(each, record) for each in command.get_params(ctx) if (record := each.get_help_record(ctx))]
    is_long = sum(each.param_type_name == "option" for each, _ in shown) > _FEW
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for each, (names, about) in shown:
        if each.param_type_name == "argument":
            title, names = "Arguments", (each.metavar or each.name) + ("..." if each.nargs != 1 else "")
        else:
            title = (is_long and getattr(each, "rich_help_panel", None)) or "Options"
            names = re.sub(r"^--(\S+) / --no-\1$", r"--[no-]\1", names)
        groups.setdefault(title, []).append((names, _without_noise(about, title == "Arguments")))
    width = max(len(names) for rows in groups.values() for names, _ in rows if len(names) <= _NAMES_WIDTH)
    for title in sorted(groups, key=RESULTS.__eq__):  # these come last
        if groups[title]:
            _write(formatter, title, groups[title], width)


def _without_noise(about: str, is_argument: bool) -> str:
    """Leave out the range of a number, which the message for a wrong one has, and that an argument is required."""
    text, *rest = re.split(r"  \\?\[", about, maxsplit=1)  # some versions of Typer escape the bracket
    notes = [note for part in rest for note in part.removesuffix("]").split("; ")]
    kept = [
        note
        for note in notes
        if not re.search(r"x[<>]=?|<x", note) and not (is_argument and note == "required")
    ]
    return f"{text}  [{'; '.join(kept)}]" if kept else text


def _write(formatter: Any, title: str, rows: list[tuple[str, str]], width: int) -> None:
    """Write rows below a title; ``width`` is that of the column of names in all groups."""
    with formatter.section(typer.style(title, bold=True)):
        bold = [(typer.style(names, bold=True) + " " * (width - len(names)), about) for names, about in rows]
        formatter.write_dl(bold, col_max=width)

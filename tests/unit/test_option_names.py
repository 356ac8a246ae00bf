"""Names of options on the command line."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from testbed.cli.main import COMMANDS


def callbacks() -> Iterator[Any]:
    for commands in COMMANDS.values():
        for command in commands.values():
            if isinstance(command, typer.Typer):
                yield from (inner.callback for inner in command.registered_commands)
            else:
                yield command


def test_an_option_whose_placeholder_is_its_name_states_its_name() -> None:
    """Typer 0.27 names it after the placeholder otherwise: ``--PORT``."""
    n_seen = 0
    for callback in callbacks():
        for name, hint in get_type_hints(inspect.unwrap(callback), include_extras=True).items():
            if get_origin(hint) is Annotated:
                for option in get_args(hint)[1:]:
                    if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name:
                        n_seen += 1
                        stated = (
                            option.default,
                            *(option.param_decls or ()),
                        )  # the first is the default's, until read
                        assert any(str(one).startswith("--") for one in stated), (
                            f"{callback.__name__}: --{name}"
                        )
    assert n_seen > 10

"""The command line: all commands, by what a user wants, and how errors are reported."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NoReturn

import typer
import typer.main

from testbed.cli import ask, describe, machine, run, watch
from testbed.cli.helptext import Group, group
from testbed.cli.options import with_page_port
from testbed.cli.reproduce import bundle, reproduce_app
from testbed.errors import EXIT_INTERRUPTED, TestbedError, UserError
from testbed.terminal import tell_of_what_takes_long, warn_once

COMMANDS: dict[str, dict[str, Any]] = {
    "Run a testbed": {
        "up": run.up,
        "serve": run.serve,
        "generate": run.generate,
        "chat": run.chat,
        "net": run.net,
        "exec": run.execute,
        "shell": run.shell,
        "fault": run.fault,
        "link": run.link,
    },
    "Ask what would happen, and why": {
        "simulate": ask.simulate,
        "sweep": ask.sweep,
        "compare": ask.compare,
        "explain": ask.explain,
        "score": ask.score,
        "capacity": ask.capacity,
        "advise": ask.advise,
        "solve": ask.solve,
        "bundle": bundle,
        "reproduce": reproduce_app,
    },
    "Watch runs": {"view": watch.view, "ps": watch.ps, "report": watch.report},
    "Describe scenarios and what they are made of": {
        "scenarios": describe.scenarios,
        "policies": describe.policies,
        "show": describe.show,
        "validate": describe.validate,
        "topology": describe.topology,
        "workload": describe.workload_app,
        "hardware": describe.hardware,
        "model": describe.model_app,
    },
    "Look after this machine": {
        "doctor": machine.doctor,
        "clean": machine.clean,
        "links": machine.links,
        "calibrate": machine.calibrate,
    },
}
"""Commands by name, in groups; the most used first."""

# Typer has a copy of click inside, whose usage error is public only as the base of this one.
_UsageError: Any = typer.BadParameter.__bases__[0]


class _Made(Mapping[str, Any]):
    """Typer's commands by name, each made when it is first asked for: to make all takes as long as to import Typer."""

    def __init__(self) -> None:
        self._kept: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._kept:
            title = {name: title for title, commands in COMMANDS.items() for name in commands}[name]
            made = COMMANDS[title][name]
            if not isinstance(made, typer.Typer):
                made = group("", {name: made})
            self._kept[name] = typer.main.get_command(made)
            self._kept[name].name, self._kept[name].rich_help_panel = name, title
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return (name for commands in COMMANDS.values() for name in commands)

    def __len__(self) -> int:
        return sum(map(len, COMMANDS.values()))


class _Commands(Group):
    """Has commands in their order; reports Ctrl-C with the command's own message, where Typer prints nothing."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Made()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupted:
            _fail(str(interrupted) or "stopped", EXIT_INTERRUPTED)


app = group(
    "Networked emulation testbed for geographically distributed LLM inference.",
    {},
    cls=_Commands,
    epilog="Start with: testbed up clustered",
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from testbed.codeversion import code_version, commit

        known = commit()
        typer.echo(code_version() + (f", commit {known}" if known else ""))
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Networked emulation testbed for geographically distributed LLM inference."""


def main() -> NoReturn:
    """Entry point: runs the command. Errors are one sentence on stderr; a user's mistake has exit code 2."""
    warn_once()
    if sys.stderr.isatty():
        tell_of_what_takes_long()
    try:
        code = app(with_page_port(sys.argv[1:]) or ["--help"], standalone_mode=False)
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx else "testbed"
        _fail(f"{_misuse(error)} (see `{command} --help`)", 2)
    except UserError as error:
        _fail(error, 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            _fail(
                f"a file's name of {len(str(error.filename)):,} characters is too long; give a shorter one", 2
            )
        # Commands handle the errors of the files that they read and write: this is standard output.
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO, errno.EPIPE):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _fail(f"cannot write the result to standard output: {error.strerror}", 1)
    except TestbedError as error:
        _fail(error, 1)
    sys.exit(code)


def _misuse(error: Any) -> str:
    """Return what is wrong with the command line; of an option's value in the words that scenario files get."""
    from pydantic import ValidationError

    from testbed.experiments.problems import explain

    if isinstance(error.__cause__, ValidationError):  # Typer has read the value with pydantic
        return f"{error.param.opts[0]} {explain(error.__cause__).what}"
    return str(error.format_message()).rstrip(".")


def _fail(error: Exception | str, code: int) -> NoReturn:
    print(f"testbed: {error}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()

"""The command line: all commands, by what a user wants, and how errors are reported."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from testbed.cli import ask, describe, machine, run, watch
from testbed.cli.helptext import Command, Group, group
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


class _Commands(Group):
    """Lists commands in their order; reports Ctrl-C with the command's own message, where Typer prints nothing."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for commands in COMMANDS.values() for name in commands]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupted:
            _fail(str(interrupted) or "stopped", EXIT_INTERRUPTED)


app = group(
    "Networked emulation testbed for geographically distributed LLM inference.",
    {},
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Start with: testbed up clustered",
)
for _title, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_title)
        else:
            app.command(_name, cls=Command, rich_help_panel=_title)(_command)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from testbed.codeversion import code_version
        from testbed.experiments.provenance import commit

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

"""The settings of the tables as `testbed simulate` commands, in Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from testbed.studies.reproduce.settings import TABLES, Setting

_DEFAULT = 'calibration.session_setup_petals="250 s"'


def settings_lines(seeds: range) -> Iterator[str]:
    """Yields a block of commands per variant of the tables, for the runs with ``seeds``."""
    yield "## Settings"
    yield (
        "Each cell as a command: it prints the means with the session-setup constants and without them. To "
        "compare other policies, add more `--policy`."
    )
    for variant in TABLES:
        yield f"### {variant.title}"
        commands = (f"# {setting.id}\n{command_of(setting, seeds)}" for setting in variant.settings)
        yield "```sh\n" + "\n".join(commands) + "\n```"


def command_of(setting: Setting, seeds: range) -> str:
    """Returns the command of a setting as one line for a shell."""
    run = setting.run(seeds.start)
    # Quotes around texts are needed in TOML, but not here, where text without spaces is no number.
    changes = [change if " " in change else change.replace('"', "") for change in map(str, run.changes)]
    words = ["testbed", "simulate", str(run.scenario), "--mode", "reference"]
    words += ["--session-setup", "reference", "--policy", "petals", "--policy", "proposed"]
    words += ["--runs", str(len(seeds)), "--seed", str(seeds.start)]
    for change in changes:
        words += ["--set", change] if change != _DEFAULT else []
    return shlex.join(words)

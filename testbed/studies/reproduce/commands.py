"""The settings of the tables as `testbed simulate` commands, in Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from testbed.studies.reproduce.settings import SETUP_S, TABLES, Setting, TableVariant


def settings_lines(seeds: range) -> Iterator[str]:
    """Yields a block of commands per variant of the tables, for the runs with ``seeds``."""
    yield "## Settings"
    yield (
        "Each cell as a command: it prints the means with the session-setup constants and without them. To "
        "compare "
        "other policies, add more `--policy`."
    )
    for variant in TABLES:
        yield f"### {variant.title}"
        yield from _join_order(variant)
        commands = (f"# {setting.id}\n{command_of(setting, seeds)}" for setting in variant.settings)
        yield "```sh\n" + "\n".join(commands) + "\n```"


def command_of(setting: Setting, seeds: range) -> str:
    """Returns the command of a setting as one line for a shell.

    It lacks the setting's join order, if that is fixed: scenarios have no such key.
    """
    changes = dict(setting.overrides)
    if setting.setup_petals_s != SETUP_S:
        changes["calibration.session_setup_petals"] = f'"{setting.setup_petals_s:g} s"'
    words = ["testbed", "simulate", setting.scenario, "--mode", "reference", "--session-setup", "reference"]
    words += [
        "--policy",
        "petals",
        "--policy",
        "proposed",
        "--runs",
        str(len(seeds)),
        "--seed",
        str(seeds.start),
    ]
    for key, value in changes.items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def _join_order(variant: TableVariant) -> Iterator[str]:
    orders = {setting.join_order for setting in variant.settings if setting.join_order is not None}
    for order in sorted(orders):
        yield (
            f"In the clustered rows the servers join in the order {', '.join(map(str, order))} (numbers from 0). A "
            "scenario cannot set this order. The commands of these rows draw it, so that they print the "
            "proposed "
            "policy's numbers, but not those of PETALS. Only `testbed reproduce paper` computes the latter."
        )

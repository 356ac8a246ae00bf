"""The settings of the tables as `testbed simulate` commands: Markdown."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from testbed.studies.reproduce.settings import SETUP_S, TABLES, Setting, TableVariant


def settings_lines(seeds: range) -> Iterator[str]:
    """A block of commands per variant of the tables, for the runs of those seeds."""
    yield "## Settings"
    yield (
        "Each cell as a command: it prints the means with the session-setup constants and without them. Other policies "
        "are compared with more `--policy`."
    )
    for variant in TABLES:
        yield f"### {variant.title}"
        yield from _join_order(variant)
        commands = (f"# {setting.id}\n{command_of(setting, seeds)}" for setting in variant.settings)
        yield "```sh\n" + "\n".join(commands) + "\n```"


def command_of(setting: Setting, seeds: range) -> str:
    """One line for a shell. A join order of the setting's own is not in it: scenarios have no such key."""
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
            "scenario cannot say that: the commands of these rows draw the order, so that they give the proposed "
            "policy's numbers, but not those of PETALS. Those come from `testbed reproduce paper` alone."
        )

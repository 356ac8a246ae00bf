from __future__ import annotations

import json
import shlex

import pytest
from typer.testing import CliRunner

from testbed.cli.main import app
from testbed.studies.reproduce.commands import command_of, settings_lines
from testbed.studies.reproduce.runs import run_task, task_of
from testbed.studies.reproduce.settings import CLOSEST, DRAWN, STATED, TABLES, Setting

SEEDS = range(3, 5)


@pytest.mark.parametrize(
    "setting",
    [
        STATED.cells["Cluster1", 3],
        STATED.cells["GTS-CE", 0],
        DRAWN.cells["Cluster2", 0],
        CLOSEST.cells["Cluster0", 0],
        CLOSEST.cells["AboveNet", 1],
        CLOSEST.cells["BellCanada", 2],
    ],
    ids=lambda setting: setting.id,
)
def test_a_printed_command_gives_the_numbers_of_the_tables(setting: Setting) -> None:
    ours = {seed: run_task(task_of(setting, seed)).measures for seed in SEEDS}
    answers = _run(setting)
    assert [answer["policy"] for answer in answers] == ["petals", "proposed"]
    for answer in answers:
        for run in answer["runs"]:
            expected_s = ours[run["seed"]][f"{answer['policy']}/reference/per_token_s"]
            assert run["mean"]["per_token_ms"] / 1e3 == pytest.approx(expected_s, rel=1e-9)


def test_every_setting_of_the_tables_has_a_command_and_only_the_closest_ones_fix_the_join_order() -> None:
    text = "\n".join(settings_lines(range(20)))
    for setting in (setting for variant in TABLES for setting in variant.settings):
        assert f"# {setting.id}\n{command_of(setting, range(20))}\n" in text
    closest = text[text.index(CLOSEST.title) : text.index(DRAWN.title)]
    assert text.count("policy.join_order=[7, 0, 1, 2, 3, 4, 5, 6, 8]") == closest.count("join_order") == 6


def _run(setting: Setting) -> list[dict]:
    program, *arguments = shlex.split(command_of(setting, SEEDS))
    assert program == "testbed"
    ran = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert ran.exit_code == 0
    return [json.loads(line) for line in ran.stdout.splitlines()]

from __future__ import annotations

import json
import shlex

import pytest
from typer.testing import CliRunner

from testbed.cli.main import app
from testbed.studies.reproduce.commands import command_of, settings_lines
from testbed.studies.reproduce.runs import run_setting
from testbed.studies.reproduce.settings import CLOSEST, DRAWN, STATED, TABLES, Setting

SEEDS = range(3, 5)


@pytest.mark.parametrize(
    "setting",
    [
        STATED.cells["Cluster1", 3],
        STATED.cells["GTS-CE", 0],
        DRAWN.cells["Cluster2", 0],
        CLOSEST.cells["AboveNet", 1],
        CLOSEST.cells["BellCanada", 2],
    ],
    ids=lambda setting: setting.id,
)
def test_a_printed_command_gives_the_numbers_of_the_tables(setting: Setting) -> None:
    ours = {
        (row["policy"], seed): row["per_token_s"]
        for seed in SEEDS
        for row in run_setting(setting, seed)["policies"]
        if row["setup"] == "reference"
    }
    answers = _run(setting)
    assert [answer["policy"] for answer in answers] == ["petals", "proposed"]
    for answer in answers:
        for run in answer["runs"]:
            expected_s = ours[answer["policy"], run["seed"]]
            assert run["mean"]["per_token_ms"] / 1e3 == pytest.approx(expected_s, rel=1e-9)


def test_where_the_join_order_is_fixed_the_command_gives_only_the_proposed_policys_numbers() -> None:
    setting = CLOSEST.cells["Cluster0", 0]
    petals, proposed = _run(setting)
    for seed, of_petals, of_proposed in zip(SEEDS, petals["runs"], proposed["runs"], strict=True):
        rows = run_setting(setting, seed)["policies"]
        ours = {row["policy"]: row["per_token_s"] for row in rows if row["setup"] == "reference"}
        assert of_proposed["mean"]["per_token_ms"] / 1e3 == pytest.approx(ours["proposed"], rel=1e-9)
        assert of_petals["mean"]["per_token_ms"] / 1e3 != pytest.approx(ours["petals"], rel=1e-3)


def test_every_setting_of_the_tables_has_a_command_and_a_fixed_join_order_is_said_in_words() -> None:
    lines = list(settings_lines(range(20)))
    text = "\n".join(lines)
    for setting in (setting for variant in TABLES for setting in variant.settings):
        assert f"# {setting.id}\n{command_of(setting, range(20))}\n" in text
    about = [line for line in lines if "join in the order" in line]
    assert len(about) == 1 and "7, 0, 1, 2, 3, 4, 5, 6, 8" in about[0] and "--set" not in about[0]
    assert text.index(CLOSEST.title) < text.index(about[0]) < text.index(DRAWN.title)


def _run(setting: Setting) -> list[dict]:
    program, *arguments = shlex.split(command_of(setting, SEEDS))
    assert program == "testbed"
    ran = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert ran.exit_code == 0
    return [json.loads(line) for line in ran.stdout.splitlines()]

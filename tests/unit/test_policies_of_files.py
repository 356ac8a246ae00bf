"""A policy ``module:Class`` in a scenario file: which commands import it, and which only announce it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import scenarios
from testbed import terminal
from testbed.cli.main import app
from testbed.control.placing import place_experiment
from testbed.errors import UserError
from testbed.experiments import load_experiment

EVIL = """
from pathlib import Path
Path("it-ran").touch()
class Policy:
    name = "evil"
"""
KEYS = ("placement", "routing", "online")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module that writes a file when it is imported."""
    (tmp_path / "evil_policy.py").write_text(EVIL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "evil_policy", raising=False)
    monkeypatch.setattr(terminal, "_SAID", set())
    return tmp_path


def scenario(folder: Path, key: str) -> str:
    text = Path(scenarios.__file__).with_name("clustered.toml").read_text(encoding="utf-8")
    names = {"placement": "cg-bp", "routing": "ws-rr", key: "evil_policy:Policy"}
    table = "".join(f'{name} = "{value}"\n' for name, value in names.items())
    before, _, after = text.partition("[policy]\n")
    rest = "".join(line for line in after.splitlines(keepends=True) if not line.startswith("name ="))
    path = folder / "unknown.toml"
    path.write_text(f"{before}[policy]\n{table}{rest}", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("command", ["show", "validate"])
def test_show_and_validate_do_not_import_a_policy_that_the_file_names(
    folder: Path, command: str, key: str
) -> None:
    path = scenario(folder, key)
    for options in ((), ("--json",)):
        result = CliRunner().invoke(app, [command, path, *options])
        assert result.exit_code == 0, result.output
        assert "evil_policy:Policy" in result.stdout
    assert not (folder / "it-ran").exists()
    assert "evil_policy" not in sys.modules


@pytest.mark.parametrize("key", ["placement", "routing"])
def test_a_policy_that_the_file_names_is_said_once_before_its_code_runs(
    folder: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = load_experiment(scenario(folder, key))
    for _ in range(2):
        with pytest.raises(UserError, match="has no method"):
            place_experiment(experiment)
    notice = "notice: the scenario file runs code of evil_policy:Policy as its policy"
    assert caplog.messages == [notice]
    assert (folder / "it-ran").exists()


def test_an_online_policy_that_the_file_names_is_said_too(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place_experiment(load_experiment(scenario(folder, "online")))
    assert "evil_policy:Policy" in caplog.text


@pytest.mark.parametrize("key", ["placement", "routing"])
def test_a_policy_of_the_command_line_needs_no_notice(
    folder: Path, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = load_experiment("clustered", [f'policy.{key}="evil_policy:Policy"'])
    assert experiment.policy.code_in_file == ()
    with pytest.raises(UserError, match="has no method"):
        place_experiment(experiment)
    assert capsys.readouterr().err == ""


def test_an_option_takes_the_place_of_a_files_policy(folder: Path) -> None:
    path = scenario(folder, "placement")
    assert load_experiment(path).policy.code_in_file == ("evil_policy:Policy",)
    assert load_experiment(path, ["policy.placement=petals"]).policy.code_in_file == ()
    assert load_experiment(path, ["policy.name=proposed"]).policy.code_in_file == ()

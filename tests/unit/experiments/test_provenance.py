"""``provenance.json``: where a run's numbers come from, and what must not be in it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from testbed import codeversion
from testbed.codeversion import code_version, rules_digest
from testbed.experiments import load_experiment
from testbed.experiments import provenance as module
from testbed.experiments.provenance import PROVENANCE, provenance, read_provenance
from tests.support.runs import require

POLICY = "class Mine:\n    name = 'mine'\n\n    def place(self, problem, design_concurrency=None): ...\n"


def test_it_names_code_command_packages_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/testbed", "up", "clustered", "--set", "name=two words"])
    found = provenance(load_experiment("clustered"), ["cuda:0 a GPU"])
    assert found["command"] == "testbed up clustered --set 'name=two words'"
    assert (found["code"], found["code_sha256"]) == (code_version(), rules_digest())
    assert found["packages"]["numpy"] and "pytest" not in found["packages"]
    assert found["kernel"].split()[1] == os.uname().release
    assert found["n_cpus"] == len(os.sched_getaffinity(0))
    assert found["gpus"] == ["cuda:0 a GPU"]
    assert found["policies"] == {}


def test_a_package_that_python_runs_is_named_as_it_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/testbed/__main__.py", "up", "clustered"])
    assert provenance()["command"] == "python -m testbed up clustered"


@pytest.mark.parametrize("given", [["--api-key", "hidden"], ["--api-key=hidden"]])
def test_a_key_on_the_command_line_is_left_out(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["testbed", "serve", "clustered", *given, "--port", "0"])
    command = provenance()["command"]
    assert "hidden" not in command
    assert command.startswith("testbed serve clustered --api-key") and command.endswith("--port 0")


def test_a_policy_of_the_users_is_known_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "provenance_policy.py").write_text(POLICY, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    name = "provenance_policy:Mine"
    experiment = load_experiment("clustered", [f"policy.placement={name}"])
    assert provenance(experiment)["policies"] == {name: hashlib.sha256(POLICY.encode()).hexdigest()}


def test_the_commit_is_that_of_the_checkout_and_says_whether_files_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("git", None if shutil.which("git") else "it is not installed")

    def git(*arguments: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", *settings, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    monkeypatch.setattr(codeversion, "_CHECKOUT", tmp_path)
    codeversion.commit.cache_clear()
    try:
        assert codeversion.commit() is None  # installed, not in a checkout of its own
        (tmp_path / "file").write_text("one")
        git("init", "-q")
        git("add", "file")
        codeversion.commit.cache_clear()
        assert codeversion.commit() is None
        git("commit", "-q", "-m", "one")
        os.utime(tmp_path / "file", (1, 1))  # of which git would take note
        before = (tmp_path / ".git" / "index").read_bytes()
        codeversion.commit.cache_clear()
        assert codeversion.commit() == git("rev-parse", "HEAD")
        assert (tmp_path / ".git" / "index").read_bytes() == before, "a killed git would leave its lock"
        (tmp_path / "file").write_text("two")
        codeversion.commit.cache_clear()
        assert codeversion.commit() == git("rev-parse", "HEAD") + "-dirty"
    finally:
        codeversion.commit.cache_clear()


def test_a_pipe_or_nonsense_in_its_place_is_no_provenance(tmp_path: Path) -> None:
    assert read_provenance(tmp_path) == {}
    (tmp_path / PROVENANCE).write_text("[1]")
    assert read_provenance(tmp_path) == {}
    (tmp_path / PROVENANCE).unlink()
    os.mkfifo(tmp_path / PROVENANCE)
    assert read_provenance(tmp_path) == {}


def test_a_checkout_that_is_not_installed_has_its_version_and_its_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = code_version(), provenance()["packages"]

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(codeversion, "version", missing)
    monkeypatch.setattr(codeversion, "requires", missing)
    module._packages.cache_clear()
    try:
        assert (code_version(), provenance()["packages"]) == installed
        module._packages.cache_clear()
        monkeypatch.setattr(codeversion, "__file__", str(tmp_path / "testbed" / "codeversion.py"))
        assert (provenance()["code"].split()[1], provenance()["packages"]) == ("unknown", {})
    finally:
        module._packages.cache_clear()

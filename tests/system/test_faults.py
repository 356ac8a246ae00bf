"""What breaks a run: nodes and the network that die, a full disk, users' policies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from netem.probe import try_in_child
from netem.syscalls import CLONE_NEWNS, unshare
from tests.support.runs import (
    FAST,
    LONG,
    Outcome,
    Testbed,
    assert_one_sentence,
    assert_tables_hold_the_whole_log,
    logged_tokens,
    node_pid,
    require,
    rows_of,
    wait_until,
)


def assert_broken(outcome: Outcome, *expected: str) -> None:
    """Exit code 1 and a last line on stderr that holds the expected texts."""
    assert outcome.code == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("testbed: ")
    for text in expected:
        assert text in last


@pytest.mark.usefixtures("orphans", "fabric")
def test_a_node_that_dies_at_the_start_is_named_with_its_last_lines(testbed: Testbed) -> None:
    for _ in range(10):  # until it is killed in time: all nodes begin within half a second
        run = testbed.start_up("clustered", *LONG)
        run_dir = run.run_dir()
        pid = node_pid(run_dir, "a100-0")
        (run_dir / "logs" / "a100-0.log").write_text("first words\nlast words\n")
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda run=run: "nodes up" in run.stderr or run.process.poll() is not None,
            "the start, or its end",
        )
        if "nodes up" not in run.stderr:
            break
        run.kill()
    assert_broken(run.wait(), "a100-0 ended unexpectedly (status -9)", "first words | last words")


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize("name", ["client-0", "fabric"])
def test_what_dies_while_serving_is_named_and_the_rows_before_it_stay(name: str, testbed: Testbed) -> None:
    run = testbed.start_up("clustered", "--network", "fabric", *LONG)
    run_dir = run.serving()
    before = logged_tokens(run_dir)
    os.kill(node_pid(run_dir, name), signal.SIGKILL)
    outcome = run.wait()
    assert_broken(outcome, f"{name} ended unexpectedly (status -9)")
    assert_tables_hold_the_whole_log(run_dir)
    assert set(before) <= set(logged_tokens(run_dir))
    assert len(rows_of(run_dir / "requests.parquet")) == 60
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["n_completed"] < summary["n_requests"]


def up_on_a_small_disk(testbed: Testbed, size: str, folder: Path) -> Outcome:
    """A run whose directory has only so much space; what is left of it is ``folder / "kept"``."""
    rootless = try_in_child(lambda: unshare(CLONE_NEWNS)) is not None
    namespace = ["unshare", "--mount", *(["--user", "--map-root-user"] if rootless else [])]
    require("mount namespaces", _missing([*namespace, "true"]))
    (folder / "small").mkdir()
    script = """
        mount -t tmpfs -o size=$0 none "$1" && "${@:3}" --out "$1/run"
        code=$?; [ ! -e "$1/run" ] || cp -a "$1/run" "$2"; exit $code
    """
    return testbed(
        *("up", "clustered", "--network", "loopback", *LONG),
        wrapper=[*namespace, "bash", "-c", script, size, str(folder / "small"), str(folder / "kept")],
    )


def test_a_disk_that_gets_full_ends_the_run_with_a_message_and_earlier_rows_stay(
    testbed: Testbed, tmp_path: Path
) -> None:
    outcome = up_on_a_small_disk(testbed, "80k", tmp_path)
    assert_broken(outcome, "No space left", "the logs are intact: make room, then `testbed report ")
    assert "client-0 failed: no space left" in outcome.stderr.splitlines()[-2]
    kept = tmp_path / "kept"
    assert len(logged_tokens(kept)) > 20
    again = testbed("report", str(kept), "--json")
    assert again.code == 1, "not every request completed"
    assert again.json()["dropped_log_bytes"] == 0
    assert_tables_hold_the_whole_log(kept)


@pytest.mark.parametrize("size", ["4k", "8k", "12k"])
def test_a_disk_that_is_full_from_the_start_is_a_message(size: str, testbed: Testbed, tmp_path: Path) -> None:
    assert_broken(up_on_a_small_disk(testbed, size, tmp_path), "No space left")


def _missing(command: list[str]) -> str | None:
    tried = subprocess.run(command, capture_output=True, text=True)
    return tried.stderr or "failed" if tried.returncode else None


POLICIES = '''
from policies.problem import BlockRange, Hop, Placement, Route
from policies.petals import PetalsPlacement
from policies.petals_routing import PetalsRouting


class Mine(PetalsPlacement):
    """A placement of my own."""

    name = "mine"


class Greedy(PetalsPlacement):
    name = "greedy"

    def place(self, problem, design_concurrency=None):
        ranges = [BlockRange(0, problem.model.n_blocks)] * problem.n_servers
        return Placement(self.name, tuple(ranges), (0.0,) * problem.n_servers)


class Sorry(Mine):
    def place(self, problem, design_concurrency=None):
        return 1 / 0


class Short:
    """Stops one block early."""

    name = "short"

    def bind(self, problem, placement):
        inner = PetalsRouting().bind(problem, placement)

        class Router:
            def route(self, request, state, now_s):
                return Route(inner.route(request, state, now_s).hops[:-1], 0.0, 0.0)

        return Router()


class Broken(Short):
    name = "broken"

    def bind(self, problem, placement):
        class Router:
            def route(self, request, state, now_s):
                raise KeyError("no such server")

        return Router()
'''


@pytest.fixture
def own_policies(tmp_path: Path) -> dict[str, str]:
    """The environment in which ``mypolicies`` can be imported."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "mypolicies.py").write_text(textwrap.dedent(POLICIES))
    return {"PYTHONPATH": str(tmp_path / "lib")}


def test_a_users_placement_serves_like_a_shipped_one(
    virtual: str, testbed: Testbed, own_policies: dict[str, str]
) -> None:
    names = ("--placement", "mypolicies:Mine", "--routing", "petals")
    outcome = testbed.up("clustered", "--network", virtual, "--json", *names, *FAST, env=own_policies)
    assert outcome.code == 0, outcome.stderr
    assert outcome.json()["policy"]["placement"] == "mypolicies:Mine"
    assert outcome.json()["n_completed"] == 3


def test_a_users_placement_that_overbooks_is_stopped_by_name(
    testbed: Testbed, own_policies: dict[str, str]
) -> None:
    names = ("--placement", "mypolicies:Greedy", "--routing", "petals")
    outcome = testbed.up("clustered", *names, *FAST, env=own_policies)
    assert_one_sentence(
        outcome,
        "placement policy mypolicies:Greedy overbooks mig-1g-0",
        "92.64 GB of blocks and 0 bytes of caches in 8.20 GB of memory",
    )
    assert not testbed.runs.exists()


def test_a_users_route_that_breaks_a_rule_ends_the_run_by_name(
    virtual: str, testbed: Testbed, own_policies: dict[str, str]
) -> None:
    names = ("--placement", "petals", "--routing", "mypolicies:Short")
    outcome = testbed.up("clustered", "--network", virtual, *names, *FAST, env=own_policies)
    assert outcome.code == 2
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("testbed: request 0: routing policy mypolicies:Short stops before block ")
    assert "Traceback" not in outcome.stderr
    assert len(rows_of(outcome.run_dir / "requests.parquet")) == 3


def test_a_users_policy_that_raises_ends_the_run_by_name(
    virtual: str, testbed: Testbed, own_policies: dict[str, str]
) -> None:
    names = ("--placement", "petals", "--routing", "mypolicies:Broken")
    outcome = testbed.up("clustered", "--network", virtual, *names, *FAST, env=own_policies)
    assert outcome.code == 2
    last = outcome.stderr.splitlines()[-1]
    assert last.startswith("testbed: request 0: routing policy mypolicies:Broken failed at mypolicies.py:")
    assert "KeyError: 'no such server'" in last
    assert "Traceback" not in outcome.stderr


def test_a_users_placement_that_raises_is_stopped_by_name(
    testbed: Testbed, own_policies: dict[str, str]
) -> None:
    names = ("--placement", "mypolicies:Sorry", "--routing", "petals")
    outcome = testbed.up("clustered", *names, *FAST, env=own_policies)
    assert_one_sentence(outcome, "placement policy mypolicies:Sorry failed at", "ZeroDivisionError")

"""Kill -9 at any moment: no process and no namespace stays, and ``testbed clean`` removes the rest."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from testbed.rundir import OWNER
from testbed.runs.clean import HALF_WRITTEN, TABLES, clean_command
from tests.support.effort import EFFORT
from tests.support.runs import (
    Running,
    Testbed,
    all_namespaces,
    announced,
    assert_tables_hold_the_whole_log,
    cleaned,
    logged_tokens,
    namespaces,
    processes,
    wait_until,
)

N_TRIES = 15 * EFFORT
"""Each takes about a second of CPU."""
N_MOMENTS = 2 * EFFORT
SEED = 20261121
_AT_ONCE = 3

SMALL = """
seed = 3
model = { profile = "bloom-176b", n_blocks = 4 }
servers = [{ hardware = "mig-1g", site = "There", count = 2 }]
clients = { site = "Here" }

[network]
kind = "clusters"
pairs = [
    { sites = ["Here", "There"], rtt = "20 ms", rate = "1 Gbit/s" },
    { sites = ["There", "There"], rtt = "5 ms", rate = "1 Gbit/s" },
]

[workload]
arrivals = "constant"
rate = 2
n_requests = 10
n_input_tokens = 5
n_output_tokens = 8
"""
SCALED = ("--time-scale", "20")
"""Three nodes that serve for half a second. The twin that follows may be what is killed."""
SLOWER = ("--time-scale", "5")
"""They serve for two seconds, so that they can be met while they serve, however busy the machine is."""
LONG_VIRTUAL = ("--clock", "virtual", "--set", "workload.n_output_tokens=1000")
"""The same for about as long, in virtual time."""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return str(path)


@dataclass(frozen=True)
class Try:
    """Which command to kill, and when: so long after it has reached a phase."""

    links: bool
    virtual: bool
    phase: str
    later_s: float


def tries() -> list[Try]:
    """The seeded moments, spread over the phases of a run, however slow the machine is."""
    rng = random.Random(SEED)
    phases = ("started", "announced", "network", "nodes", "serving", "finishing")
    chosen = []
    for number in range(N_TRIES):
        links = number % 5 == 4
        phase = rng.choice(phases[:1] + phases[2:4] if links else phases)
        chosen.append(Try(links, number % 5 == 3, phase, rng.uniform(0, 0.6 if phase == "started" else 0.15)))
    return chosen


def reached(phase: str, run: Running, out: Path) -> bool:
    """Whether the command is so far, or has ended."""
    found: dict[str, Callable[[], bool]] = {
        "started": lambda: True,
        "announced": lambda: bool(announced(run.stderr)),
        "network": lambda: "tb:fabric" in processes(out).values(),
        "nodes": lambda: len(processes(out)) >= 5,
        "serving": lambda: bool(logged_tokens(out)),
        "finishing": lambda: "stopped" in _events(out),
    }
    return run.process.poll() is not None or found[phase]()


def _events(run_dir: Path) -> str:
    path = run_dir / "events.jsonl"
    return path.read_text(encoding="utf-8") if path.exists() else ""


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("orphans", "fabric")
def test_kill_9_at_random_moments_leaves_nothing_that_clean_does_not_remove(
    testbed: Testbed, small: str, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    env = {"TMPDIR": str(temporary)}
    starting = threading.Lock()
    own = all_namespaces()

    def kill(chosen: Try) -> set[str]:
        """Run the command up to its moment; answers the namespaces that its processes were in."""
        with starting:
            if chosen.links:
                run = testbed.start("links", small, "--network", "fabric", *SCALED, env=env)
                out = temporary
            else:
                clock = LONG_VIRTUAL if chosen.virtual else SCALED
                run = testbed.start_up(small, "--network", "fabric", "--no-report", *clock, env=env)
                out = Path(str(run.process.args[-1]))  # type: ignore[index]
        wait_until(lambda: reached(chosen.phase, run, out), chosen.phase)
        try:
            run.process.wait(chosen.later_s)
        except subprocess.TimeoutExpired:
            held = namespaces(list(processes(out)))
            run.kill()
            return held - own
        return set()

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        held = set().union(*pool.map(kill, tries()))
    assert held, "every run ended before its moment"
    wait_until(lambda: not processes(tmp_path), "the end of all processes by their death signal")
    wait_until(lambda: not held & all_namespaces(), "the end of the runs' namespaces")

    first = testbed("clean", "--out", str(testbed.runs), "--json", env=env, timeout_s=120)
    assert first.code == 0, first.stderr
    assert first.json()["problems"] == []
    # Python itself makes a file of eight characters for a moment, to see whether the folder can be written to.
    assert [path for path in temporary.iterdir() if not re.fullmatch(r"[a-z0-9_]{8}", path.name)] == []
    for run_dir in sorted(testbed.runs.iterdir()):
        assert not [path for path in run_dir.rglob("*") if path.is_socket() or path.suffix == HALF_WRITTEN]
        if logged_tokens(run_dir):
            assert_tables_hold_the_whole_log(run_dir)
    second = testbed("clean", "--out", str(testbed.runs), env=env)
    assert (second.code, cleaned(second.stdout, testbed.folder)) == (0, "nothing was left")


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("orphans", "fabric")
@pytest.mark.parametrize("victim", ["launcher", "fabric", "client-0", "mig-1g-0"])
def test_a_run_that_loses_any_of_its_processes_at_any_moment_keeps_its_record_and_leaves_nothing(
    victim: str, testbed: Testbed, small: str, tmp_path: Path
) -> None:
    rng = random.Random(f"{SEED}:{victim}")
    moments = [(rng.choice(("nodes", "serving")), rng.uniform(0, 0.3)) for _ in range(N_MOMENTS)]
    own = all_namespaces()
    starting = threading.Lock()

    def kill(moment: tuple[str, float]) -> tuple[int, Path, bool]:
        """Exit code and folder of a run, and whether the process was there to be killed."""
        phase, later_s = moment
        with starting:
            run = testbed.start_up(small, "--network", "fabric", "--no-report", "--no-twin", *SLOWER)
            out = Path(str(run.process.args[-1]))  # type: ignore[index]
        wait_until(lambda: reached(phase, run, out), phase)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(later_s)
        pids = [pid for pid, name in processes(out).items() if name == f"tb:{victim}"[:15]]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # the run has just ended
                os.kill(pid, signal.SIGKILL)
        return run.wait().code, out, bool(pids)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        ended = list(pool.map(kill, moments))
    assert any(was_there for _, _, was_there in ended), "every run ended before its moment"
    wait_until(lambda: not processes(testbed.runs), "the end of all processes")
    wait_until(lambda: not all_namespaces() - own, "the end of the runs' namespaces")
    for code, out, was_there in ended:
        assert code in ((0, 1) if was_there else (0,))
        if logged_tokens(out):
            assert_tables_hold_the_whole_log(out)
    answer = testbed("clean", "--out", str(testbed.runs), "--json", timeout_s=120)
    assert (answer.code, answer.json()["problems"], answer.json()["processes"]) == (0, [], [])


@pytest.mark.usefixtures("orphans")
def test_clean_lists_what_it_removed(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    run = testbed.runs / "run"
    (run / "figures").mkdir(parents=True)
    (run / OWNER).write_text('{"pid": 1, "started": "never"}', encoding="utf-8")
    (run / "figures" / "requests.png.part").touch()
    (run / "plan.json.part").touch()
    (temporary / "testbed-links-x").mkdir()
    (temporary / "somebody-elses").mkdir()
    answer = clean_command(testbed.runs)
    assert {
        kind: found for kind, found in answer.items() if kind != "processes"
    } == {  # it ends those of others
        "sockets": [],
        "files": [str(run / "figures" / "requests.png.part"), str(run / "plan.json.part")],
        "folders": [str(temporary / "testbed-links-x")],
        "completed": [],
        "problems": [],
    }
    assert [path.name for path in temporary.iterdir()] == ["somebody-elses"]
    assert not any(found for kind, found in clean_command(testbed.runs).items() if kind != "processes")


@pytest.mark.parametrize("lacking", TABLES)
@pytest.mark.usefixtures("orphans")
def test_clean_makes_the_table_that_a_kill_prevented(lacking: str, testbed: Testbed, small: str) -> None:
    run_dir = testbed.up(small, "--network", "memory", "--no-report").run_dir
    (run_dir / lacking).unlink()
    (run_dir / OWNER).write_text('{"pid": 1, "started": "never"}', encoding="utf-8")
    answer = clean_command(testbed.runs)
    assert (answer["completed"], answer["problems"]) == ([str(run_dir)], [])
    assert (run_dir / lacking).exists()
    assert_tables_hold_the_whole_log(run_dir)


@pytest.mark.usefixtures("orphans")
def test_clean_makes_a_trace_that_a_kill_prevented_and_none_that_was_refused(
    testbed: Testbed, small: str
) -> None:
    run_dir = testbed.up(small, "--network", "memory", "--no-report", "--no-trace").run_dir
    (run_dir / OWNER).write_text('{"pid": 1, "started": "never"}', encoding="utf-8")
    assert clean_command(testbed.runs)["completed"] == [] and not (run_dir / "trace.json").exists()
    (run_dir / "summary.json").unlink()  # the last file of all
    assert clean_command(testbed.runs)["completed"] == [str(run_dir)]
    assert (run_dir / "trace.json").exists()

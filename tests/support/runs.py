"""Whole runs for tests: the command as a process, its processes, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from nodes.eventlog import read_log
from nodes.records import Token
from tests.support.forked import COMMAND, Forked, asking, fork_command, forker_pid

FAST = ("--set", "workload.n_requests=3", "--set", "workload.n_output_tokens=4", "--set", "workload.rate=2")
FAST += ("--no-report",)
"""A run of five scenario seconds: in virtual time, unless the test adds what needs real time."""

PATIENCE_S = 150.0
"""How long anything may take on a machine that does many other things. It ends what hangs, and decides nothing else."""

MEMORY = ("--network", "memory")
"""All nodes in one process: under a second with ``FAST``."""

REAL = ("--clock", "real", "--time-scale", "50", "--no-twin")
"""With ``FAST``, a run in real time of about two seconds, most of it starting and ending."""

LONG = ("--clock", "real", "--time-scale", "20", "--no-twin", "--no-report")
LONG += ("--set", "workload.n_requests=60", "--set", "workload.n_output_tokens=128")
LONG += ("--set", "workload.rate=0.5")
"""A run that is still serving when a test interferes: a session takes three seconds."""


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file."""
    return list(pq.read_table(path).to_pylist())


def require(capability: str, missing: str | None) -> None:
    """Skips by name what this machine cannot do; fails if it is among what must run here."""
    if missing is None:
        return
    if os.environ.get("CI") == "true" or capability in os.environ.get("TESTBED_REQUIRE", "").split(","):
        pytest.fail(f"{capability} must work here: {missing}")
    pytest.skip(f"{capability}: {missing}", allow_module_level=True)


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S) -> Any:
    """Poll until ``condition()`` is truthy and answer it; fail with ``what`` after ``timeout_s``.

    The longer it has waited, the more rarely it asks: what it waits for may need the CPU.
    """
    deadline, pause_s = time.monotonic() + timeout_s, 0.005
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for: {what}"
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.05)
    return value


@dataclass(frozen=True)
class Outcome:
    """What a finished command answered."""

    code: int
    stdout: str
    stderr: str

    @property
    def run_dir(self) -> Path:
        """The run directory that ``testbed up`` announced."""
        return announced(self.stderr)[0]

    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value


def announced(stderr: str) -> list[Path]:
    return [Path(line[4:]) for line in stderr.splitlines() if line.startswith("run /")]


class Running:
    """A command in progress; its output goes to files, so that it can be read at any time.

    It is forked (``tests.support.forked``) unless it must be ``anew``. ``wrapper``: a command line that begins it in other
    namespaces or with other privileges. A forked command leaves blank figures unless it ``renders`` them.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        wrapper: Sequence[str] = (),
        anew: bool = False,
        renders: bool = False,
        said: str = "",
        program: str = COMMAND,
        forker: int | None = None,
    ) -> None:
        """``said``: what it reads from standard input; ``program``: as ``fork_command`` has it.

        ``forker``: as ``asking`` has it, for a ``wrapper``.
        """
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "stdin").write_text(said, encoding="utf-8")
        self._out, self._err = folder / "stdout", folder / "stderr"
        its_env = {**os.environ, **(env or {})}
        self.process: subprocess.Popen[bytes] | Forked
        with (
            open(folder / "stdin", "rb") as stdin,
            open(self._out, "wb") as out,
            open(self._err, "wb") as err,
        ):
            if wrapper or anew:
                begins, number = ([], None) if anew else asking(forker)
                self.process = subprocess.Popen(
                    [*wrapper, *begins, COMMAND, *arguments],
                    stdin=stdin,
                    stdout=out,
                    stderr=err,
                    cwd=folder,
                    env=its_env,
                    pass_fds=() if number is None else [number],
                )
            else:
                files = (stdin, out, err)
                self.process = fork_command(
                    arguments, folder, its_env, files, renders=renders, program=program
                )

    @property
    def stdout(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self._err.read_text(encoding="utf-8")

    def wait(self, timeout_s: float = PATIENCE_S) -> Outcome:
        """The outcome. A command that takes longer is killed, and fails the test."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"{self.process.args!r} did not end in {timeout_s:g} s; it said: {self.stderr}")
        return Outcome(code, self._out.read_text(encoding="utf-8"), self.stderr)

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def run_dir(self) -> Path:
        """The run directory, as soon as it is announced."""
        return wait_until(lambda: announced(self.stderr) or self.ended(), "the run directory")[0]

    def serving(self, n_tokens: int = 20) -> Path:
        """The run directory, as soon as its logs hold so many tokens."""
        run_dir = self.run_dir()
        wait_until(lambda: len(logged_tokens(run_dir)) >= n_tokens or self.ended(), f"{n_tokens} tokens")
        return run_dir

    def says(self, text: str) -> None:
        wait_until(lambda: text in self.stderr or self.ended(), repr(text))

    def ended(self) -> None:
        """Fails, with what it said, if it has ended."""
        assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.stderr}"


class Testbed:
    """Runs ``testbed`` commands, each in a folder of its own below ``folder``."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self._started: list[Running] = []
        self._count = 0

    def start(self, *arguments: str, **options: Any) -> Running:
        """The command in progress; ``options`` are those of ``Running``."""
        running = Running(arguments, self.folder / f"command-{len(self._started)}", **options)
        self._started.append(running)
        return running

    def __call__(self, *arguments: str, timeout_s: float = PATIENCE_S, **options: Any) -> Outcome:
        return self.start(*arguments, **options).wait(timeout_s)

    def start_up(self, *arguments: str, **options: Any) -> Running:
        """``testbed up ... --out`` this testbed's folder of runs."""
        self._count += 1
        out = str(self.runs / f"run-{self._count}")
        return self.start("up", *arguments, "--out", out, **options)

    def up(self, *arguments: str, timeout_s: float = PATIENCE_S, **options: Any) -> Outcome:
        return self.start_up(*arguments, **options).wait(timeout_s)

    def close(self) -> None:
        """Ends what a failed test left running."""
        for running in self._started:
            if running.process.poll() is None:
                running.kill()


def processes(below: Path) -> dict[int, str]:
    """Name by pid of every process of a run whose directory is ``below`` or under it."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has just ended
            run = _run_of(entry)
            if run is not None and run.is_relative_to(below):
                found[int(entry.name)] = (entry / "comm").read_text().rstrip("\n")
    return found


def _run_of(entry: Path) -> Path | None:
    for variable in (entry / "environ").read_bytes().split(b"\0"):
        if variable.startswith(b"TESTBED_RUN="):
            return Path(os.fsdecode(variable.partition(b"=")[2]))
    return None


def has_ended(pid: int) -> bool:
    """Whether a process has ended. Nobody may have asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    except (FileNotFoundError, ProcessLookupError):
        return True


def below(pid: int) -> list[int]:
    """The processes that ``pid`` has begun."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def node_pid(run_dir: Path, name: str) -> int:
    """The process of one node, as soon as it is there. The kernel keeps 15 characters of its name."""
    seen: dict[int, str] = {}

    def found() -> int | None:
        now = processes(run_dir)
        seen.update(now)
        return next((pid for pid, comm in now.items() if comm == f"tb:{name}"[:15]), None)

    try:
        return int(wait_until(found, f"process of {name}"))
    except AssertionError as error:
        raise AssertionError(f"{error}; the run's processes so far: {seen}") from error


def links() -> list[str]:
    """The network devices of this namespace."""
    return sorted(name for _, name in socket.if_nameindex())


def namespaces(pids: Sequence[int]) -> set[str]:
    """The network namespaces of these processes."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            found.add(str(Path(f"/proc/{pid}/ns/net").readlink()))
    return found


def all_namespaces() -> set[str]:
    """Those of all processes but of tests that another worker runs: the kernel gives freed numbers again."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has just ended
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
    return namespaces([pid for pid in parents if not _is_of_another_worker(pid, parents)])


def _is_of_another_worker(pid: int, parents: Mapping[int, int]) -> bool:
    controller = os.getppid()
    while pid in parents and pid not in (os.getpid(), forker_pid(), controller):
        if parents[pid] == controller and "PYTEST_XDIST_WORKER" in os.environ:
            return True
        pid = parents[pid]
    return False


def cleaned(said: str, folder: Path) -> str:
    """What ``testbed clean`` said, without the processes of other tests' runs that it ended on its way, or is ending."""
    lines = said.splitlines()
    of_processes = ("ended process ", "problem: process ")
    kept = [line for line in lines if not line.startswith(of_processes) or str(folder) in line]
    return "\n".join(kept) or "nothing was left"


def logged_tokens(run_dir: Path) -> dict[tuple[int, int], tuple[float, int]]:
    """(seconds, number of hops) by (request, token), straight from the clients' logs."""
    tokens: dict[tuple[int, int], tuple[float, int]] = {}
    for path in sorted((run_dir / "events").glob("*.log")):
        for record in read_log(path)[0]:
            if isinstance(record, Token):
                tokens[record.request, record.token] = (record.at_s - record.ready_at_s, len(record.hops))
    return tokens


def tabled_tokens(run_dir: Path) -> dict[tuple[int, int], tuple[float, int]]:
    """The same from ``hops.parquet``: the sum of the parts of every hop."""
    tokens: dict[tuple[int, int], tuple[float, int]] = {}
    for row in rows_of(run_dir / "hops.parquet"):
        key = (row["request"], row["token"])
        parts_s = row["hop_client_s"] + row["hop_network_s"] + row["hop_compute_s"]
        total_s, count = tokens.get(key, (0.0, 0))
        tokens[key] = (total_s + parts_s, count + 1)
    return tokens


def assert_tables_hold_the_whole_log(run_dir: Path) -> None:
    """Every logged token is in the tables, with parts that add up to its time; the trace loads."""
    logged, tabled = logged_tokens(run_dir), tabled_tokens(run_dir)
    assert logged and set(logged) == set(tabled)
    for key, (seconds, n_hops) in logged.items():
        assert tabled[key][1] == n_hops
        assert tabled[key][0] == pytest.approx(seconds, abs=1e-9)
    done: dict[int, int] = {}
    for request, _ in logged:
        done[request] = done.get(request, 0) + 1
    rows = {row["request"]: row["n_tokens_done"] for row in rows_of(run_dir / "requests.parquet")}
    assert {request: n for request, n in rows.items() if n} == done
    trace = json.loads((run_dir / "trace.json").read_text(encoding="utf-8"))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sum(span["name"].startswith("token ") for span in spans) == len(logged)


def assert_one_sentence(outcome: Outcome, *expected: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds every expected text."""
    assert outcome.code == 2, outcome.stderr
    assert outcome.stdout == ""
    lines = [
        line
        for line in outcome.stderr.splitlines()
        if not line.startswith(("run /", "network ", "waiting until "))
    ]
    assert len(lines) == 1, outcome.stderr
    assert lines[0].startswith("testbed: ")
    for text in expected:
        assert text in lines[0], lines[0]


@contextlib.contextmanager
def clean_testbed(folder: Path) -> Iterator[Testbed]:
    """The command, in a folder of its own. No process and no device may be left at the end."""
    before = links()
    testbed = Testbed(folder)
    yield testbed
    testbed.close()
    try:
        wait_until(lambda: not processes(folder), "the end of every process of the run")
    finally:
        for pid in processes(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert links() == before

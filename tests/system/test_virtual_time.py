"""Virtual time: runs that repeat, agree whatever their network, and need nothing of Linux; and its twin of real runs."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.runs import (
    FAST,
    MEMORY,
    Outcome,
    Testbed,
    assert_one_sentence,
    assert_tables_hold_the_whole_log,
    clean_testbed,
    logged_tokens,
    processes,
    rows_of,
    wait_until,
)
from tests.system.test_moving_servers import ENV
from tests.system.test_recovery import DECODE, NOTHING_LEFT, SCENARIO, events, fault

SHIFT = (
    *("load-shift", "--set", "workload.n_requests=20", "--set", "workload.n_output_tokens=16"),
    *("--set", "workload.rate=0.16", "--set", 'workload.changes=[{at="15 s", rate=2.0}]'),
    *("--set", "policy.online_patience=10 s", "--set", "policy.online_period=5 s"),
)
"""The shipped scenario in which servers change their blocks as the load rises, in a fraction of its time."""

KILL = fault("kill", DECODE, **{"for": '"2 s"'})
STOP = fault("stop", DECODE, **{"for": '"8 s"'}) + '\n[recovery]\nrequest_timeout = "3 s"\n'
SLOW = fault("slow", 'at = "1 s"', factor="3", **{"for": '"4 s"'})
CUT = '\n[[network.event]]\nat = "2 s"\nfor = "3 s"\npartition = ["b"]\n'
"""The client's site is cut off from the servers'."""
RESTLESS = (
    KILL + SLOW + CUT + '\n[[network.event]]\nat = "0 s"\nlink = ["a", "b"]\njitter = "9 ms"\nloss = "2 %"\n'
)
"""Everything at once, with chance in every link."""
FABRIC = ("--network", "fabric")
CHAIN = ("--set", "policy.communication=server-to-server")
WANDERING = ("--set", "policy.online=tests.support.wandering:Draining", "--set", "policy.load_rate=40 Gbit/s")

HELD_BACK_S = 1e-4
"""How far apart two runs on fabric may be, in seconds, where messages are larger than the congestion window: TCP can hold
three segments back for an acknowledgement (docs/virtual-time.md), and they take 36 us on 1 Gbit/s."""
CASES: dict[str, tuple[str, tuple[str, ...], set[str]]] = {
    "a server is killed and comes back": (KILL, (), {"fault", "detected", "replayed", "begun"}),
    "a server stops": (STOP, (), {"fault", "detected", "replayed", "fault-over"}),
    "a server slows down": (SLOW, (), {"fault", "fault-over"}),
    "a link is cut": (CUT, (), {"network-change"}),
    "a link is cut and prompts fill the congestion window after it": (
        *(SLOW + CUT, ()),
        {"network-change", "fault", "fault-over"},
    ),
    "servers forward": ("", CHAIN, set()),
    "servers forward and one is killed": (KILL, CHAIN, {"fault", "detected", "replayed", "begun"}),
    "servers move their blocks": ("", WANDERING, {"moving", "moved"}),
}
"""Faults of the scenario, options, and events that there must be."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Writes the scenario of ``test_recovery`` with these faults, and half as many tokens."""

    def write(faults: str) -> str:
        path = tmp_path_factory.mktemp("written") / "virtual.toml"
        path.write_text(
            (SCENARIO % 1000.0).replace("n_output_tokens = 60", "n_output_tokens = 30") + faults,
            encoding="utf-8",
        )
        return str(path)

    return write


class Made:
    """Runs that tests share, each made when it is first asked for; not to be changed."""

    def __init__(self, testbed: Testbed, write: Callable[[str], str]) -> None:
        self.of = functools.cache(functools.partial(up, testbed))
        self.with_faults = functools.cache(lambda faults, *options: self.of(write(faults), *options))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, written: Callable[[str], str]) -> Iterator[Made]:
    with clean_testbed(tmp_path_factory.mktemp("made")) as testbed:
        yield Made(testbed, written)


def up(testbed: Testbed, *arguments: str, anew: bool = False) -> Outcome:
    """A run in virtual time in which every request completes. The stub's hub checks every token."""
    outcome = testbed.up(*arguments, "--json", "--no-report", env=ENV, anew=anew)
    assert outcome.code == 0, outcome.stderr
    summary = outcome.json()
    assert (summary["clock"], summary["n_completed"]) == ("virtual", summary["n_requests"])
    assert summary["n_requests"] > 0
    assert summary["leaks"] == NOTHING_LEFT
    assert_tables_hold_the_whole_log(outcome.run_dir)
    return outcome


OTHER_HASHES = (False, True)
"""Whether a run is begun anew: then it has other hashes, and sets another order, than one that is forked."""


def contents(run_dir: Path) -> dict[str, bytes]:
    """All files that say what happened in a run, by name."""
    names = ["events.jsonl", "hops.parquet", "requests.parquet", "trace.json", "scenario.toml"]
    paths = [run_dir / name for name in names]
    paths += sorted((run_dir / "events").iterdir()) + sorted((run_dir / "logs").iterdir())
    assert list((run_dir / "events").iterdir()) and list((run_dir / "logs").iterdir())
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in paths}


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that gets no CPU meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def assert_rows_agree(one: Path, other: Path, within_s: float) -> None:
    """The tables have the same rows, whose numbers differ by no more than this."""
    for name in ("requests.parquet", "hops.parquet"):
        rows, others = rows_of(one / name), rows_of(other / name)
        assert len(rows) == len(others) > 0
        for row, its in zip(rows, others, strict=True):
            assert set(row) == set(its)
            for key, value in row.items():
                if isinstance(value, float) and its[key] is not None:
                    assert its[key] == pytest.approx(value, rel=0, abs=within_s), (
                        name,
                        key,
                        row,
                        its,
                    )
                else:
                    assert its[key] == value, (name, key, row, its)


def without_times(value: Any) -> Any:
    """What an event says, but for when and how long."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if not key.endswith("_s")}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def happened(run_dir: Path) -> dict[int | None, list[Any]]:
    """The events of each request, and of none, in their order, without the times; which network there is does not count.

    What happens to two requests at the same instant may be written either way round: fabric repeats runs to the
    microsecond, not to the order within one.
    """
    found: dict[int | None, list[Any]] = {}
    for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = without_times(json.loads(line))
        if event["event"] != "network":
            found.setdefault(event.get("request"), []).append(event)
    return found


def test_the_same_seed_repeats_a_run_on_memory_to_the_last_byte(
    testbed: Testbed, written: Callable[[str], str]
) -> None:
    runs = [up(testbed, written(RESTLESS), *MEMORY, anew=anew).run_dir for anew in OTHER_HASHES]
    assert contents(runs[0]) == contents(runs[1])
    other = up(testbed, written(RESTLESS), *MEMORY, "--seed", "2").run_dir
    assert contents(other)["hops.parquet"] != contents(runs[0])["hops.parquet"]


def test_the_same_seed_repeats_moves_of_blocks_on_memory_to_the_last_byte(
    testbed: Testbed, made: Made
) -> None:
    runs = [made.of(*SHIFT, *MEMORY).run_dir, up(testbed, *SHIFT, *MEMORY, anew=True).run_dir]
    assert contents(runs[0]) == contents(runs[1])


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize(
    ("faults", "within_s"),
    [(SLOW, 1e-6), (KILL + SLOW + CUT, HELD_BACK_S), (STOP, HELD_BACK_S)],
    ids=["slow", "killed, slow, cut", "stopped"],
)
def test_the_same_seed_repeats_a_run_on_fabric(
    faults: str, within_s: float, testbed: Testbed, made: Made, written: Callable[[str], str]
) -> None:
    """What only slows down is in the second case, too: its other run has the same hashes."""
    other = up(testbed, written(faults), *FABRIC, anew=faults != SLOW)
    runs = [made.with_faults(faults, *FABRIC).run_dir, other.run_dir]
    assert happened(runs[0]) == happened(runs[1])
    assert_rows_agree(*runs, within_s)


@pytest.mark.usefixtures("fabric")
def test_fabric_does_not_see_that_processes_wait_for_a_cpu(
    testbed: Testbed, made: Made, written: Callable[[str], str]
) -> None:
    """Processes are paused, one after the other, for up to 0.2 s each, so that TCP measures round trips of any length.

    Every second one is the client's: nothing goes on without it, so that the run cannot end before there were enough.
    """
    running = testbed.start_up(written(KILL + SLOW + CUT), *FABRIC, "--no-report", env=ENV)
    run_dir, chance, n_paused = testbed.runs / "run-1", Random(1), 0
    while running.process.poll() is None:
        if of := processes(run_dir):
            clients = [pid for pid, name in of.items() if name == "tb:client-0"]
            pids = clients if clients and n_paused % 2 else sorted(of)
            with suppress(ProcessLookupError), paused(chance.choice(pids)):
                time.sleep(chance.choice([0.002, 0.02, 0.2]))
            n_paused += 1
        time.sleep(0.005)
    assert running.wait().code == 0
    assert n_paused >= 10
    run_dirs = [run_dir, made.with_faults(KILL + SLOW + CUT, *FABRIC).run_dir]
    assert happened(run_dirs[0]) == happened(run_dirs[1])
    assert_rows_agree(*run_dirs, HELD_BACK_S)


def assert_networks_agree(memory: Outcome, fabric: Outcome) -> None:
    assert (memory.json()["network"], fabric.json()["network"]) == ("memory", "fabric")
    assert happened(memory.run_dir) == happened(fabric.run_dir)
    rows, others = (rows_of(outcome.run_dir / "requests.parquet") for outcome in (memory, fabric))
    for key in ("request", "client", "status", "chain", "n_tokens_done", "n_recoveries"):
        assert [row[key] for row in rows] == [row[key] for row in others]
    for name in ("per_token_s", "ttft_s", "tpot_s", "e2e_s"):
        found, expected = (outcome.json()["metrics"][name]["mean"] for outcome in (fabric, memory))
        assert found == pytest.approx(expected, rel=1e-4), name
    for row, other in zip(rows, others, strict=True):
        assert other["per_token_s"] == pytest.approx(row["per_token_s"], rel=1e-4)


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize("case", CASES)
def test_memory_and_fabric_agree_when(case: str, made: Made) -> None:
    faults, options, expected = CASES[case]
    memory, fabric = (made.with_faults(faults, *network, *options) for network in (MEMORY, FABRIC))
    assert expected <= {event["event"] for events in happened(memory.run_dir).values() for event in events}
    assert_networks_agree(memory, fabric)


@pytest.mark.usefixtures("fabric")
def test_memory_and_fabric_agree_when_a_policy_moves_blocks_as_the_load_rises(made: Made) -> None:
    memory, fabric = (made.of(*SHIFT, *network) for network in (MEMORY, FABRIC))
    assert len(events(memory.run_dir, "moved")) >= 2
    assert [move["new"] for move in memory.json()["moves"]] == [
        move["new"] for move in fabric.json()["moves"]
    ]
    assert_networks_agree(memory, fabric)


LARGE_PROMPTS = """
name = "large-prompts"
model = { profile = "bloom-176b", n_blocks = 4 }
servers = [{ hardware = "a100", site = "There" }]
clients = { site = "Here" }
network = { kind = "clusters", pairs = [{ sites = ["Here", "There"], rtt = "200 ms", rate = "1 Gbit/s" }] }
[workload]
arrivals = "listed"
requests = REQUESTS
n_input_tokens = "trace"
n_output_tokens = "trace"
[policy]
name = "proposed"
"""


BURSTS = "[[0.0, 80, 6], [0.02, 80, 6], [0.3, 5, 6], [0.4, 80, 6], [0.41, 80, 6], [0.42, 80, 6]]"
"""Prompts of 2.3 MB on a path that holds 25 MB: decode steps do not wait behind them."""
APART = "[[0.0, 400, 6], [3.0, 5, 6], [6.0, 400, 6]]"
"""Prompts of 11.5 MB: connections begin with windows of as much, which less than a third is sent for."""
TOGETHER = "[[0.0, 450, 6], [0.02, 450, 6], [0.3, 5, 6], [0.6, 450, 6], [2.5, 5, 9], [2.6, 450, 6]]"
"""Prompts of 13 MB, of which two exceed the receive window. That of ``fabric`` begins with 53 kB less (0.4 %)."""


@pytest.mark.usefixtures("fabric")
@pytest.mark.parametrize(
    ("requests", "tolerance"),
    [(BURSTS, 1e-3), (APART, 1e-3), (TOGETHER, 5e-3)],
    ids=["bursts", "apart", "together"],
)
def test_memory_and_fabric_agree_where_more_is_under_way_than_a_new_connections_window(
    requests: str, tolerance: float, testbed: Testbed, tmp_path: Path
) -> None:
    scenario = tmp_path / "large-prompts.toml"
    scenario.write_text(LARGE_PROMPTS.replace("REQUESTS", requests), encoding="utf-8")
    memory, fabric = (up(testbed, str(scenario), "--network", network) for network in ("memory", "fabric"))
    for name in ("ttft_s", "tpot_s"):
        found, expected = (outcome.json()["metrics"][name]["max"] for outcome in (memory, fabric))
        assert found == pytest.approx(expected, rel=tolerance), name


CONTRADICTIONS = {
    "a time scale": (("clustered", "--clock", "virtual", "--time-scale", "20"), ("time scale of 20",)),
    "netem": (("clustered", "--clock", "virtual", "--network", "netem"), ("netem network needs real time",)),
    "loopback": (("clustered", "--clock", "virtual", "--network", "loopback"), ("loopback network",)),
    "a congestion control": (
        ("clustered", "--clock", "virtual", "--set", "tcp.congestion_control=cubic"),
        ("congestion control cubic",),
    ),
    "hold": (("clustered", "--clock", "virtual", "--hold"), ("--hold",)),
    "memory in real time": (("clustered", *MEMORY, "--clock", "real"), ("memory network", "clock real")),
    "memory with a time scale": (("clustered", *MEMORY, "--time-scale", "20"), ("memory network", "of 20")),
    "memory held up": (("clustered", *MEMORY, "--hold"), ("memory network", "--hold")),
}


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_what_virtual_time_cannot_do_is_one_sentence_and_exit_code_2(
    contradiction: str, testbed: Testbed
) -> None:
    arguments, expected = CONTRADICTIONS[contradiction]
    assert_one_sentence(testbed.up(*arguments), *expected, "virtual", "leave")
    assert not testbed.runs.exists()


POLICY = """
import os
from pathlib import Path

from policies.petals_routing import PetalsRouting


class Endless:
    '''Routes the first request, and never decides about the second.'''

    name = "endless"

    def bind(self, problem, placement):
        inner = PetalsRouting().bind(problem, placement)

        class Router:
            def route(self, request, state, now_s):
                while Path(os.environ["ROUTED"]).exists():
                    Path(os.environ["DECIDING"]).touch()
                Path(os.environ["ROUTED"]).touch()
                return inner.route(request, state, now_s)

        return Router()
"""


def test_an_interrupt_ends_a_policy_that_never_decides(
    virtual: str, testbed: Testbed, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "endless.py").write_text(textwrap.dedent(POLICY))
    deciding = tmp_path / "deciding"
    env = {"PYTHONPATH": str(tmp_path / "lib"), "ROUTED": str(tmp_path / "routed"), "DECIDING": str(deciding)}
    names = ("--placement", "petals", "--routing", "endless:Endless")
    run = testbed.start_up("clustered", "--network", virtual, *names, *FAST, env=env)
    wait_until(deciding.exists, "the decision that never ends")
    run.interrupt()
    outcome = run.wait()
    assert outcome.code == 130, outcome.stderr
    assert "Traceback" not in outcome.stderr
    summary = json.loads((outcome.run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["n_requests"] == 3 and summary["n_completed"] <= 1
    assert summary["n_interrupted"] + summary["n_not_started"] == 3 - summary["n_completed"]


def test_an_interrupt_in_virtual_time_keeps_the_record_up_to_that_moment(
    virtual: str, testbed: Testbed
) -> None:
    endless = ("--set", "workload.n_output_tokens=1000", "--set", "workload.n_requests=1000")
    run = testbed.start_up("clustered", "--network", virtual, *endless, "--no-report")
    run_dir = run.serving()
    before = logged_tokens(run_dir)
    run.interrupt()
    outcome = run.wait()
    assert outcome.code == 130, outcome.stderr
    assert "interrupted" in outcome.stdout and "Traceback" not in outcome.stderr
    assert_tables_hold_the_whole_log(run_dir)
    assert set(before) <= set(logged_tokens(run_dir))
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    assert summary["n_completed"] < summary["n_requests"] == 1000


WITH_TWIN = ("--clock", "real", "--time-scale", "50", "--network", "loopback")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run in real time and its twin; not to be changed."""
    return Testbed(tmp_path_factory.mktemp("judged")).up("clustered", *WITH_TWIN, "--json", *FAST)


def test_a_run_in_real_time_is_judged_by_its_twin(judged: Outcome) -> None:
    assert judged.code == 0, judged.stderr
    summary = judged.json()
    assert (summary["clock"], summary["network"], summary["time_scale"]) == ("real", "loopback", 50)
    assert summary["emulation_error_of"] == "twin"
    assert summary["emulation_error_pairing"] in ("requests", "distributions")
    assert summary["emulation_error"]["queue_s"]["mean_abs_s"] is not None
    twin = json.loads((judged.run_dir / "twin" / "summary.json").read_text(encoding="utf-8"))
    assert (twin["clock"], twin["network"], twin["time_scale"]) == ("virtual", "memory", 1)
    assert twin["n_completed"] == twin["n_requests"] == 3
    for name in ("queue_s", "ttft_s", "tpot_s", "per_token_s", "e2e_s"):
        assert summary["twin"][name] == twin["metrics"][name]
    rows, its = (rows_of(folder / "requests.parquet") for folder in (judged.run_dir, judged.run_dir / "twin"))
    assert [row["arrival_at_s"] for row in rows] == [row["arrival_at_s"] for row in its]


def test_a_twin_is_the_run_in_virtual_time_that_one_could_have_asked_for(judged: Outcome, made: Made) -> None:
    asked = made.of("clustered", *MEMORY, *FAST).run_dir
    for name in ("requests.parquet", "hops.parquet", "events.jsonl"):
        assert (asked / name).read_bytes() == (judged.run_dir / "twin" / name).read_bytes()


def test_a_twin_has_a_trace_where_the_run_has_one(judged: Outcome, testbed: Testbed) -> None:
    assert (judged.run_dir / "twin" / "trace.json").exists()
    outcome = testbed.up("clustered", *WITH_TWIN, "--no-trace", *FAST)
    assert (outcome.run_dir / "twin" / "summary.json").exists()
    assert not any((outcome.run_dir / folder / "trace.json").exists() for folder in (".", "twin"))


def test_no_twin_leaves_the_twin_out(testbed: Testbed) -> None:
    outcome = testbed.up("clustered", *WITH_TWIN, "--no-twin", *FAST)
    assert outcome.code == 0, outcome.stderr
    summary = json.loads((outcome.run_dir / "summary.json").read_text(encoding="utf-8"))
    assert "twin" not in summary and not (outcome.run_dir / "twin").exists()
    assert (summary["clock"], summary["emulation_error_of"]) == ("real", None)
    assert "no errors are stated: the run has no twin" in outcome.stdout
    assert "running the twin" not in outcome.stderr


def test_a_run_in_virtual_time_has_no_twin(finished: Outcome) -> None:
    assert "twin" not in finished.json() and not (finished.run_dir / "twin").exists()
    assert (finished.json()["clock"], finished.json()["emulation_error_of"]) == ("virtual", "closed model")


@pytest.mark.parametrize("kind", ["judged", "finished"])
def test_report_rebuilds_the_same_summary(
    kind: str, testbed: Testbed, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "judged":
        first: Outcome = request.getfixturevalue("judged")
    else:
        first = request.getfixturevalue("made").of("clustered", *MEMORY, *FAST)
    copy = tmp_path / "copy"
    shutil.copytree(first.run_dir, copy)
    (copy / "summary.json").unlink()
    again = testbed("report", str(copy), "--json")
    assert again.code == 0, again.stderr
    assert again.json() == first.json()
    assert again.json() == json.loads((copy / "summary.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("options", "engine"),
    [(("--clock", "virtual"), "virtual"), ((), "fast"), (("--mode", "reference"), "reference")],
    ids=["virtual", "fast", "reference"],
)
def test_simulate_says_which_engine_it_took(options: tuple[str, ...], engine: str, testbed: Testbed) -> None:
    workload = tuple(word for word in FAST if word != "--no-report")
    outcome = testbed("simulate", "clustered", *options, *workload, "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.json()["engine"] == engine


ELSEWHERE = '''
"""Another system than Linux, as far as a module that is imported first can make it one."""

import importlib.abc
import os
import select
import socket
import sys
import sysconfig
import types


class NotThere(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "pyroute2":
            raise ModuleNotFoundError("there is no pyroute2 on this system", name=name)


def find(path):
    if str(path).startswith(("/proc", "/sys", "/dev/net")):
        raise FileNotFoundError(2, "there is no such folder on this system", str(path))


def opened(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"):
        find(arguments[0])


def stat(path, *arguments, its=os.stat, **options):
    find(path)
    return its(path, *arguments, **options)


sysconfig.get_config_vars()  # how this Python was built is not the question
sys.modules["_scproxy"] = types.ModuleType("_scproxy")  # the other system's own module
sys.modules["_scproxy"]._get_proxy_settings = sys.modules["_scproxy"]._get_proxies = dict
sys.platform = "darwin"
sys.meta_path.insert(0, NotThere())
sys.addaudithook(opened)
os.stat = stat
for module, names in (
    (os, ("memfd_create", "eventfd", "eventfd_read", "eventfd_write", "pidfd_open", "setns", "unshare")),
    (os, ("sched_setaffinity", "sched_getaffinity", "sched_setscheduler")),
    (select, ("epoll",)),
    (socket, ("AF_NETLINK", "AF_PACKET")),
):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
'''


def test_a_run_on_memory_needs_nothing_that_only_linux_has(
    testbed: Testbed, made: Made, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").write_text(ELSEWHERE)
    env = {"PYTHONPATH": str(tmp_path / "lib")}
    outcome = testbed.up("clustered", "--json", *MEMORY, *FAST, env=env, anew=True)
    assert outcome.code == 0, outcome.stderr
    assert (outcome.json()["network"], outcome.json()["n_completed"]) == ("memory", 3)
    chosen = testbed.up("clustered", "--json", *FAST, env=env, anew=True)
    assert chosen.code == 0, chosen.stderr
    assert (chosen.json()["network"], chosen.json()["clock"]) == ("memory", "virtual")
    assert contents(chosen.run_dir)["hops.parquet"] == contents(outcome.run_dir)["hops.parquet"]
    here = made.of("clustered", *MEMORY, *FAST)
    assert contents(here.run_dir) == contents(outcome.run_dir)

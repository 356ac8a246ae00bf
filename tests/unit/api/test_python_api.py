"""``import testbed as tb``: the command line's work and sentences, without a word on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import testbed as tb
from policies.cgbp import CgBp
from policies.petals import PetalsPlacement
from policies.problem import Hop, Placement, Problem, Route
from policies.wsrr import WsRr
from testbed.cli.main import app
from testbed.errors import TestbedError
from testbed.records.base import data_of
from tests.support.full_disk import files_no_longer_than

SMALL = {"workload.n_requests": 6, "workload.rate": 0.5, "workload.n_output_tokens": 8}


class Both:
    """A pair in one object: PETALS' placement with WS-RR."""

    name = "both"

    def __init__(self, n: int = 0) -> None:
        self.n = n

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        return PetalsPlacement().place(problem, design_concurrency)

    def bind(self, problem: Problem, placement: Placement) -> Any:
        return WsRr().bind(problem, placement)


class Nonsense(Both):
    """Places as PETALS and routes as WS-RR do, but for what it is given to return."""

    name = "nonsense"

    def __init__(self, placement: Placement | None = None, route: Any = None) -> None:
        super().__init__()
        self.placement, self.route_to = placement, route

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        return self.placement or super().place(problem, design_concurrency)

    def bind(self, problem: Problem, placement: Placement) -> Any:
        return self if self.route_to is not None else super().bind(problem, placement)

    def route(self, *_: Any) -> Any:
        return self.route_to


class Named(Both):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Unpicklable(Both):
    name = "unpicklable"

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


MINE = """
import testbed as tb
from policies.cgbp import CgBp
from policies.wsrr import WsRr

class Mine:
    name = "mine"
    def place(self, problem, design_concurrency=None):
        return CgBp().place(problem, design_concurrency)
    def bind(self, problem, placement):
        return WsRr().bind(problem, placement)
"""
"""The beginning of a script with a policy of its own."""


@pytest.fixture
def small() -> tb.Scenario:
    return tb.scenario("clustered", SMALL)


@pytest.fixture(autouse=True)
def nothing_is_printed(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert capfd.readouterr() == ("", "")


def test_the_names_are_those_of_all() -> None:
    assert dir(tb) == tb.__all__ == sorted(tb.__all__)
    assert all(getattr(tb, name).__module__.startswith("testbed.") for name in tb.__all__)
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        _ = tb.simulat


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, testbed; print(any(m in sys.modules for m in ('pyarrow', 'numpy', 'aiohttp', 'typer')))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


def test_a_scenario_is_a_name_a_file_a_dict_or_a_scenario(small: tb.Scenario, tmp_path: Path) -> None:
    Path("mine.toml").write_text(small.toml, encoding="utf-8")
    again = [tb.scenario(source) for source in ("mine.toml", Path("mine.toml"), small.tables, small)]
    ran = tb.simulate(small)
    for one in again:
        assert tb.simulate(one).requests.equals(ran.requests)
    assert [one.name for one in again] == ["clustered"] * 4
    assert tb.scenario({**small.tables, "name": "mine"}).name == "mine"
    assert small.changed({"seed": 9}).tables["seed"] == 9 and small.tables["seed"] == 0
    assert repr(tb.scenario("clustered", {"seed": 1})) == "scenario('clustered', {'seed': 1})"


def test_values_of_numpy_tuples_and_paths_are_values_of_a_scenario() -> None:
    changes = {
        "workload.rate": np.float64(0.25),
        "workload.n_requests": np.int64(3),
        "description": Path("a/b"),
    }
    made = tb.scenario("clustered", changes)
    assert made.tables["workload"]["rate"] == 0.25 and made.description == "a/b"
    assert made.tables["workload"]["n_requests"] == 3


def contains_itself() -> dict[str, Any]:
    table: dict[str, Any] = {"name": "x"}
    table["model"] = [table]
    return table


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (
            lambda: tb.scenario("clustered", {"workload.rat": 1}),
            r'workload\.rat: unknown key \(did you mean "rate"\?\)',
        ),
        (lambda: tb.scenario("clustered", {"seed": None}), "seed: a scenario has no values such as None"),
        (lambda: tb.scenario({"model": 3}), "scenario: model: must be a table, not 3"),
        (lambda: tb.scenario("nowhere.toml"), "no such file or shipped scenario"),
        (lambda: tb.simulate("clustered", "petal"), 'unknown policy pair "petal"'),
        (lambda: tb.simulate("clustered", "petals+nothing"), "there is no routing policy 'nothing'"),
        (lambda: tb.simulate("clustered", object()), "has no method place"),
        (lambda: tb.simulate("clustered", ("petals", Problem)), "without arguments failed"),
        (lambda: tb.simulate("clustered", ("a", "b", "c")), "has 3 parts"),
        (lambda: tb.simulate("clustered", engine="slow"), "must be fast, virtual or reference, not 'slow'"),
        (lambda: tb.simulate("clustered", slo="ttft=soon"), "--slo"),
        (lambda: tb.simulate("nowhere.json"), "nowhere.json"),
        (lambda: tb.up("clustered", network="paper"), "network.backend"),
        (lambda: tb.load("nowhere"), "there is no run nowhere"),
        (lambda: tb.sweep("clustered", {"policy": ["petals"]}), r"policies=\[\.\.\.\]"),
        (lambda: tb.sweep("clustered", {"workload.rate": []}), "there are no values"),
        (lambda: tb.sweep("clustered", {("seed", "workload.rate"): [(1,)]}), "must be a tuple of 2"),
        (lambda: tb.sweep("clustered", policies=[None]), "None is no policy"),
        (lambda: tb.sweep("clustered", policies=3), "policies must be a list, not 3"),
        (lambda: tb.sweep("clustered", {"workload.rate": 0.5}), "give a list of values for a key"),
        (lambda: tb.sweep("clustered", {("seed", "workload.rate"): [1, 2]}), "must be a tuple of 2"),
        (lambda: tb.sweep("clustered", 3), "over must be a dict of values by key, not 3"),
        (lambda: tb.load(3), "a run is its directory's path, not 3"),
        (lambda: tb.load("a\0b"), "a run is its directory's path, which can have no NUL character"),
        (lambda: tb.simulate("clustered", out="a\0b"), "out is a folder's path, which can have no NUL"),
        (lambda: tb.up("clustered", network="memory", out="a\0b"), "out is a folder's path, which"),
        (lambda: tb.sweep("clustered", out="a\0b"), "out is a folder's path, which can have no NUL"),
        (lambda: tb.sweep("clustered", out="~nobody-here/a"), "out is a folder's path, but .* of no user"),
        (lambda: tb.score("proposed", out=3), "out is a folder's path, not 3"),
        (lambda: tb.score("proposed", 5), "suite is a shipped suite's name, or a folder, not 5"),
        (lambda: tb.sweep("clustered", metrics=[5]), "metrics are names such as ttft_s, not 5"),
        (lambda: tb.simulate("clustered", progress=5), "progress is a function that is called with"),
        (
            lambda: tb.scenario("clustered", {"name": "a\ud800"}),
            r"name: 'a\\ud800' is no text that a file can",
        ),
        (lambda: tb.scenario(contains_itself()), "tables are nested too deep, or contain themselves"),
        (lambda: tb.sweep("clustered", {3: [1]}), "give a list of values for a key"),
        (
            lambda: tb.sweep("clustered", {("a", "b"): "0.1:1:0.1"}),
            "or tuples for several keys, not '0.1:1:0.1'",
        ),
        (lambda: tb.sweep("clustered", runs="3"), "runs must be a whole number, not '3'"),
        (lambda: tb.sweep("clustered", seed=10**30), "--seed must be at most"),
        (lambda: tb.scenario(3), "a scenario is a name, a file, a dict"),
        (lambda: tb.scenario("clustered", "a=1"), "changes are a dict"),
        (lambda: tb.simulate("clustered", slo={"ttft": "5s"}), "ttft must be a number of seconds"),
        (lambda: tb.simulate("clustered", slo={"ttft": True}), "must be a number of seconds, not True"),
        (lambda: tb.simulate("clustered", seed=1.5), "seed must be a whole number, not 1.5"),
        (lambda: tb.sweep("clustered", runs=True), "runs must be a whole number, not True"),
        (lambda: tb.up("clustered", report="no"), "report must be True or False, not 'no'"),
        (lambda: tb.score("swarm", checks=0), "checks must be True or False, not 0"),
        (lambda: tb.sweep("clustered", {"workload.rate": [10**400]}), "does not fit into 64 bits"),
        (lambda: tb.simulate("x" * 5000), "File name too long"),
        (
            lambda: tb.load("x" * 5000),
            "a run is its directory's path, but .* cannot be one: File name too long",
        ),
        (
            lambda: tb.simulate("clustered", Nonsense(Placement("x", None, ()))),
            "must return ranges as a tuple",
        ),
        (
            lambda: tb.simulate("clustered", Nonsense(route=Route((Hop(0, 0, 1), (1, 1, 2)), 0.0, 0.0))),
            "a tuple of Hop",
        ),
        (
            lambda: tb.simulate("clustered", Nonsense(route=Route((Hop(np.int64(7), 0, 1),), 0.0, 0.0))),
            "whole numbers of Python",
        ),
        (lambda: tb.simulate("clustered", ("petals", Named(""))), "has no name"),
        (lambda: tb.sweep("clustered", jobs=0), "--jobs must be at least 1"),
        (lambda: tb.sweep("clustered", policies=[Unpicklable()]), "cannot be copied to other processes"),
    ],
)
def test_wrong_input_is_a_user_error_with_one_sentence(ask: Any, sentence: str) -> None:
    with pytest.raises(tb.UserError, match=sentence) as raised:
        ask()
    assert "\n" not in str(raised.value)
    assert issubclass(tb.UserError, tb.TestbedError) and TestbedError is tb.TestbedError


def test_an_infeasible_placement_is_a_user_error() -> None:
    with pytest.raises(tb.UserError, match=r"^clustered: CG-BP"):
        tb.simulate(tb.scenario("clustered", {"servers.0.count": 1, "servers.1.count": 0}))


@pytest.mark.parametrize("engine", ["fast", "virtual"])
def test_a_simulation_is_the_commands(small: tb.Scenario, engine: str, tmp_path: Path) -> None:
    """The same files, byte for byte but for times of decisions."""
    options = [f"--set={change}" for change in small.changes]
    clock = ["--clock", "virtual"] if engine == "virtual" else []
    done = CliRunner().invoke(
        app, ["simulate", "clustered", *options, *clock, "--policy", "petals", "--out", "command"]
    )
    assert done.exit_code == 0, done.output
    ran = tb.simulate(small, "petals", engine=engine, out="api")
    assert ran.path == Path("api") and ran.engine == engine and ran.policy == "petals" and ran.seed == 0
    for name, table in (("requests.parquet", ran.requests), ("hops.parquet", ran.hops)):
        there = pq.read_table(tmp_path / "command" / name)
        assert there.equals(pq.read_table(tmp_path / "api" / name)) and there.equals(table)
    loaded, by_command = tb.load("api"), tb.load("command")
    assert loaded.requests.equals(ran.requests) and loaded.hops.equals(ran.hops)
    assert (loaded.engine, loaded.policy, loaded.seed) == (ran.engine, ran.policy, ran.seed)
    assert loaded.plan.placement == ran.plan.placement == by_command.plan.placement
    assert loaded.summary.metrics == by_command.summary.metrics
    assert dict(ran.summary)["n_completed"] == 6 and dict(ran.plan)["servers"][0] == "mig-1g-0"


def test_a_run_whose_tables_are_gone_or_broken_says_how_to_get_them(
    small: tb.Scenario, tmp_path: Path
) -> None:
    tb.simulate(small, out="run")
    (tmp_path / "run" / "requests.parquet").write_bytes(b"PAR1")
    (tmp_path / "run" / "hops.parquet").unlink()
    run = tb.load("run")
    with pytest.raises(tb.UserError, match=r"cannot read run/requests\.parquet \(.*\); simulate it again"):
        _ = run.requests
    with pytest.raises(tb.UserError, match=r"run has no hops\.parquet: simulate it again with --out"):
        _ = run.hops


@pytest.mark.parametrize("engine", ["fast", "virtual"])
def test_without_a_folder_nothing_is_left_and_all_is_there(
    small: tb.Scenario, engine: str, tmp_path: Path
) -> None:
    ran = tb.simulate(small, engine=engine, seed=4)
    assert ran.path is None and not list(tmp_path.iterdir())
    assert ran.requests.num_rows == 6 and ran.hops.num_rows > 6 and ran.seed == 4


@pytest.mark.parametrize(
    ("n_bytes", "ask", "sentence"),
    [
        (10, tb.simulate, "cannot make a temporary folder: File too large; make room for it"),
        (10, tb.sweep, "cannot make a temporary folder: File too large; make room for it"),
        (
            8_000,
            lambda small: tb.sweep(small, runs=1, jobs=1, keep="requests"),
            r"requests\.parquet: cannot be written \(",
        ),
    ],
)
def test_a_full_disk_for_temporary_files_is_one_sentence(
    small: tb.Scenario, n_bytes: int, ask: Callable[[tb.Scenario], Any], sentence: str
) -> None:
    with files_no_longer_than(n_bytes), pytest.raises(tb.RunError, match=sentence):
        ask(small)


def test_the_reference_engine() -> None:
    assert tb.simulate(tb.scenario("clustered", SMALL), engine="reference").engine == "reference"


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("petals+ws-rr", "petals+ws-rr"),
        (("petals", "ws-rr"), "petals+ws-rr"),
        ((PetalsPlacement(), WsRr()), "petals+ws-rr"),
        ((PetalsPlacement, "ws-rr"), "petals+ws-rr"),
        (Both, "both"),
        (Both(), "both"),
    ],
)
def test_a_policy_is_a_name_a_pair_an_object_or_a_class(small: tb.Scenario, given: Any, label: str) -> None:
    ran = tb.simulate(small, given)
    assert ran.policy == label
    assert ran.requests.equals(tb.simulate(small, "petals+ws-rr").requests)


def test_an_object_runs_on_the_testbed_and_is_gone_with_its_program(small: tb.Scenario) -> None:
    ran = tb.up(small, Both(), network="memory", report=False)
    assert ran.path is not None and tb.load(ran.path).policy == "both"
    assert ran.requests.equals(tb.simulate(small, "petals+ws-rr", engine="virtual").requests)
    with pytest.raises(tb.UserError, match="was an object of the program that used it"):
        tb.simulate(ran.path / "scenario.toml")


def test_the_files_of_a_sweep_call_an_object_by_its_name(small: tb.Scenario, tmp_path: Path) -> None:
    table = tb.sweep(small, policies=["petals", Both()], jobs=1, baseline="both", out=tmp_path / "study")
    assert table.policies == ("petals", "both")
    for name in ("table.md", "table.tex", "index.html"):
        text = (tmp_path / "study" / name).read_text(encoding="utf-8")
        assert "both" in text and "object:" not in text, name


def test_two_objects_of_one_name_are_told_apart(small: tb.Scenario) -> None:
    one = Both(1)
    table = tb.sweep(small, policies=[one, Both(2)], jobs=1, baseline=one)
    assert table.policies == ("both", "both-2") and table.gain()[0].against == "both"
    shipped = tb.sweep(small, policies=["petals", Named("petals")], jobs=1)
    assert shipped.policies == ("petals", "object:petals+object:petals")


@pytest.mark.parametrize("baseline", [Both, "both"])
def test_a_baseline_is_one_of_the_policies_however_it_is_given(small: tb.Scenario, baseline: Any) -> None:
    table = tb.sweep(small, policies=["petals", Both], jobs=1, baseline=baseline)
    assert [(gain.policy, gain.against) for gain in table.gain()] == [("petals", "both")]


def test_threads_with_objects_of_one_name_get_their_own_results(small: tb.Scenario) -> None:
    """Both are named at once, before either is known."""
    together = threading.Barrier(2)

    class Slow(Both):
        @property
        def name(self) -> str:  # type: ignore[override]
            with contextlib.suppress(threading.BrokenBarrierError):
                together.wait(0.2)
            return "slow"

        def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
            return CgBp().place(problem) if self.n else super().place(problem)

    alone = {n: tb.simulate(small, Slow(n)).requests for n in (0, 1)}
    assert not alone[0].equals(alone[1])
    with ThreadPoolExecutor(2) as threads:
        found = dict(
            zip((0, 1), threads.map(lambda n: tb.simulate(small, Slow(n)).requests, (0, 1)), strict=True)
        )
    assert all(found[n].equals(alone[n]) for n in (0, 1))


def test_a_policy_of_a_script_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    script = f"""{MINE}
tb.sweep(tb.scenario("clustered", {SMALL!r}), policies=[Mine], runs=2, jobs=1, out="kept")
print(len(open("kept/runs.jsonl").readlines()))
"""
    again = "\nexec(compile(open('other.py').read(), __file__, 'exec'))\n"
    (tmp_path / "other.py").write_text(script.replace("design_concurrency)", "1)"), encoding="utf-8")
    for text, said in ((script, "2\n"), (script + again, "2\n4\n")):
        (tmp_path / "mine.py").write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == (said, "")


def test_up_keeps_its_run_and_tells_what_the_command_tells(small: tb.Scenario) -> None:
    told: list[tb.Progress] = []
    ran = tb.up(small, network="memory", clock="virtual", seed=2, slo={"ttft": 5}, progress=told.append)
    assert ran.path is not None and (ran.path / "report.html").is_file() and ran.path.parent.name == "runs"
    assert ran.engine == "virtual" and ran.seed == 2 and ran.summary.objectives == {"ttft": 5}
    assert [str(one).partition(" ")[0] for one in told] == ["run", "compute.batching", "clock"]


def test_everything_works_several_times_in_one_process_and_in_a_running_event_loop(
    small: tb.Scenario,
) -> None:
    alone = tb.simulate(small, engine="virtual").requests

    async def notebook() -> None:
        assert tb.simulate(small, engine="virtual").requests.equals(alone)
        assert tb.up(small, network="memory", report=False).requests.equals(alone)
        assert len(tb.sweep(small, {"workload.rate": [0.1, 0.2]}, jobs=2)) == 2
        two = await asyncio.gather(*(tb.up_async(small, network="memory", report=False) for _ in range(2)))
        assert all(one.requests.equals(alone) for one in two) and two[0].path != two[1].path

    for _ in range(2):
        asyncio.run(notebook())


def test_a_cancelled_task_interrupts_its_run() -> None:
    async def cancelled() -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(
            tb.up_async(
                tb.scenario("clustered", {"workload.n_requests": 2000}),
                network="memory",
                out="cut",
                progress=lambda told: (
                    loop.call_soon_threadsafe(begun.set) if told.text.startswith("clock") else None
                ),
            )
        )
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert tb.load("cut").summary.n_completed < 2000


def test_a_callback_that_raises_ends_its_run_and_leaves_no_warning(
    small: tb.Scenario, recwarn: pytest.WarningsRecorder
) -> None:
    def told(progress: tb.Progress) -> None:
        if progress.text.startswith("clock"):
            raise ValueError("mine")

    async def raised() -> None:
        with pytest.raises(ValueError, match="mine"):
            await tb.up_async(small, network="memory", progress=told)

    asyncio.run(raised())
    gc.collect()
    assert [str(one.message) for one in recwarn] == []


def test_a_folder_may_begin_with_the_user_s_home(
    small: tb.Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tb.simulate(small, out="~/run").path == tmp_path / "run"
    assert tb.load("~/run").path == tmp_path / "run"


def test_objectives_may_be_numbers_of_numpy(small: tb.Scenario) -> None:
    ours, numpys = (tb.simulate(small, slo={"ttft": limit}).summary for limit in (5, np.int64(5)))
    assert ours.objectives == numpys.objectives == {"ttft": 5.0}


def test_ctrl_c_where_a_loop_runs_ends_what_another_thread_does() -> None:
    """A notebook's loop leaves Ctrl-C to Python; that of ``asyncio.run`` takes it, and cannot act while it waits."""

    async def notebook(call: Any) -> None:
        threading.Timer(1.0, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            call()

    loop = asyncio.new_event_loop()
    try:
        much = tb.scenario("clustered", {"workload.n_requests": 5000})
        loop.run_until_complete(notebook(lambda: tb.simulate(much, engine="virtual")))
    finally:
        loop.close()
    often = tb.scenario("clustered", {"workload.n_requests": 5})  # a run that has begun is kept
    asyncio.run(notebook(lambda: tb.sweep(often, runs=100_000, jobs=1)))


def test_warnings_reach_the_callback_and_the_callers_logging(caplog: pytest.LogCaptureFixture) -> None:
    Path("mine_here.py").write_text(f"from {__name__} import Both", encoding="utf-8")
    text = tb.scenario("clustered", SMALL).toml
    text = re.sub(r"^(placement|routing) = .*$", r'\1 = "mine_here:Both"', text, flags=re.MULTILINE)
    Path("strange.toml").write_text(text, encoding="utf-8")
    told: list[str] = []
    tb.simulate("strange.toml", progress=lambda one: told.append(one.text))
    notice = "notice: the scenario file runs code of mine_here:Both as its policy"
    assert told[0] == notice and told[1].startswith("engine fast: nothing disturbs a session midway; ")
    assert len(told) == 2
    assert caplog.messages == [notice]
    assert not logging.getLogger("testbed").handlers


def test_a_sweep_is_the_commands(small: tb.Scenario, tmp_path: Path) -> None:
    options = [f"--set={change}" for change in small.changes if change.key != "workload.rate"]
    command = [
        "sweep",
        "clustered",
        *options,
        "--over",
        "workload.rate=0.25,0.5",
        "--policy",
        "petals",
        "--policy",
        "proposed",
    ]
    done = CliRunner().invoke(
        app, [*command, "--runs", "3", "--keep", "requests", "--out", "command", "--jobs", "1"]
    )
    assert done.exit_code == 0, done.output
    told: list[tb.Progress] = []
    over = {"workload.rate": [0.25, 0.5]}
    tables = [
        tb.sweep(
            small, over, ["petals", "proposed"], runs=3, jobs=jobs, keep="requests", progress=told.append
        )
        for jobs in (1, 2)
    ]
    there = pq.read_table(tmp_path / "command" / "results.parquet")
    for table in tables:
        assert table.runs.equals(there) and len(table) == 12 and table.path is None
        assert table.requests.equals(pq.read_table(tmp_path / "command" / "requests.parquet"))
    assert [(one.n_done, one.n_total) for one in told] == [(n, 12) for n in range(1, 13)] * 2
    kept = tb.sweep(small, over, ["petals", "proposed"], runs=3, jobs=1, keep="requests", out="command")
    assert kept.runs.equals(there) and kept.path == Path("command")


def test_keys_that_change_together_ranges_and_studies(small: tb.Scenario) -> None:
    zipped = tb.sweep(small, {("workload.rate", "workload.n_requests"): [(0.5, 2), (1, 3)]}, jobs=1)
    assert zipped["n_requests"].to_pylist() == [2, 3] and zipped["workload.rate"].to_pylist() == [0.5, 1.0]
    assert tb.sweep(small, {"workload.rate": "0.1:0.3:0.1"}, jobs=1)["workload.rate"].to_pylist() == [
        0.1,
        0.2,
        0.3,
    ]


def test_gains_are_paired_and_positive_where_the_policy_is_better(small: tb.Scenario) -> None:
    over = {"workload.rate": [0.2, 2.0]}
    table = tb.sweep(small, over, ["petals", "proposed", Both()], runs=5, jobs=1, slo="ttft=5s")
    gains = table.gain("per_token_s")
    assert [(one.at["workload.rate"], one.policy) for one in gains] == [
        (rate, policy) for rate in (0.2, 2.0) for policy in ("proposed", "both")
    ]
    runs = table.runs.to_pylist()
    for one in gains:
        of = {p: {r["seed"]: r["per_token_s_mean"] for r in runs if r["policy"] == p and r["workload.rate"] == one.at["workload.rate"]} for p in ("petals", one.policy)}  # fmt: skip
        differences = np.array([of["petals"][seed] - of[one.policy][seed] for seed in range(5)])
        assert one.gain == pytest.approx(differences.mean()) and one.n == 5 and one.against == "petals"
        assert one.ci95 == pytest.approx(2.776445 * differences.std(ddof=1) / math.sqrt(5), rel=1e-5)
        assert one.ratio == pytest.approx(differences.mean() / np.mean(list(of["petals"].values())))
        assert one.n_failed == one.n_failed_against == 0
    assert "left out" not in gains._repr_html_()
    (other,) = table.gain("goodput_rps", policy="both", against="proposed")[:1]
    assert (other.policy, other.against, other.metric) == ("both", "proposed", "goodput_rps")
    better = table.mean("goodput_rps", "both")[0][1].mean - table.mean("goodput_rps", "proposed")[0][1].mean
    assert other.gain == pytest.approx(better)
    fairness = "length_fairness_ratio"  # best at 1: a gain is just more
    more = table.mean(fairness, "both")[0][1].mean - table.mean(fairness, "proposed")[0][1].mean
    assert table.gain(fairness, policy="both", against="proposed")[0].gain == pytest.approx(more)
    assert gains.to_arrow().num_rows == 4 and "workload.rate" in gains.to_arrow().column_names
    for sentence, ask in (
        ("unknown metric", lambda: table.gain("speed")),
        ("none of the sweep's policies", lambda: table.gain(policy="helix")),
        ("say which policy", lambda: table.mean("ttft_s")),
    ):
        with pytest.raises(tb.UserError, match=sentence):
            ask()


def test_gains_count_requests_that_failed_and_are_in_no_time(small: tb.Scenario) -> None:
    scarce = small.changed({"workload.n_requests": 60, "workload.rate": 20, "workload.n_output_tokens": 64})
    scarce = scarce.changed({"backoff.give_up": "1 s"})
    table = tb.sweep(scarce, policies=["petals", "proposed"], runs=2, jobs=1)
    (gain,) = table.gain()
    failed = {p: sum(r["n_failed"] for r in table if r["policy"] == p) for p in table.policies}
    assert failed == {"petals": gain.n_failed_against, "proposed": gain.n_failed} and failed["petals"] > 0
    assert "requests left out" in table.gain()._repr_html_() and "of requests" in table._repr_html_()


def test_a_run_that_fails_is_a_row_with_its_reason(small: tb.Scenario) -> None:
    table = tb.sweep(small, {"servers.1.count": [0, 2]}, jobs=1)
    assert table["status"].to_pylist() == ["infeasible", "ok"] and table["reason"].to_pylist()[0]
    assert "1 without a result" in repr(table)


def test_a_script_needs_no_guard_and_a_class_of_its_own_reaches_the_workers(tmp_path: Path) -> None:
    """Workers do not run the script again, and classes of ``__main__`` are sent whole."""
    script = f"""{MINE}
print("once")
table = tb.sweep(tb.scenario("clustered", {SMALL!r}), policies=["proposed", Mine()], runs=3, jobs=2)
print([gain.verdict for gain in table.gain()], table["status"].to_pylist() == ["ok"] * 6)
"""
    (tmp_path / "mine.py").write_text(script, encoding="utf-8")
    done = subprocess.run([sys.executable, "mine.py"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("once\n['equal'] True\n", "")


def test_results_show_themselves_in_a_notebook(small: tb.Scenario) -> None:
    ran, table = tb.simulate(small, "petals"), tb.sweep(small, policies=["petals", Both()], runs=2, jobs=1)
    for shown, words in (
        (ran, ("clustered, petals, seed 0, engine fast: 6 of 6 requests completed", "ttft [s]", "p99")),
        (table, ("sweep of clustered: 4 runs", "against petals", "both")),
        (table.gain(), ("verdict", "both", "petals")),
    ):
        html = shown._repr_html_()
        ElementTree.fromstring(html)
        assert all(word in html for word in words)
    assert repr(ran) == "<clustered, petals, seed 0, engine fast: 6 of 6 requests completed>"


def test_a_run_of_an_earlier_version_is_read(small: tb.Scenario) -> None:
    """It has ``rest_s`` beside ``tpot_s``, and no ``ended_at_s``."""
    ran = tb.simulate(small, out="old")
    table = pq.read_table("old/requests.parquet").drop_columns(["ended_at_s"])
    pq.write_table(table.append_column("rest_s", table["tpot_s"]), "old/requests.parquet")
    read = tb.load("old").requests
    assert read.column_names == ran.requests.column_names and read["tpot_s"].equals(ran.requests["tpot_s"])


def test_a_run_can_be_sent_to_another_process_and_its_tables_belong_to_the_caller(small: tb.Scenario) -> None:
    ran = tb.simulate(small, "petals", seed=np.int64(3))  # type: ignore[arg-type]
    again = pickle.loads(pickle.dumps(ran))
    assert repr(again) == repr(ran) and again.requests.equals(ran.requests) and again.hops.equals(ran.hops)
    small.tables["workload"]["n_requests"] = 3
    assert small.tables["workload"]["n_requests"] == 6
    assert [row["policy"] for row in tb.sweep(small, policies="petals", jobs=1)] == ["petals"]


def test_what_a_run_lacks_is_said(small: tb.Scenario) -> None:
    tb.simulate(small, out="here")
    Path("here/summary.json").unlink()
    with pytest.raises(tb.UserError, match="testbed report here"):
        tb.load("here")
    assert data_of(tb.simulate(small).plan)["routing"] == "ws-rr"

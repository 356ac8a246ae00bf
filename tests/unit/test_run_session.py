"""A run is started in one place: from a shell's command, a thread, or inside a running event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nodes import node
from testbed.errors import EXIT_INTERRUPTED, RunError, UserError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.records.events import EventWriter
from testbed.runs.serve import say_ended
from testbed.runs.session import Ended, RunOptions, RunSession
from testbed.runs.up import up_command
from testbed.runtime import phases, running
from testbed.runtime.nodeset import NodeSet
from testbed.runtime.stage import Stage

QUIET = RunOptions(report=False, trace=False, with_twin=False, live=False)


def tiny(*settings: str) -> Experiment:
    small = ("workload.n_requests=2", "workload.n_output_tokens=3")
    return load_experiment("clustered", ["network.backend=memory", *small, *settings])


def record(run_dir: Path) -> list[bytes]:
    return [(run_dir / name).read_bytes() for name in ("events.jsonl", "requests.parquet", "hops.parquet")]


def events(run_dir: Path) -> list[str]:
    lines = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["event"] for line in lines]


def completed(ended: Ended) -> int:
    assert ended.summary is not None and ended.error is None and not ended.interrupted
    return int(ended.summary["n_completed"])


async def test_a_run_in_a_running_event_loop_is_that_of_a_shell_and_leaves_signals_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    said: list[str] = []

    def announce(text: str) -> None:
        said.append(text)
        assert threading.current_thread() is not threading.main_thread()
        assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    awaited = await RunSession(tiny(), tmp_path / "awaited", QUIET, announce).run_async()
    waited_for = RunSession(tiny(), tmp_path / "waited-for", QUIET).run()
    of_shell = await asyncio.to_thread(RunSession(tiny(), tmp_path / "thread", QUIET).run)
    assert [completed(ended) for ended in (awaited, waited_for, of_shell)] == [2, 2, 2]
    assert record(awaited.run_dir) == record(waited_for.run_dir) == record(of_shell.run_dir)
    assert said[0] == f"run {tmp_path}/awaited" and "10 nodes up" in said[-1] and len(said) == 3
    assert capfd.readouterr() == ("", "")


def test_a_run_from_a_shell_has_the_same_record(tmp_path: Path) -> None:
    ended = [RunSession(tiny(), tmp_path / name, QUIET).run() for name in ("one", "two")]
    assert [completed(one) for one in ended] == [2, 2]
    assert record(ended[0].run_dir) == record(ended[1].run_dir)
    assert record(ended[0].run_dir) == record(asyncio.run(_awaited(tmp_path / "three")).run_dir)


async def _awaited(out: Path) -> Ended:
    return await RunSession(tiny(), out, QUIET).run_async()


async def test_runs_at_the_same_time_do_not_know_of_each_other(tmp_path: Path) -> None:
    alone = await _awaited(tmp_path / "alone")
    both = await asyncio.gather(_awaited(tmp_path / "one"), _awaited(tmp_path / "two"))
    assert [record(ended.run_dir) for ended in both] == [record(alone.run_dir)] * 2


async def test_a_cancelled_wait_interrupts_the_run_and_leaves_its_record(tmp_path: Path) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def announce(text: str) -> None:
        if "nodes up" in text:
            loop.call_soon_threadsafe(task.cancel)

    long = tiny("workload.n_requests=5000", "workload.n_output_tokens=128")
    with pytest.raises(asyncio.CancelledError):
        await RunSession(long, tmp_path / "run", QUIET, announce).run_async()
    task.uncancel()
    assert events(tmp_path / "run")[-2:] == ["interrupted", "stopped"]


@pytest.mark.parametrize("first_of", ["keep_policies", "Emulation"])
def test_a_disk_that_is_full_before_a_run_begins_leaves_its_folder_to_the_same_command(
    tmp_path: Path, first_of: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RunError, match="No space left on device; make"),
    ):
        patch.setattr(running, first_of, full)
        RunSession(tiny(), tmp_path / "run", QUIET).run()
    assert completed(RunSession(tiny(), tmp_path / "run", QUIET).run()) == 2


@pytest.mark.parametrize("name", ["logs/a100-1.log", "logs/client-0.log", "events/client-0.log"])
def test_a_disk_that_is_full_when_a_log_is_opened_leaves_the_folder_to_the_same_command(
    name: str, tmp_path: Path
) -> None:
    opened = os.open

    def full(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return opened(path, *args, **options)

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(UserError, match=rf"cannot write \S+/{name}: No space left on device; make room"),
    ):
        patch.setattr(os, "open", full)
        RunSession(tiny(), tmp_path / "run", QUIET).run()
    assert completed(RunSession(tiny(), tmp_path / "run", QUIET).run()) == 2


def test_a_node_that_fails_and_cannot_log_why_ends(tmp_path: Path) -> None:
    def fails(*_: object) -> None:
        (tmp_path / "run" / "logs" / "client-0.log").unlink()
        (tmp_path / "run" / "logs" / "client-0.log").mkdir()
        raise ValueError("no reason")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError, match="client-0 ended unexpectedly"):
        patch.setattr(node, "_hub", fails)
        RunSession(tiny(), tmp_path / "run", QUIET).run()


def test_a_run_that_could_not_write_an_event_ends_with_that(tmp_path: Path) -> None:
    def full(writer: EventWriter, _: object) -> None:
        writer.failure = "cannot write events.jsonl: No space left on device"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventWriter, "write", full)
        ended = RunSession(tiny(), tmp_path / "run", QUIET).run()
    assert isinstance(ended.error, RunError)
    assert str(ended.error).startswith("cannot write events.jsonl: No space left on device; ")
    assert ended.summary is not None and ended.summary["n_completed"] == 2


def test_a_disk_that_is_full_when_the_plan_is_written_is_named_with_the_file(tmp_path: Path) -> None:
    def full(path: Path, _: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(RunError, match=r"cannot write .*plan\.json: No space left on device; make room$"),
    ):
        patch.setattr(phases, "write_json", full)
        RunSession(tiny(), tmp_path / "run", QUIET).run()


def test_a_run_that_is_interrupted_before_it_begins_serves_nothing(tmp_path: Path) -> None:
    session = RunSession(tiny(), tmp_path / "run", QUIET)
    session.interrupt()
    ended = session.run()
    assert ended.interrupted and ended.summary is not None
    assert (ended.summary["n_not_started"], ended.summary["n_completed"]) == (2, 0)


def test_an_interrupt_ends_a_run_whose_clients_do_not_take_their_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, connect, ended = RunSession(tiny(), tmp_path / "run", QUIET), NodeSet.connect, []

    async def connect_and_halt(nodes: NodeSet) -> None:
        await connect(nodes)
        for client in nodes._experiment.problem.clients:
            await nodes._launcher.kill(nodes._processes.pids[client], signal.SIGSTOP)
        asyncio.get_running_loop().call_later(1.0, session.interrupt)

    monkeypatch.setattr(NodeSet, "connect", connect_and_halt)
    monkeypatch.setattr("testbed.runtime.emulation._PATIENCE_S", 0.1)
    run = threading.Thread(target=lambda: ended.append(session.run()), daemon=True)
    run.start()
    run.join(30)
    assert [each.interrupted for each in ended] == [True]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["policy.placement=whole-model"], "whole-model needs a server"),
        (["clock=real"], "the memory network has only virtual time"),
    ],
)
def test_a_run_that_cannot_begin_leaves_no_folder(tmp_path: Path, settings: list[str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        RunSession(tiny(*settings), tmp_path / "run", QUIET).run()
    assert not (tmp_path / "run").exists()


def test_what_fails_while_a_run_is_prepared_undoes_it(tmp_path: Path) -> None:
    class Unprepared(RunSession):
        def prepare(self) -> None:
            assert self.run_dir.exists()
            raise UserError("no tokenizer")

        async def serve(self, launcher: Any) -> Any:
            raise AssertionError("never reached")

    with pytest.raises(UserError, match="no tokenizer"):
        Unprepared(tiny(), tmp_path / "run", QUIET).run()
    assert not (tmp_path / "run").exists()


def test_a_served_run_ends_with_the_exit_code_of_its_requests_and_tokens(tmp_path: Path) -> None:
    ended = RunSession(tiny(), tmp_path / "run", QUIET).run()
    assert ended.summary is not None

    def code(**changes: Any) -> int:
        assert ended.summary is not None
        return say_ended(
            dataclasses.replace(ended, summary=msgspec.structs.replace(ended.summary, **changes))
        )

    assert code() == code(n_completed=1, n_cancelled=1) == code(n_tokens_checked=6, n_tokens_altered=0) == 0
    assert code(n_tokens_checked=6, n_tokens_altered=6) == 1
    assert code(n_completed=1, n_interrupted=1) == code(n_completed=1, n_not_started=1) == 1
    assert say_ended(dataclasses.replace(ended, summary=None, interrupted=True)) == 0
    assert say_ended(dataclasses.replace(ended, interrupted=True)) == EXIT_INTERRUPTED


def test_ctrl_c_after_the_requests_were_served_is_exit_code_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stage, "has_twin", True)
    monkeypatch.setattr("testbed.runs.session.run_twin", interrupted)
    options = dataclasses.replace(QUIET, with_twin=True)
    assert up_command(tiny(), tmp_path / "run", options, as_json=False) == EXIT_INTERRUPTED
    assert (tmp_path / "run" / "summary.json").exists()

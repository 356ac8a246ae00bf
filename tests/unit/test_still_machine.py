"""The whole machine stands still: that is detected and reported, and CPUs are no longer kept awake."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.experiments import load_experiment
from testbed.results.text import summary_text
from testbed.runs.session import run_quietly
from testbed.runtime.real import handle
from testbed.runtime.real.handle import LauncherHandle
from testbed.runtime.real.still import STILL_S, Spans, in_common, watch
from tests.support.runs import processes, wait_until

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=5)


@contextlib.contextmanager
def forked_watch(spans: Spans) -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        try:
            watch(spans)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_stops_all_threads_at_once_is_seen_once_with_when_and_for_how_long() -> None:
    spans = Spans()
    with forked_watch(spans) as pid:
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.4)
        os.kill(pid, signal.SIGCONT)
        ended = time.monotonic()
        wait_until(spans.read, "the stop to be written")
        time.sleep(0.5)
    seen = [span for span in spans.read() if span[0] < ended and span[1] > began]
    assert len(seen) == 1, spans.read()
    assert seen[0][1] - seen[0][0] > 0.3


@given(st.lists(SPANS, min_size=1, max_size=3))
def test_the_machine_stood_still_where_every_cpu_did(cpus: list[list[tuple[int, int]]]) -> None:
    tick_s = STILL_S / 4
    gaps, units = [], []
    for spans in cpus:  # one after another, as they come
        at, found = 0, []
        for before, length in spans:
            found.append((at + before, at + before + length))
            at += before + length
        gaps.append([(begin * tick_s, end * tick_s) for begin, end in found])
        units.append({unit for begin, end in found for unit in range(begin, end)})
    common = set.intersection(*units)
    found_common = in_common(gaps)
    covered = {
        round(begin / tick_s) + i for begin, end in found_common for i in range(round((end - begin) / tick_s))
    }
    assert covered <= common
    assert all(end - begin >= STILL_S for begin, end in found_common)


@pytest.mark.parametrize("helps", [True, False], ids=["helps", "does-not-help"])
def test_cpus_may_sleep_where_the_machine_then_stands_still_less(
    helps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = [] if helps else [0.9]  # seconds for which the machine stands still in that one second
    new = iter([[0.01], asleep, [0.01]])
    found: list[tuple[float, float]] = []
    states: list[set[str]] = []

    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]

    def spinners() -> set[str]:
        return {state(pid) for pid, name in processes(tmp_path / "run").items() if "awake" in name}

    async def stalls(_: LauncherHandle) -> list[tuple[float, float]]:
        wait_until(lambda: len(spinners()) == 1, "the signal, which takes until the next tick")
        states.append(spinners())
        until = time.monotonic() - 0.001
        found.extend((until - lasted_s, until) for lasted_s in next(new))
        return list(found)

    monkeypatch.setattr(LauncherHandle, "stalls", stalls)
    monkeypatch.setattr(handle, "subprocess", subprocess)  # a launcher begun anew keeps the CPU awake
    short = [
        "clock=real",
        "network.backend=loopback",
        "time_scale=100",
        "workload.n_requests=2",
        "workload.rate=1",
    ]
    summary = run_quietly(
        load_experiment("clustered", [*short, "workload.n_output_tokens=8"]), tmp_path / "run"
    )
    assert summary["n_completed"] == 2
    assert states == [{"R"}, {"T"}, {"T"} if helps else {"R"}]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    [why] = [event["why"] for event in events if event["event"] == "cpus"]
    assert why.startswith("CPUs may sleep: " if helps else "CPUs are kept awake: ")
    assert summary["stalls"]["n"] == 1
    assert summary["stalls"]["max_real_s"] == pytest.approx(0.01)
    assert "the machine stood still 1 time, for 0.01 s (real) at most" in " ".join(
        summary_text(summary).split()
    )

"""`python -m benchmarks sweep`: compares `testbed sweep` on Ray with local workers, and measures its scaling
and limits.

Blocks of the same runs are done in turn: local, ray, local, … Of each block the first fifth is not counted,
and more until all workers have begun. CPU seconds are those of all processes (this one, workers, Ray's own);
other load of the machine has little effect on them. Wall seconds depend on it, so the load and the CPUs used
by others are printed. Scaling is measured with tasks that only wait, so that two CPUs can stand for many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import proc
from testbed.studies.sweep.pool import Executor, Local
from testbed.studies.sweep.runs import Record, Run, Runner, Setup, lost_record
from testbed.studies.sweep.store import Lines

SCENARIO = "clustered"
POLICIES = ("petals", "proposed")
N_POINTS = 10
WARM_RATIO = 0.2
_UP_S = 60.0


class Window(NamedTuple):
    """What was measured between one result and a later one.

    - ``n_runs``: number of runs; ``wall_s``: wall seconds
    - ``cpu_s``: CPU seconds of all our processes; ``driver_s``: of this process; ``others_s``: of other
      programs
    - ``in_runs_s``: wall seconds of the runs themselves; ``start_s``: wall seconds until the first result
    """

    n_runs: int
    wall_s: float
    cpu_s: float
    driver_s: float
    others_s: float
    in_runs_s: float
    start_s: float


class Usage(NamedTuple):
    """CPU seconds up to an instant: process id -> those of each of our processes, and those of the whole
    machine.
    """

    at_s: float
    own_s: dict[int, float]
    machine_s: float


def usage(without: int | None = None) -> Usage:
    """Returns the usage of this process and its descendants, except the process ``without`` and its
    descendants.
    """
    own_s = proc.family(os.getpid(), without)
    busy = [
        int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:9]
    ]
    return Usage(time.monotonic(), own_s, (sum(busy) - busy[3] - busy[4]) / proc.TICKS)


def window(
    executor: Executor,
    begin: Callable[[Any], Callable[[Any], Any]],
    setup: Any,
    groups: Sequence[Sequence[Any]],
    took: Callable[[Any], float],
    without: int | None,
    n_workers: int = 1,
) -> Window:
    """Does the tasks, and measures all but the first of them.

    Not counted are the first ``WARM_RATIO`` of the tasks, and those done before ``n_workers`` have begun, but
    at most half of all tasks. ``took`` returns the wall seconds of a task from its record.
    """
    n_tasks = sum(map(len, groups))
    n_warm, n, in_runs_s = int(WARM_RATIO * n_tasks), 0, 0.0
    first: Usage | None = None
    began_at_s, start_s = time.monotonic(), 0.0
    results = executor.results(begin, setup, groups, lost_record)
    with closing(results):
        for _, record in results:
            n += 1
            start_s = start_s or time.monotonic() - began_at_s
            if first is not None:
                in_runs_s += took(record)
                if n == n_tasks:  # while the workers are there
                    last = usage(without)
            elif n >= n_warm and (executor.n_jobs >= n_workers or n >= n_tasks // 2):
                first, n_warm = usage(without), n
    assert first is not None
    # Processes that ended before are ignored: workers stay until the end.
    used_s = {pid: own_s - first.own_s.get(pid, 0.0) for pid, own_s in last.own_s.items()}
    cpu_s = sum(used_s.values())
    others_s = max(0.0, last.machine_s - first.machine_s - cpu_s)
    wall_s = last.at_s - first.at_s
    return Window(n - n_warm, wall_s, cpu_s, used_s[os.getpid()], others_s, in_runs_s, start_s)


def runs_of(n_runs: int) -> list[list[Run]]:
    """Returns about ``n_runs`` runs of the clustered scenario, in groups of one point and policy."""
    n_seeds = max(1, n_runs // (N_POINTS * len(POLICIES)))
    return [
        [Run((f"workload.rate={0.1 * i:.1f}",), policy, seed) for seed in range(n_seeds)]
        for i in range(1, N_POINTS + 1)
        for policy in POLICIES
    ]


def waiting(setup: tuple[float, Record]) -> Callable[[int], Record]:
    """Returns a function that does a task: it waits for so many seconds without using a CPU, and returns the
    record.
    """
    task_s, record = setup
    answer = pickle.dumps(record, 5)

    def work(task: int) -> Record:
        time.sleep(task_s)
        # A new object each time, as with real runs.
        return pickle.loads(answer)  # type: ignore[no-any-return]

    return work


@contextlib.contextmanager
def ray_head(n_cpus: int) -> Iterator[int]:
    """Runs a cluster of one machine that claims to have ``n_cpus`` CPUs. Yields the id of its parent
    process.
    """
    # The prefix is short, since the paths of Ray's sockets are limited to 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray_bootstrap_config.yaml").write_text("{}", encoding="utf-8")
        environment = os.environ | {
            "HOME": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9/",
        }
        ray = str(Path(sys.executable).with_name("ray"))
        port = 26379
        how = ["--head", f"--port={port}", "--include-dashboard=false", f"--num-cpus={n_cpus}"]
        how += [
            "--node-ip-address=127.0.0.1",
            "--object-store-memory=80000000",
            f"--temp-dir={folder}/r",
            "--block",
        ]
        with open(Path(folder) / "log", "w+b") as log:
            process = subprocess.Popen(
                [ray, "start", *how],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                until = time.monotonic() + _UP_S
                while b"Ray runtime started" not in (printed := (Path(folder) / "log").read_bytes()):
                    if process.poll() is not None or time.monotonic() > until:
                        raise SystemExit(f"benchmarks sweep: Ray does not start: {printed.decode()}")
                    time.sleep(0.1)
                os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
                yield process.pid
            finally:
                process.send_signal(signal.SIGTERM)  # `ray start --block` then ends all that it started
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def load() -> str:
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"


def efficiency(n_runs: int, n_blocks: int, n_workers: int, head: int) -> tuple[list[str], dict[str, Any]]:
    """Does blocks of runs with the executors local and ray in turn. Returns lines of text, and the ratios of
    the rates.
    """
    from testbed.studies.sweep.on_ray import OnRay

    setup, groups = Setup(SCENARIO, n_runs=n_runs), runs_of(n_runs)
    found: dict[str, list[Window]] = {"local": [], "ray": []}
    lines = [
        f"efficiency: {n_runs} runs of {SCENARIO} per block, {n_workers} workers; {load()}",
        f"{'':<8}{'runs/s':>8}{'runs/CPU s':>12}{'in runs':>9}{'driver ms':>11}{'first after':>13}{'others, CPUs':>14}",
    ]
    for _ in range(n_blocks):
        for name in found:
            executor: Executor = Local(n_workers) if name == "local" else OnRay(n_workers)
            without = head if name == "local" else None
            w = window(executor, Runner, setup, groups, lambda record: record.took_s, without, n_workers)
            found[name].append(w)
            share = w.in_runs_s / (n_workers * w.wall_s)
            lines.append(
                f"{name:<8}{w.n_runs / w.wall_s:>8.1f}{w.n_runs / w.cpu_s:>12.1f}{share:>9.0%}"
                f"{1e3 * w.driver_s / w.n_runs:>11.3f}{w.start_s:>11.1f} s{w.others_s / w.wall_s:>14.2f}"
            )
            print(lines[-1], file=sys.stderr, flush=True)

    def ratio(rate: Callable[[Window], float]) -> float:
        """Returns the median of ray / local over pairs of successive blocks."""
        return statistics.median(rate(b) / rate(a) for a, b in zip(found["local"], found["ray"], strict=True))

    by_cpu = ratio(lambda w: w.n_runs / w.cpu_s)
    by_wall = ratio(lambda w: w.n_runs / w.wall_s)
    lines.append(
        f"ray against local, median of pairs: {by_cpu:.1%} per CPU second, {by_wall:.1%} per wall second"
    )
    run_s = statistics.median(w.cpu_s / w.n_runs for w in found["local"])
    return lines, {"per_cpu_s": by_cpu, "per_wall_s": by_wall, "run_s": run_s}


def scaling(workers: Sequence[int], task_s: float, seconds: float) -> tuple[list[str], dict[str, Any]]:
    """Does tasks that only wait, on more and more workers. Returns lines of text, and the measured rates."""
    from testbed.studies.sweep.on_ray import OnRay

    record = Runner(Setup(SCENARIO))(runs_of(20)[0][0])
    rows = []
    lines = [
        f"scaling, tasks that wait {1e3 * task_s:g} ms; {load()}",
        f"{'workers':<9}{'per CPU':>8}{'results/s':>11}{'of ideal':>10}{'driver us':>11}{'CPU us':>8}{'first after':>13}",
    ]
    for n in workers:
        n_tasks = max(200, int(n * seconds / task_s))
        groups = [list(range(i, n_tasks, 2 * n)) for i in range(2 * n)]
        w = window(OnRay(n), waiting, (task_s, record), groups, lambda record: 0.0, None, n)
        rate, driver_s = w.n_runs / w.wall_s, w.driver_s / w.n_runs
        rows.append(
            {"workers": n, "rate": rate, "ideal": n / task_s, "driver_s": driver_s, "start_s": w.start_s}
        )
        lines.append(
            f"{n:<9}{n / (os.cpu_count() or 1):>8.1f}{rate:>11.1f}{rate * task_s / n:>10.1%}{1e6 * driver_s:>11.0f}"
            f"{1e6 * w.cpu_s / w.n_runs:>8.0f}{w.start_s:>11.1f} s"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines, {"task_s": task_s, "rows": rows}


def limits(n_tasks: int, run_s: float) -> tuple[list[str], dict[str, Any]]:
    """Measures this process's CPU seconds per call and per result, and the bytes of a run on the network."""
    from testbed.studies.sweep.on_ray import CALL_S, MAX_CALL, MAX_CALLS_PER_S, OnRay

    runner = Runner(Setup(SCENARIO))
    runs = [run for group in runs_of(40) for run in group]
    records = [runner(run) for run in runs]
    groups = [list(range(i * n_tasks // 10, (i + 1) * n_tasks // 10)) for i in range(10)]
    nothing = window(OnRay(2), waiting, (0.0, records[0]), groups, lambda record: 0.0, None)
    result_s = nothing.driver_s / nothing.n_runs
    long_s = CALL_S / 2  # so that a call has two tasks
    few = window(OnRay(8), waiting, (long_s, records[0]), [list(range(200))], lambda record: 0.0, None)
    with closing(OnRay(1).results(waiting, (10.0, records[0]), [[0, 1]])) as idle:
        next(idle)
        began_at_s, since_s = usage().own_s[os.getpid()], time.monotonic()
        next(idle)
        idle_ratio = (usage().own_s[os.getpid()] - began_at_s) / (time.monotonic() - since_s)
    call_s = 2 * (few.driver_s - idle_ratio * few.wall_s) / few.n_runs
    with tempfile.TemporaryDirectory() as folder, Lines(Path(folder) / "runs.jsonl") as lines:
        began_at_s = time.process_time()
        for i in range(n_tasks):
            lines.append(records[i % len(records)])
        store_s = (time.process_time() - began_at_s) / n_tasks
    out_bytes = len(pickle.dumps(runs, 5)) / len(runs)
    in_bytes = len(pickle.dumps(records, 5)) / len(records)
    of_result_s = result_s + store_s
    left_ratio = 1 - idle_ratio
    bound = left_ratio / (call_s / CALL_S + of_result_s / run_s)
    if bound > MAX_CALLS_PER_S * CALL_S:  # with so many workers, calls are longer
        bound = (left_ratio - call_s * MAX_CALLS_PER_S) * run_s / of_result_s
    needed_s = 1000 * of_result_s / (left_ratio - call_s * MAX_CALLS_PER_S)
    lines_of_text = [
        f"limits; {load()}",
        f"results: {nothing.n_runs / nothing.wall_s:,.0f} per second of tasks that do nothing, "
        f"{1e6 * result_s:.0f} us of this process's CPU each, {MAX_CALL} to a call",
        f"calls: {1e6 * call_s:.0f} us of this process's CPU each, beside {idle_ratio:.1%} of a CPU while it waits",
        f"store: {1e6 * store_s:.0f} us of this process's CPU per result, {1 / store_s:,.0f} per second",
        f"network: {out_bytes:,.0f} bytes to a worker and {in_bytes:,.0f} back per run, in messages of {len(runs)}",
        f"bound: runs of {1e3 * run_s:.1f} ms keep {bound:,.0f} cores busy; "
        f"1,000 cores need runs of {1e3 * needed_s:.1f} ms",
    ]
    found = {
        "result_s": result_s,
        "call_s": call_s,
        "store_s": store_s,
        "out_bytes": out_bytes,
        "in_bytes": in_bytes,
    }
    return lines_of_text, {**found, "run_s": run_s, "bound_cores": bound}


def plot(found: dict[str, Any], file: Path) -> None:
    """Draws results per second over workers, and what they would be without any overhead."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = found["rows"]
    workers = [row["workers"] for row in rows]
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(workers, [row["ideal"] for row in rows], "--", color="0.6", label="workers / task time")
    axes.plot(workers, [row["rate"] for row in rows], "o-", label="measured")
    axes.set(xscale="log", yscale="log", xlabel="Ray workers", ylabel="results per second")
    axes.set_xticks(workers, [str(n) for n in workers])
    axes.set_title(f"Tasks that wait {1e3 * found['task_s']:g} ms, on {os.cpu_count()} CPUs", fontsize=10)
    axes.minorticks_off()
    axes.legend()
    figure.savefig(file, dpi=120)


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sweep", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000, help="number of runs per block")
    parser.add_argument("--blocks", type=int, default=3, help="number of blocks per executor")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--scaling", default="1,2,4,8,16,32", help="numbers of workers for tasks that wait; empty: no scaling"
    )
    parser.add_argument("--task", type=float, default=0.02, help="seconds that such a task waits")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of waiting per worker")
    parser.add_argument("--plot", type=Path, help="file for the figure of the scaling")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    workers = [int(n) for n in options.scaling.split(",") if n]
    text: list[str] = []
    found: dict[str, Any] = {}
    with ray_head(max(options.workers, 8, *workers)) as head:
        if options.blocks:
            said, found["efficiency"] = efficiency(options.runs, options.blocks, options.workers, head)
            text += [*said, ""]
        run_s = found.get("efficiency", {}).get("run_s", 0.01)
        if workers:
            said, found["scaling"] = scaling(workers, options.task, options.seconds)
            text += [*said, ""]
            if options.plot:
                plot(found["scaling"], options.plot)
        said, found["limits"] = limits(20 * options.runs, run_s)
        text += said
    print(json.dumps(found) if options.json else "\n".join(text))
    return 0

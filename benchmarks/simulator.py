"""Speed of the simulator: whole runs with placement, routing decisions and replay.

``python -m benchmarks.simulator`` measures small runs, to be compared with the published run times, one large
run, runs with batching and paged caches on each engine (``--batching``: only these), and how near the fast engine is
to the testbed itself where messages wait for links, and how fast (``--links``: only that). ``--day`` measures a day of
ten servers, eight of which have daily hours. ``--servers N --requests N`` measures one run of that size in this process.
``--sweep`` draws the time per request for 10 to 3,000 servers.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import figure
from benchmarks.large_problem import large_problem, poisson_requests, session_setup_s
from policies.problem import InfeasiblePlacement, Placement, PolicyError, Problem
from policies.registry import resolve_pair, resolve_placement, resolve_routing
from policies.replay import ReplayedRequest, replay
from policies.workload import RequestPlan
from testbed.control.placing import place
from testbed.experiments import load_experiment
from testbed.experiments.experiment import (
    Calibration,
    ComputePart,
    Experiment,
    NetworkPart,
    PolicyPart,
    WorkloadPart,
)
from testbed.experiments.policy import PolicyChoice
from testbed.fast.engine import simulate_fast
from testbed.results.requests import stats
from testbed.simulator.cases import scenario_case
from testbed.simulator.engine import simulate

_SMALL = (
    # scenario, servers, goal in ms, the paper's MATLAB in ms: PETALS and proposed
    ("clustered", 9, 3, {"petals": 18.6, "proposed": 21.6}),
    ("abovenet", 9, 3, {"petals": 19.0, "proposed": 33.3}),
    ("bellcanada", 26, 5, {"petals": 29.1, "proposed": 28.7}),
)
_SMALL_RUNS = 30
_LARGE = (1000, 100_000)
_COUPLED_RUNS = 3
_COUPLED_RATES = (0.1, 0.5)
_COUPLED = (
    # batching, cache.mode, engine: the virtual one, or (auto) the fastest that serves this
    ("none", "reserved", "auto"),
    ("none", "reserved", "virtual"),
    ("none", "paged", "auto"),
    ("none", "paged", "virtual"),
    ("serial", "reserved", "auto"),
    ("serial", "paged", "auto"),
    ("continuous", "reserved", "auto"),
    ("continuous", "reserved", "virtual"),
    ("continuous", "paged", "auto"),
    ("continuous", "paged", "virtual"),
)
_DAY = (
    # eight of ten servers are away from 18:00 to 22:00
    "servers.0.count=8",
    "servers.0.hours=22:00-18:00",
    "workload.n_requests=5000",
    "workload.rate=0.058",
)
_BUSY_LINKS = {
    "30 prompts of 1,000 tokens": (
        "workload.n_requests=30",
        "workload.n_input_tokens=1000",
        "workload.n_output_tokens=32",
        "workload.rate=0.2",
    ),
    "12 prompts of 1,000 tokens, forwarding, 40 Mbit/s": (
        "workload.n_requests=12",
        "workload.n_input_tokens=1000",
        "workload.n_output_tokens=16",
        "policy.communication=server-to-server",
        *(f"network.pairs.{pair}.rate=40 Mbit/s" for pair in range(6)),
    ),
}
_SWEEP_SERVERS = (10, 30, 100, 300, 1000, 3000)
_SWEEP_POLICIES = ("proposed", "petals", "petals-optimized-rr")
_SWEEP_FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "simulator-speed.png"


def timed_run(
    problem: Problem, policy: str, requests: Sequence[RequestPlan], setup_s: float = 0.0
) -> tuple[float, float, Placement, list[ReplayedRequest]]:
    """Does one run. Returns (seconds to place, seconds to bind the router and replay, placement, requests).

    Raises ``InfeasiblePlacement`` and other ``PolicyError``.
    """
    placement_name, routing_name = resolve_pair(policy)
    began_at_s = time.perf_counter()
    placement = resolve_placement(placement_name).place(problem)
    placed_at_s = time.perf_counter()
    router = resolve_routing(routing_name).bind(problem, placement)
    done = replay(problem, placement, router, requests, setup_s)
    return placed_at_s - began_at_s, time.perf_counter() - placed_at_s, placement, done


def _served_fast(
    problem: Problem, policy: str, requests: Sequence[RequestPlan], setup_s: float
) -> tuple[float, float, Placement, list[ReplayedRequest]]:
    """As ``timed_run``, with the fast engine: sessions are opened over the network, and refused ones are
    tried again.
    """
    placement, routing = resolve_pair(policy)
    experiment = Experiment(
        name="simulator",
        description="",
        seed=0,
        time_scale=1.0,
        problem=problem,
        sites={},
        calibration=Calibration(session_setup_s=setup_s),
        network=NetworkPart("memory", {}),
        compute=ComputePart(),
        policy=PolicyPart(placement, routing),
        workload=WorkloadPart(tuple(requests)),
        tables=None,
    )
    began_at_s = time.perf_counter()
    placed = place(experiment)
    placed_at_s = time.perf_counter()
    done = [
        ReplayedRequest(r.plan, r.route, r.waiting_s, r.ttft_s, r.time_s)
        for r in simulate_fast(experiment, placed).requests
        if r.route is not None and r.ttft_s is not None and r.time_s is not None
    ]
    return placed_at_s - began_at_s, time.perf_counter() - placed_at_s, placed.placement, done


def run_large(
    n_servers: int, n_requests: int, policy: str, seed: int, *, setup: bool, engine: str = "reference"
) -> dict[str, Any]:
    """Does one run on ``large_problem``. Returns its figures; those of a run without a placement are None or
    missing.

    - ``seconds``: ``placement_s + replay_s``, without the time to make the problem and its requests
    - ``cpu_s``: CPU time of this process in that time, which is less if other programs used the CPU
    - ``peak_memory_bytes``: of the whole process: interpreter, libraries, problem, requests and results
    """
    answer: dict[str, Any] = {"policy": policy, "servers": n_servers, "requests": n_requests, "seed": seed}
    answer["engine"] = engine
    setup_s = session_setup_s(resolve_pair(policy)[0]) if setup else 0.0
    problem = large_problem(n_servers, seed)
    requests = poisson_requests(problem, n_requests, seed)
    answer |= {"session_setup_s": setup_s, "feasible": True}
    began_at_cpu_s = time.process_time()
    try:
        serve = _served_fast if engine == "fast" else timed_run
        placement_s, replay_s, placement, done = serve(problem, policy, requests, setup_s)
    except InfeasiblePlacement as error:
        answer |= {"feasible": False, "error": str(error), "seconds": None, "requests_per_s": None}
    else:
        answer["cpu_s"] = time.process_time() - began_at_cpu_s
        seconds = placement_s + replay_s
        per_token_s = statistics.fmean(r.time_s / r.plan.n_output_tokens for r in done)
        answer |= {"seconds": seconds, "placement_s": placement_s, "replay_s": replay_s}
        answer |= {"requests_per_s": n_requests / seconds, "per_token_ms": per_token_s * 1e3}
        answer["waiting_ratio"] = sum(r.waiting_s > 0 for r in done) / n_requests
        answer["blocks_held"] = sum(held.n_blocks for held in placement.ranges)
        answer["design_concurrency"] = placement.design_concurrency
    answer["peak_memory_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return answer


def run_fresh(n_servers: int, n_requests: int, policy: str) -> dict[str, Any]:
    """Does ``run_large`` in a new process, so that ``peak_memory_bytes`` is that of this run alone."""
    command = [sys.executable, "-m", "benchmarks.simulator", "--servers", str(n_servers)]
    command += ["--requests", str(n_requests), "--policy", policy, "--json"]
    answer: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return answer


def measure() -> list[dict[str, Any]]:
    """Measures small runs at 0.5 requests/s (best and median of 30), one run with 1,000 servers,
    ``measure_coupled``, ``measure_links``.
    """
    figures: list[dict[str, Any]] = []
    for scenario, n_servers, goal_ms, matlab_ms in _SMALL:
        sets = ["workload.rate=0.5", "workload.n_requests=100", "calibration.set=petals-scattered"]
        experiment = load_experiment(scenario, sets)
        for policy, baseline_ms in matlab_ms.items():
            runs = [
                timed_run(experiment.problem, policy, experiment.workload.requests)
                for _ in range(_SMALL_RUNS)
            ]
            times_ms = [(placement_s + replay_s) * 1e3 for placement_s, replay_s, _, _ in runs]
            what = f"{scenario}, {n_servers} servers, 100 requests: {policy}"
            figures += [
                figure(f"{what}, best", min(times_ms), "ms"),
                figure(f"{what}, median", statistics.median(times_ms), "ms", f"<= {goal_ms}"),
                figure(f"{what}, the paper's MATLAB (baseline)", baseline_ms, "ms"),
            ]
    answer = run_fresh(*_LARGE, "proposed")
    what = "1,000 servers, 100,000 requests, 70 blocks: proposed"
    figures.append(figure(what, answer["seconds"], "s", "<= 60"))
    figures.append(figure(f"{what}, peak memory", answer["peak_memory_bytes"] / 1e6, "MB", "< 1000"))
    return figures + measure_coupled() + measure_links()


def measure_coupled() -> list[dict[str, Any]]:
    """Measures the CPU seconds of 100 requests on ``clustered`` with batching and with paged caches.

    They include the placement and all processes that a run starts. Each is the best of ``_COUPLED_RUNS``
    runs.
    """
    figures = []
    for rate in _COUPLED_RATES:
        for batching, mode, clock in _COUPLED:
            sets = ["workload.n_requests=100", f"workload.rate={rate:g}"]
            sets += [f"compute.batching={batching}", f"cache.mode={mode}"]
            case = scenario_case("clustered", PolicyChoice(), sets, None)
            times_s = []
            for _ in range(_COUPLED_RUNS):
                began_at_s = _cpu_s()
                simulation = simulate(case, "testbed", is_virtual=clock == "virtual")
                times_s.append(_cpu_s() - began_at_s)
            what = f"clustered at {rate:g}/s, batching {batching}, cache {mode}: {simulation.engine}"
            figures.append(figure(what, min(times_s), "s"))
    return figures


def measure_links() -> list[dict[str, Any]]:
    """Measures how far the fast engine is from the engine ``virtual`` (the baseline) on busy links, and its speed.

    Differences are those of the mean and the 99th percentile over requests, the largest of all metrics.
    """
    figures = []
    for what, sets in _BUSY_LINKS.items():
        case = scenario_case("clustered", PolicyChoice(), sets, None)
        times: dict[str, list[dict[str, float]]] = {}
        took_s = []
        for is_virtual in (False, True):
            began_at_s = _cpu_s()
            simulation = simulate(case, "testbed", is_virtual=is_virtual, live=False)
            took_s.append(_cpu_s() - began_at_s)
            for name in ("queue_s", "ttft_s", "tpot_s", "per_token_s"):
                of = stats(row.times[name] for row in simulation.rows)
                times.setdefault(name, []).append({"mean": of.mean or 0.0, "p99": of.p99 or 0.0})
        figures += [
            figure(f"clustered, {what}: fast", took_s[0], "s"),
            figure(f"clustered, {what}: virtual (baseline)", took_s[1], "s"),
            figure(f"clustered, {what}: times as fast", took_s[1] / took_s[0], "", ">= 8"),
        ]
        for value, goal in (("mean", "<= 1"), ("p99", "<= 3")):
            far = max(
                abs(ours[value] / max(other[value], 1e-9) - 1)
                for ours, other in times.values()
                if other[value]
            )
            figures.append(figure(f"clustered, {what}: {value} differs by", 100 * far, "%", goal))
    return figures


def measure_day() -> list[dict[str, Any]]:
    """Measures a day of ten servers with daily hours, with the rows of all hops and without them."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for what, kept in (("times of requests", None), ("times of hops, too", Path(folder))):
            case = scenario_case("clustered", PolicyChoice(), _DAY, None)
            began_at_s = _cpu_s()
            simulation = simulate(case, "testbed", live=False, folder=kept)
            took_s = _cpu_s() - began_at_s
            about = f"{len(simulation.rows)} requests, {simulation.served.n_steps} messages there and back"
            figures.append(figure(f"a day of ten servers, {about}: {what}", took_s, "s", "<= 20"))
    return figures


def _cpu_s() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def sweep(path: Path) -> list[dict[str, Any]]:
    """Does runs of growing size and draws them to ``path`` (PNG). Returns their figures. Takes some minutes.

    A run has 10 requests per server, at least 2,000. The figure shows the CPU time of binding and replay
    alone.
    """
    answers = []
    for policy in _SWEEP_POLICIES:
        for n_servers in _SWEEP_SERVERS:
            n_requests = max(2000, 10 * n_servers)
            n_runs = 3 if n_servers < 1000 else 1
            runs = (run_fresh(n_servers, n_requests, policy) for _ in range(n_runs))
            answers.append(min(runs, key=_replay_cpu_s))
            print(_line(answers[-1]), file=sys.stderr, flush=True)
    _draw(answers, path)
    return answers


def _replay_cpu_s(answer: dict[str, Any]) -> float:
    return float(answer["cpu_s"] * answer["replay_s"] / answer["seconds"]) if answer["feasible"] else 0.0


def _draw(answers: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    for policy in _SWEEP_POLICIES:
        rows = [a for a in answers if a["policy"] == policy and a["feasible"]]
        times_us = [_replay_cpu_s(a) / a["requests"] * 1e6 for a in rows]
        axes.loglog([a["servers"] for a in rows], times_us, marker="o", markersize=4, label=policy)
    ends = (_SWEEP_SERVERS[0], _SWEEP_SERVERS[-1])
    for power, name in ((1, "in proportion to servers"), (2, "to servers²")):
        line = [5 * (n / ends[0]) ** power for n in ends]
        axes.loglog(ends, line, color="grey", linestyle=(0, (2, 2 * power)), linewidth=1, label=name)
    axes.set(xlabel="servers", ylabel="time per request (µs)", ylim=(3, 1e4))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _line(answer: dict[str, Any]) -> str:
    size = f"{answer['policy']}, {answer['servers']} servers, {answer['requests']} requests"
    memory = f"{answer['peak_memory_bytes'] / 1e6:.0f} MB"
    if not answer["feasible"]:
        return f"{size}: infeasible ({answer['error']}), {memory}"
    return (
        f"{size}: {answer['seconds']:.3f} s (placement {answer['placement_s']:.3f} s), "
        f"{answer['requests_per_s']:.0f} requests/s, {memory}, {answer['per_token_ms']:.0f} ms per token, "
        f"{answer['waiting_ratio']:.0%} waited"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator", description=__doc__)
    parser.add_argument("--servers", type=int, help="do one run with so many servers")
    parser.add_argument("--requests", type=int, default=_LARGE[1], help="number of requests of that run")
    parser.add_argument("--policy", default="proposed", help="a pair that `testbed policies` lists")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine", choices=("reference", "fast"), default="reference", help="engine of that run"
    )
    parser.add_argument("--session-setup", choices=("none", "reference"), default="none")
    parser.add_argument("--sweep", action="store_true", help="10 to 3,000 servers, drawn into docs/figures")
    parser.add_argument("--batching", action="store_true", help="only batching and paged caches")
    parser.add_argument("--links", action="store_true", help="only busy links")
    parser.add_argument("--day", action="store_true", help="only a day of ten servers, some with daily hours")
    parser.add_argument("--json", action="store_true", help="one object per line")
    given = parser.parse_args()
    if given.servers is not None and (given.servers < 1 or given.requests < 1):
        parser.error("--servers and --requests must be at least 1")
    if given.seed < 0:
        parser.error("--seed must be at least 0")
    if given.servers is not None:
        setup = given.session_setup == "reference"
        try:
            answer = run_large(
                given.servers, given.requests, given.policy, given.seed, setup=setup, engine=given.engine
            )
        except PolicyError as error:
            print(f"benchmarks.simulator: {error}", file=sys.stderr)
            return 2
        print(json.dumps(answer) if given.json else _line(answer))
        return 0
    chosen = (given.batching, measure_coupled), (given.links, measure_links), (given.day, measure_day)
    measured = next((measuring for is_asked, measuring in chosen if is_asked), measure)
    rows = sweep(_SWEEP_FIGURE) if given.sweep else measured()
    for row in rows:
        if given.json:
            print(json.dumps(row))
        elif not given.sweep:
            goal = f"(goal {row['goal']})" if row["goal"] else ""
            print(f"{row['name']:<72} {row['value']:>8} {row['unit']:<6}{goal}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

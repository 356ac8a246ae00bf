"""What kept caches save turn by turn, what routers that return to them bring, and how fast the engines simulate that.

``python -m benchmarks conversations [turns] [engines] [routers]`` prints the tables of docs/conversations.md; ``turns --figure FILE``
draws them, and ``mooncake FILE`` has the hits of every router with the prompts of a trace. Every run is simulated.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from testbed.experiments import load_experiment
from testbed.experiments.prompts import implied_reuse
from testbed.records.requests import RequestRow
from testbed.results.conversations import prefix_use, ttft_by_turn
from testbed.results.plots import LINES, plotting, save
from testbed.simulator.cases import Case
from testbed.simulator.engine import Simulation, simulate

TALKS = (
    *("workload.turns=5", "workload.think_time=20 s", "workload.n_further_tokens=80"),
    "workload.n_output_tokens=64",
)
KINDS = {"none": "no kept caches", "session": "the chain stays open", "shared": "servers keep pages"}
ROUTERS = ("ws-rr", "sticky", "prefix-aware", "foresight")
CHATS = """
name = "chats"
[model]
profile = "llama-2-70b"
[hardware.big]
base = "helix-a100"
memory = "75 GB"
[[servers]]
hardware = "big"
site = "A"
count = 2
[[servers]]
hardware = "big"
site = "B"
count = 2
[[servers]]
hardware = "big"
site = "C"
count = 2
[clients]
site = "D"
[network]
kind = "clusters"
pairs = [
    { sites = ["A", "D"], rtt = "20 ms", rate = "1 Gbit/s" },
    { sites = ["B", "D"], rtt = "20 ms", rate = "1 Gbit/s" },
    { sites = ["C", "D"], rtt = "20 ms", rate = "1 Gbit/s" },
    { sites = ["A", "B"], rtt = "30 ms", rate = "1 Gbit/s" },
    { sites = ["A", "C"], rtt = "30 ms", rate = "1 Gbit/s" },
    { sites = ["B", "C"], rtt = "30 ms", rate = "1 Gbit/s" },
    { sites = ["A", "A"], rtt = "0.5 ms", rate = "10 Gbit/s" },
    { sites = ["B", "B"], rtt = "0.5 ms", rate = "10 Gbit/s" },
    { sites = ["C", "C"], rtt = "0.5 ms", rate = "10 Gbit/s" },
]
[cache]
prefix = "shared"
[compute]
batching = "continuous"
[policy]
placement = "fixed:PLAN"
routing = "ws-rr"
communication = "server-to-server"
[backoff]
max = "1 s"
"""
"""Three pairs of servers, each with the whole model."""
PLAN = [[1, 40], [41, 40]] * 3
PEOPLE = """
[workload]
rate = 20
n_requests = 240
n_input_tokens = 2000
n_output_tokens = 80
turns = 10
think_time = { mean = "30 s" }
n_further_tokens = 300
"""
"""24 people who begin at nearly the same time."""


def served(target: str, *options: str, is_virtual: bool = False) -> Simulation:
    return simulate(Case(load_experiment(target, options)), "testbed", is_virtual=is_virtual, live=False)


def _hits(rows: Sequence[RequestRow]) -> str:
    use = prefix_use(rows)
    return f"{use.hit_ratio:.1%}" if use else ""


def turns(figure: Path | None = None) -> Iterator[str]:
    """Yields a row for each way to keep caches: the mean first token by turn, on ``clustered`` at 0.5 requests per second."""
    found = {}
    yield "| `prefix` | tokens not computed | first token of turn 1 | 2 | 3 | 4 | 5 |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for kind in KINDS:
        rows = served("clustered", f"cache.prefix={kind}", *TALKS, "workload.rate=0.5").rows
        found[kind] = [one.mean or 0.0 for one in ttft_by_turn(rows) or ()]
        yield f"| {kind} | {_hits(rows)} | {' | '.join(f'{time_s:.3g} s' for time_s in found[kind])} |"
    if figure is not None:
        with plotting(LINES) as plt:
            canvas, axes = plt.subplots(figsize=(5.2, 3.2), layout="constrained")
            for (kind, about), marker in zip(KINDS.items(), "os^", strict=True):
                axes.plot(range(1, 6), found[kind], marker=marker, label=f"{kind}: {about}")
            axes.set(xlabel="turn of the conversation", ylabel="mean time to first token (s)", ylim=(0, None))
            axes.set_xticks(range(1, 6))
            axes.legend()
            save(canvas, figure)
            plt.close(canvas)


def engines() -> Iterator[str]:
    """Yields a row per setting: CPU seconds of both engines, and what they find."""
    yield "| `prefix`, rate | fast | virtual | mean first token, fast | virtual | tokens not computed, fast | virtual |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for kind, rate in (("none", 0.5), ("session", 0.5), ("shared", 0.5), ("shared", 3)):
        took, first, reused = [], [], []
        for is_virtual in (False, True):
            began_s = time.process_time()
            options = f"cache.prefix={kind}", *TALKS, f"workload.rate={rate}"
            rows = served("clustered", *options, is_virtual=is_virtual).rows
            took.append(f"{time.process_time() - began_s:.2g} s")
            first.append(f"{fmean(row.times.ttft_s or 0.0 for row in rows):.4f} s")
            reused.append(f"{sum(row.n_cached_tokens or 0 for row in rows):,}")
        yield f"| {kind}, {rate:g}/s | {' | '.join((*took, *first, *reused))} |"


@contextmanager
def chats(workload: str) -> Iterator[str]:
    """Writes ``CHATS`` with a workload; yields the file's path."""
    with tempfile.TemporaryDirectory() as folder:
        path, plan = Path(folder) / "chats.toml", Path(folder) / "plan.json"
        plan.write_text(json.dumps(PLAN), encoding="utf-8")
        path.write_text(CHATS.replace("PLAN", str(plan)) + workload, encoding="utf-8")
        yield str(path)


def routers(workload: str = PEOPLE) -> Iterator[str]:
    """Yields a row per router, on ``CHATS`` with that workload."""
    yield "| routing | tokens not computed | waiting | first token | of further turns | per token | requests by pair of servers |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    with chats(workload) as path:
        for router in ROUTERS:
            simulation = served(path, f"policy.routing={router}")
            rows = [row for row in simulation.rows if row.is_completed]
            names = "queue_s", "ttft_s", "per_token_s"
            means = [fmean(row.times[name] or 0.0 for row in rows) for name in names]
            further = [row.times.ttft_s or 0.0 for row in rows if row.turn]
            pairs = Counter(row.hops[0].server // 2 for row in rows)
            of_further = f"{fmean(further):.2f} s" if further else ""
            yield (
                f"| {router} | {_hits(rows)} | {means[0]:.2f} s | {means[1]:.2f} s | {of_further} | {means[2]:.3f} s "
                f"| {', '.join(str(pairs[number]) for number in range(3))} |"
            )


def mooncake(file: Path, n: int, rate: float) -> Iterator[str]:
    """Yields how much of a trace's prompts begins alike, and the rows of ``routers`` with them."""
    workload = (
        f'[workload]\narrivals = "trace"\nfile = "{file.absolute()}"\nmax_input_tokens = 8192\n'
        f"n_requests = {n}\nrate = {rate}\nn_output_tokens = 16\n"
    )
    with chats(workload) as path:
        requests = load_experiment(path).workload.requests
    implied, tokens = sum(implied_reuse(requests, 16)), sum(request.n_input_tokens for request in requests)
    yield f"{len(requests)} prompts, {implied / tokens:.1%} of their tokens in whole pages as in an earlier one"
    yield from routers(workload)


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks conversations", description=__doc__)
    parser.add_argument("tables", nargs="*", help="turns, engines, routers, or mooncake FILE")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--requests", type=int, default=400, help="of the trace")
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second of the trace")
    options = parser.parse_args(arguments)
    if options.tables[:1] == ["mooncake"]:
        for line in mooncake(Path(options.tables[1]), options.requests, options.rate):
            print(line, flush=True)
        return 0
    tables = {"turns": lambda: turns(options.figure), "engines": engines, "routers": routers}
    for name in options.tables or tables:
        for line in tables[name]():
            print(line, flush=True)
        print()
    return 0

"""What speculative decoding brings by network, acceptance and policy, and how near `tokens = "auto"` is to the best number.

``python -m benchmarks speculation [law] [tokens] [rtt] [policies]`` prints the tables of docs/speculation.md; all take about
three minutes. Every run is simulated; the same drafted tokens agree in all runs of a table's row.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from policies.decoding import Decoding
from testbed.control.placing import RememberedPlacements
from testbed.experiments import load_experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate

HOMES = """
name = "homes"
[model]
profile = "llama-2-70b"
[hardware.home]
base = "helix-a100"
memory = "160 GiB"
[hardware.slow]
base = "helix-l4"
memory = "160 GiB"
[[servers]]
hardware = "home"
site = "A"
[[servers]]
hardware = "home"
site = "B"
[[servers]]
hardware = "slow"
site = "C"
[clients]
site = "D"
[network]
kind = "clusters"
pairs = [
    { from = "A", to = "D", delay = "15 ms", rate = "40 Mbit/s" },
    { from = "D", to = "A", delay = "15 ms", rate = "200 Mbit/s" },
    { from = "B", to = "D", delay = "20 ms", rate = "40 Mbit/s" },
    { from = "D", to = "B", delay = "20 ms", rate = "200 Mbit/s" },
    { from = "A", to = "B", delay = "15 ms", rate = "40 Mbit/s" },
    { from = "B", to = "A", delay = "15 ms", rate = "40 Mbit/s" },
    { sites = ["C", "D"], rtt = "20 ms", rate = "1 Gbit/s" },
    { sites = ["A", "C"], rtt = "30 ms", rate = "40 Mbit/s" },
    { sites = ["B", "C"], rtt = "30 ms", rate = "40 Mbit/s" },
]
[workload]
arrivals = "poisson"
rate = 0.05
n_requests = 20
n_input_tokens = 64
n_output_tokens = 128
[policy]
name = "proposed"
"""
SCENARIOS: dict[str, tuple[str, ...]] = {
    "clustered": ("workload.n_requests=20",),
    "abovenet": ("workload.n_requests=20",),
    "helix-regions": (
        "policy.name=proposed",
        "workload.arrivals=poisson",
        "workload.rate=0.1",
        "workload.n_requests=10",
        "workload.n_input_tokens=64",
        "workload.n_output_tokens=128",
    ),
    "homes": (),
}
ACCEPTANCES = (0.0, 0.3, 0.5, 0.7, 0.9)
FIXED = (1, 2, 3, 5, 8, 12, 16)
_ROUNDS = 1_000_000
_PLACED = RememberedPlacements()


def tpot_s(scenario: str, *sets: str) -> float:
    """Returns the mean seconds per token after the first."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "homes.toml"
        path.write_text(HOMES, encoding="utf-8")
        target = str(path) if scenario == "homes" else scenario
        experiment = load_experiment(target, [*SCENARIOS[scenario], *sets])
    rows = simulate(Case(experiment), "testbed", placements=_PLACED).rows
    return fmean(row.times.tpot_s or 0.0 for row in rows)


def drafts(acceptance: float, tokens: int | str) -> tuple[str, ...]:
    return "decoding.drafter=ngram", f"decoding.acceptance={acceptance}", f"decoding.tokens={tokens}"


def law() -> Iterator[str]:
    """Yields a row per acceptance and number of drafted tokens: drawn tokens per round beside the formula."""
    yield "| acceptance | drafted | tokens per round, law | drawn | difference |"
    yield "| --- | --- | --- | --- | --- |"
    for acceptance in (0.0, 0.5, 0.7, 0.9, 1.0):
        for tokens in (1, 4, 16):
            decoding, n_done = Decoding("ngram", tokens, acceptance, seed=1), 1
            for _ in range(_ROUNDS):
                n_done += decoding.drawn(0, n_done, tokens).made
            expected, drawn = decoding.expected_tokens(), (n_done - 1) / _ROUNDS
            yield f"| {acceptance} | {tokens} | {expected:.4f} | {drawn:.4f} | {drawn / expected - 1:+.3%} |"


def tokens() -> Iterator[str]:
    """Yields a row per scenario and acceptance: no drafts, the best fixed number of tokens, and "auto"."""
    yield "| scenario | acceptance | no drafts, ms | best fixed | ms | auto, ms | auto to best | auto to none |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for scenario in SCENARIOS:
        plain_s = tpot_s(scenario)
        for acceptance in ACCEPTANCES:
            fixed = {n: tpot_s(scenario, *drafts(acceptance, n)) for n in FIXED}
            best = min(fixed, key=fixed.__getitem__)
            auto_s = tpot_s(scenario, *drafts(acceptance, "auto"))
            least_s = min(plain_s, fixed[best])
            yield (
                f"| {scenario} | {acceptance} | {plain_s * 1e3:.1f} | {best} | {fixed[best] * 1e3:.1f} | "
                f"{auto_s * 1e3:.1f} | {auto_s / least_s - 1:+.1%} | {auto_s / plain_s - 1:+.1%} |"
            )


def rtt() -> Iterator[str]:
    """Yields a row per round trip between the clusters: how many times as fast tokens come, by acceptance."""
    yield f"| RTT | no drafts, ms | {' | '.join(f'a = {a}' for a in ACCEPTANCES[1:])} |"
    yield f"| --- | --- | {' | '.join('---' for _ in ACCEPTANCES[1:])} |"
    for ms in (2, 10, 30, 100, 300):
        links = tuple(f"network.pairs.{pair}.rtt={ms} ms" for pair in (3, 4, 5))
        plain_s = tpot_s("clustered", *links)
        gains = (plain_s / tpot_s("clustered", *links, *drafts(a, "auto")) for a in ACCEPTANCES[1:])
        yield f"| {ms} ms | {plain_s * 1e3:.1f} | {' | '.join(f'{gain:.2f}' for gain in gains)} |"


def policies() -> Iterator[str]:
    """Yields a row per scenario and policy: milliseconds per token without drafts and with "auto"."""
    yield "| scenario | policy | no drafts, ms | a = 0.5 | a = 0.7 | a = 0.9 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for scenario in SCENARIOS:
        first = (
            "swarm" if scenario in ("helix-regions", "homes") else "petals"
        )  # PETALS' own measurements are not there
        for policy in (first, "helix", "proposed", "foresight"):
            chosen = f"policy.name={policy}"
            times_s = [
                tpot_s(scenario, chosen, *more)
                for more in ((), *(drafts(a, "auto") for a in ACCEPTANCES[2:]))
            ]
            yield f"| {scenario} | {policy} | {' | '.join(f'{time_s * 1e3:.1f}' for time_s in times_s)} |"


TABLES = {"law": law, "tokens": tokens, "rtt": rtt, "policies": policies}


def run(arguments: Sequence[str]) -> int:
    """Prints the tables named, or all."""
    for name in arguments or TABLES:
        for line in TABLES[name]():
            print(line, flush=True)
        print()
    return 0

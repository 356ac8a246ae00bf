"""Compares Foresight with the other pairs of policies: mean time per token over paired runs, in Markdown.

``python -m benchmarks.foresight [scarce] [published] [--runs N] [--first SEED] [--workers N]`` takes about ten minutes for
all; therefore ``python -m benchmarks`` does not include it. A run draws places, join order and arrivals with its seed, the
same for every pair. Seeds begin at 20: those before were looked at while Foresight was made. The second table of a group adds the published session setup (60 s for
CG-BP's and Foresight's placement, 250 or 350 s for the others), during which a session already holds its
caches.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from policies.problem import InfeasiblePlacement, Placement, PolicyError, Problem
from policies.registry import PAIRS, resolve_placement, resolve_routing
from policies.replay import replay
from policies.workload import RequestPlan
from testbed.experiments import load_experiment
from testbed.results.intervals import mean_of

COMPARED: dict[str, tuple[str, str]] = {
    "proposed": PAIRS["proposed"],
    "foresight": PAIRS["foresight"],
    "foresight + ws-rr": ("foresight", "ws-rr"),
    "cg-bp + foresight": ("cg-bp", "foresight"),
    "petals": PAIRS["petals"],
    "optimized-order": PAIRS["petals-optimized-order"],
    "optimized-number": PAIRS["petals-optimized-number"],
    "optimized-rr": PAIRS["petals-optimized-rr"],
}
"""Name in the tables -> (placement, routing)."""

_OUR_SETUP_S = 60.0
_FIRST_SEED = 20
_RIVALS = ("proposed", "petals", "optimized-order", "optimized-number", "optimized-rr")
"""What Foresight's standing is counted against: the other pairs, without those with a half of its own."""
_TIE_S = 5e-4
"""Means per token that are no farther apart are a tie."""


@dataclass(frozen=True)
class Setting:
    """A scenario with the changes ``sets``. Its requests are drawn with the changes ``actual``, too, which
    the policies do not know.
    """

    name: str
    scenario: str
    sets: tuple[str, ...] = ()
    actual: tuple[str, ...] = ()
    calibration: str = "petals-scattered"
    petals_setup_s: float = 250.0


def _servers(n_mig: int, n_a100: int) -> tuple[str, str]:
    return (f"servers.0.count={n_mig}", f"servers.1.count={n_a100}")


def _load(rate: float, n_output_tokens: int = 128) -> tuple[str, str]:
    return (f"workload.rate={rate}", f"workload.n_output_tokens={n_output_tokens}")


_BURSTS = ("workload.arrivals=gamma", "workload.shape=0.1")
_MIXED = (
    "workload.n_input_tokens={distribution='uniform', low=5, high=40}",
    "workload.n_output_tokens={distribution='lognormal', mean=64, sigma=0.8, max=256}",
)

SCARCE = (
    Setting("1 A100 + 4 MIG, 0.1/s", "abovenet", _servers(4, 1) + _load(0.1)),
    Setting("1 A100 + 4 MIG, 0.5/s", "abovenet", _servers(4, 1) + _load(0.5)),
    Setting("1 A100 + 8 MIG, 0.2/s", "abovenet", _servers(8, 1) + _load(0.2)),
    Setting("1 A100 + 6 MIG, 0.5/s", "abovenet", _servers(6, 1) + _load(0.5)),
    Setting("1 A100 + 8 MIG, 0.5/s", "abovenet", _servers(8, 1) + _load(0.5)),
    Setting("2 A100 + 7 MIG, 0.2/s stated, 0.5/s come", "abovenet", _load(0.2), _load(0.5)),
    Setting("2 A100 + 7 MIG, 0.2/s stated, 1/s come", "abovenet", _load(0.2), _load(1.0)),
    Setting("2 A100 + 7 MIG, 0.5/s stated, 3/s come", "abovenet", _load(0.5), _load(3.0)),
    Setting("2 A100 + 7 MIG, 0.2/s in bursts", "abovenet", _load(0.2), _BURSTS),
    Setting("2 A100 + 7 MIG, 0.5/s in bursts", "abovenet", _load(0.5), _BURSTS),
    Setting("1 A100 + 6 MIG, 0.5/s in bursts", "abovenet", _servers(6, 1) + _load(0.5), _BURSTS),
    Setting("4 clients, 2 A100 + 8 MIG, 1/s", "bellcanada", (*_servers(8, 2), *_load(1), "clients.count=4")),
    Setting(
        "4 clients, 2 A100 + 8 MIG, 0.5/s stated, 2/s come",
        "bellcanada",
        (*_servers(8, 2), *_load(0.5), "clients.count=4"),
        _load(2),
    ),
    Setting("mixed lengths, 2 A100 + 7 MIG, 0.5/s", "abovenet", (*_load(0.5), *_MIXED)),
    Setting("mixed lengths, 1 A100 + 4 MIG, 0.1/s", "abovenet", (*_servers(4, 1), *_load(0.1), *_MIXED)),
    Setting("mixed lengths, 1 A100 + 6 MIG, 0.5/s", "abovenet", (*_servers(6, 1), *_load(0.5), *_MIXED)),
    Setting(
        "mixed lengths, 2 A100 + 7 MIG, 0.2/s stated, 1/s come",
        "abovenet",
        (*_load(0.2), *_MIXED),
        ("workload.rate=1",),
    ),
    Setting(
        "unlike servers: 3 A100 of 60 GB + 6 MIG of 20 GB, 1/s",
        "bellcanada",
        (
            *_servers(6, 3),
            *_load(1),
            "hardware.a100-large.memory=60 GB",
            "hardware.mig-1g-large.memory=20 GB",
        ),
    ),
)


def _published() -> tuple[Setting, ...]:
    settings: list[Setting] = []
    sets: tuple[str, ...]
    loads = [(rate, n_output_tokens) for rate in (0.1, 0.5) for n_output_tokens in (64, 128)]
    for site in ("Cluster0", "Cluster1", "Cluster2"):
        for rate, n_output_tokens in loads:
            sets = (f"clients.site={site}", *_load(rate, n_output_tokens))
            settings.append(Setting(f"{site}, {rate}/s, {n_output_tokens} tokens", "clustered", sets))
        for n_output_tokens in (64, 128):
            sets = (f"clients.site={site}", *_load(1, n_output_tokens), "workload.n_input_tokens=10")
            sets += ("workload.n_requests=50",)
            name = f"{site} as in the published script, 1/s, {n_output_tokens} tokens"
            settings.append(Setting(name, "clustered", sets, calibration="petals-clustered"))
    for topology, setup_s in (("abovenet", 250.0), ("bellcanada", 350.0), ("gts-ce", 350.0)):
        for rate, n_output_tokens in loads:
            name = f"{topology}, {rate}/s, {n_output_tokens} tokens"
            sets = _load(rate, n_output_tokens)
            settings.append(Setting(name, topology, sets, petals_setup_s=setup_s))
    return tuple(settings)


GROUPS = {"scarce": SCARCE, "published": _published()}

SETUPS = ("without session setup", "with the published session setup")


@dataclass(frozen=True)
class Run:
    """Pair -> mean time per token in seconds (None: no placement), for each of ``SETUPS``; and the CPU
    seconds of Foresight's placement.
    """

    times_s: tuple[dict[str, float | None], ...]
    placing_s: float


def drawn(setting: Setting, seed: int) -> tuple[Problem, tuple[RequestPlan, ...]]:
    """Returns the problem that policies see, and the requests that arrive."""
    sets = [f"seed={seed}", f"calibration.set={setting.calibration}", *setting.sets]
    problem = load_experiment(setting.scenario, sets).problem
    return problem, load_experiment(setting.scenario, [*sets, *setting.actual]).workload.requests


def run_once(setting: Setting, seed: int) -> Run:
    """Does one run: all pairs with the same draw."""
    problem, requests = drawn(setting, seed)
    placements: dict[str, Placement | None] = {}
    placing_s: dict[str, float] = {}
    for placing in dict.fromkeys(placing for placing, _ in COMPARED.values()):
        began_s = time.process_time()
        try:
            placements[placing] = resolve_placement(placing).place(problem, None)
        except InfeasiblePlacement:
            placements[placing] = None
        placing_s[placing] = time.process_time() - began_s

    def mean_s(placing: str, routing: str, with_setup: bool) -> float | None:
        placement = placements[placing]
        if placement is None:
            return None
        ours = placing in ("cg-bp", "foresight")
        setup_s = (_OUR_SETUP_S if ours else setting.petals_setup_s) if with_setup else 0.0
        router = resolve_routing(routing).bind(problem, placement)
        try:
            done = replay(problem, placement, router, requests, setup_s)
        except PolicyError:  # PETALS' cache can be too small for the longest request
            return None
        return fmean(d.time_s / d.plan.n_output_tokens for d in done)

    times_s = tuple(
        {pair: mean_s(*policies, with_setup) for pair, policies in COMPARED.items()}
        for with_setup in (False, True)
    )
    return Run(times_s, placing_s["foresight"])


def _mean(values: Sequence[float], digits: int = 3) -> str:
    """Returns mean ± half-width of the 95 % confidence interval as text."""
    mean = mean_of(values)
    if mean is None:
        return "none"
    return f"{mean.mean:.{digits}f}" + (f" ± {mean.half_width:.{digits}f}" if mean.n > 1 else "")


def _row(name: str, runs: Sequence[Run], which: int) -> str:
    """Returns a line of the table. The gain of foresight over proposed (percent) is computed per run."""
    cells = []
    for pair in COMPARED:
        times_s = [t for run in runs if (t := run.times_s[which][pair]) is not None]
        refused = f" ({len(times_s)} of {len(runs)})" if len(times_s) < len(runs) else ""
        cells.append(_mean(times_s) + refused if times_s else "refuses")
    gains = [
        100 * (1 - own / other)
        for run in runs
        if (own := run.times_s[which]["foresight"]) is not None
        and (other := run.times_s[which]["proposed"]) is not None
    ]
    cells += [_mean(gains, 1), f"{min(gains):.1f}"] if gains else ["", ""]
    cells.append(f"{fmean(run.placing_s for run in runs):.2f}")
    return f"| {name} | " + " | ".join(cells) + " |"


def standing(runs: Sequence[Run], which: int) -> str:
    """Returns "alone" where Foresight's mean is the least of all, "tied" or "behind", over the runs that all serve.

    A pair that refuses a run is behind in the setting.
    """

    def mean_s(pair: str) -> float:
        times_s = [math.inf if (t := run.times_s[which][pair]) is None else t for run in runs]
        return fmean(times_s)

    own_s, best_s = mean_s("foresight"), min(mean_s(pair) for pair in _RIVALS)
    if own_s < best_s - _TIE_S:
        return "alone"
    return "tied" if own_s <= best_s + _TIE_S else "behind"


def _number(arguments: Sequence[str], option: str, default: int) -> int:
    return int(arguments[arguments.index(option) + 1]) if option in arguments else default


def main() -> int:
    arguments = sys.argv[1:]
    n_runs, first = _number(arguments, "--runs", 20), _number(arguments, "--first", _FIRST_SEED)
    groups = [name for name in GROUPS if name in arguments] or list(GROUPS)
    columns = ["setting", *COMPARED, "gain %", "worst run %", "CPU s"]
    with ProcessPoolExecutor(_number(arguments, "--workers", os.cpu_count() or 1)) as pool:
        for group in groups:
            settings = GROUPS[group]
            tables: tuple[list[str], ...] = ([], [])
            standings: tuple[list[str], ...] = ([], [])
            for setting in settings:
                print(f"{group}: {setting.name}", file=sys.stderr, flush=True)
                runs = list(pool.map(partial(run_once, setting), range(first, first + n_runs)))
                for which, table in enumerate(tables):
                    table.append(_row(setting.name, runs, which))
                    standings[which].append(standing(runs, which))
            for setup, table, found in zip(SETUPS, tables, standings, strict=True):
                seeds = f"seeds {first} to {first + n_runs - 1}"
                print(f"\n{group}, {setup}: s per token, mean of {n_runs} runs ({seeds}) ± 95 %\n")
                count = Counter(found)
                print(
                    f"Of {len(found)} settings Foresight is the best alone in {count['alone']}, tied with another in "
                    f"{count['tied']}, behind in {count['behind']}.\n"
                )
                print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
                print("\n".join(table), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

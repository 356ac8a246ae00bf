"""``python -m benchmarks optimality``: bounds and CG-BPRR over the optimum, on random small instances.

Instances have 2 or 3 servers, 3 to 7 blocks, 1 to 3 clients and 1 to 4 requests at once, with little memory. A
quarter each: hops through the client or forwarding between servers, requests of equal or of unlike lengths. Only
decode steps count. Each instance is solved by our program and by the paper's; they must agree. Prints the table in
Markdown; ``--out FOLDER`` also draws ``optimality.png`` there, and ``--into PAGE`` replaces the page's part below
``## The table``. All figures but the CPU times are the same on every machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from math import dist
from pathlib import Path
from random import Random
from typing import NamedTuple

from policies.milp import relaxation_s, solve_bprr
from policies.milp_model import BprrModel
from policies.milp_paper import PaperModel
from policies.offline import cg_bprr, knapsack_lower_bound_s, lower_bound_s
from policies.problem import InfeasiblePlacement, ModelSpec, Problem, RequestSpec, ServerSpec

N_INSTANCES = 260
GROUPS = {
    "through the client, equal lengths": (False, False),
    "through the client, unlike lengths": (False, True),
    "forwarding, equal lengths": (True, False),
    "forwarding, unlike lengths": (True, True),
}
"""Name -> (servers forward to each other, requests have unlike lengths)."""
HEADING = "## The table\n"
_MANY_NODES = 100_000
"""Branches for the paper's program, which needs more than ours."""
_REL = 1e-6
_BLOCK_BYTES, _SIDE_S, _LEAST_WAY_S = 1.0, 0.1, 0.001


class Found(NamedTuple):
    """An instance's figures in seconds; ``None`` where CG-BP has no placement."""

    group: str
    optimum: float
    lp_paper: float
    lp: float
    lower_bound: float
    knapsack: float
    cg_bprr: float | None
    theorem1: float | None
    cpu_paper: float
    cpu: float


SHOWN = {
    "lp_paper": "LP relaxation of the paper's program",
    "lower_bound": "T°, the lower bound",
    "knapsack": "T° with whole hops",
    "lp": "LP relaxation of our program",
    "cg_bprr": "CG-BPRR",
    "theorem1": "Theorem 1's bound of CG-BPRR",
}
"""Field of ``Found`` -> its name, in the order of the table and the figure."""


def draw(rng: Random, forwarding: bool, unlike: bool) -> tuple[Problem, list[RequestSpec]]:
    """Draws a problem with nodes in a square, and its requests."""
    n_servers, n_clients, n_blocks = rng.randint(2, 3), rng.randint(1, 3), rng.randint(3, 7)
    places = [(rng.uniform(0, _SIDE_S), rng.uniform(0, _SIDE_S)) for _ in range(n_servers + n_clients)]
    rtt_s = [[2 * (dist(a, b) + _LEAST_WAY_S) for b in places[:n_servers]] for a in places]
    longest = (8, 32)
    requests = [
        RequestSpec(
            rng.randrange(n_clients), *((rng.randint(1, 8), rng.randint(1, 32)) if unlike else longest)
        )
        for _ in range(rng.randint(1, 4))
    ]
    problem = Problem(
        model=ModelSpec("random", n_blocks, 1, _BLOCK_BYTES, rng.uniform(0.05, 0.3) / sum(longest)),
        servers=tuple(
            ServerSpec(
                f"server {j}", "such", rng.uniform(0.3, 1.5) * n_blocks, rng.uniform(0.003, 0.02), 0, 0, 1, 1
            )
            for j in range(n_servers)
        ),
        clients=tuple(f"client {c}" for c in range(n_clients)),
        raw_rtt_s=tuple(map(tuple, rtt_s[n_servers:])),
        token_rtt_s=tuple(map(tuple, rtt_s[n_servers:])),
        input_rtt_base_s=((0.0,) * n_servers,) * n_clients,
        input_rtt_slope_s=((0.0,) * n_servers,) * n_clients,
        server_rtt_s=tuple(map(tuple, rtt_s[:n_servers])),
        n_input_tokens=longest[0],
        n_output_tokens=longest[1],
        request_rate=1.0,
        join_order=tuple(range(n_servers)),
    )
    return replace(problem, forwarding=forwarding), requests


def solved(group: str, problem: Problem, requests: Sequence[RequestSpec]) -> Found | None:
    """Returns an instance's figures; ``None`` if it has no solution.

    Raises ``RuntimeError`` if the two programs disagree, or one of them does not prove its optimum.
    """
    began_s = time.process_time()
    try:
        ours = solve_bprr(problem, requests, decode_only=True, min_blocks=1)
    except InfeasiblePlacement:
        return None
    cpu_s, began_s = time.process_time() - began_s, time.process_time()
    papers = solve_bprr(
        problem, requests, decode_only=True, min_blocks=1, max_nodes=_MANY_NODES, program=PaperModel
    )
    cpu_paper_s = time.process_time() - began_s
    if not (ours.proven_optimal and papers.proven_optimal):
        raise RuntimeError(f"{group}: no proof of the optimum of {requests} on {problem}")
    if abs(ours.objective_s - papers.objective_s) > _REL * ours.objective_s:
        raise RuntimeError(
            f"{group}: {ours.objective_s} s and {papers.objective_s} s for {requests} on {problem}"
        )
    try:
        greedy = cg_bprr(problem, requests, decode_only=True)
    except InfeasiblePlacement:
        greedy = None
    return Found(
        group,
        ours.objective_s,
        relaxation_s(problem, requests, decode_only=True, min_blocks=1, program=PaperModel),
        relaxation_s(problem, requests, decode_only=True, min_blocks=1, program=BprrModel),
        lower_bound_s(problem, requests, decode_only=True),
        knapsack_lower_bound_s(problem, requests, decode_only=True),
        greedy and greedy.objective_s,
        greedy and greedy.theorem1_s,
        cpu_paper_s,
        cpu_s,
    )


def instances(n_instances: int, seed: int) -> list[Found]:
    """Returns the figures of ``n_instances`` instances with a solution, the groups in turn."""
    found: list[Found] = []
    names = list(GROUPS)
    rng = Random(seed)
    while len(found) < n_instances:
        group = names[len(found) % len(names)]
        one = solved(group, *draw(rng, *GROUPS[group]))
        if one is not None:
            found.append(one)
    return found


def ratios(found: Sequence[Found], field: str) -> list[float]:
    """Returns a figure over the optimum, of the instances that have it."""
    return [value / one.optimum for one in found if (value := getattr(one, field)) is not None]


def table(found: Sequence[Found]) -> str:
    """Returns the table in Markdown, with a sentence on what was solved and how long it took."""
    head = ["over the optimum", "instances", "mean", "smallest", "largest", *GROUPS]
    lines = [_row(head), _row(["---", *["---:"] * (len(head) - 1)])]
    for field, name in SHOWN.items():
        values = ratios(found, field)
        means = [
            statistics.fmean(ratios([one for one in found if one.group == group], field)) for group in GROUPS
        ]
        cells = [statistics.fmean(values), min(values), max(values), *means]
        lines.append(_row([name, str(len(values)), *(f"{value:.2f}" for value in cells)]))
    paper_s, ours_s = (statistics.median(getattr(one, key) for one in found) for key in ("cpu_paper", "cpu"))
    longest = [max(getattr(one, key) for one in found) for key in ("cpu_paper", "cpu")]
    n_equal = sum(value <= 1 + _REL for value in ratios(found, "cg_bprr"))
    lines += [
        "",
        f"{len(found)} instances, each solved to the proven optimum by both programs, without one difference. "
        f"CG-BPRR has no placement in {sum(one.cg_bprr is None for one in found)} of them, and finds the optimum in "
        f"{n_equal}. CPU time of a search: {paper_s * 1e3:.0f} ms in the median and {longest[0]:.1f} s at most for "
        f"the paper's program, {ours_s * 1e3:.0f} ms and {longest[1]:.1f} s for ours.",
    ]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figure(found: Sequence[Found], path: Path) -> None:
    """Draws the distribution of every bound and of CG-BPRR over the optimum: a box and all instances as dots."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, axes = plt.subplots(figsize=(7.5, 3.6))
    rng = Random(0)
    for at, field in enumerate(reversed(SHOWN)):
        values = ratios(found, field)
        places = [at + rng.uniform(-0.25, 0.25) for _ in values]
        axes.plot(values, places, ".", markersize=2.5, color="#8fb0d3", zorder=1)
        axes.boxplot(
            [values],
            positions=[at],
            orientation="horizontal",
            widths=0.5,
            showfliers=False,
            manage_ticks=False,
            medianprops={"color": "#d1762b"},
        )
    axes.axvline(1.0, color="#7a3d8a", linewidth=1)
    axes.set_yticks(range(len(SHOWN)), list(reversed(SHOWN.values())))
    axes.set_xlabel("over the optimum (a line at 1)")
    axes.grid(alpha=0.3, axis="x")
    canvas.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(canvas)


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimality", description=__doc__)
    parser.add_argument("--instances", type=int, default=N_INSTANCES, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the instances (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for optimality.png")
    parser.add_argument("--into", type=Path, help="a page whose table is replaced")
    options = parser.parse_args(arguments)
    found = instances(options.instances, options.seed)
    text = table(found)
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        figure(found, options.out / "optimality.png")
    if options.into:
        page = options.into.read_text(encoding="utf-8")
        options.into.write_text(page.partition(HEADING)[0] + HEADING + "\n" + text, encoding="utf-8")
    return 0

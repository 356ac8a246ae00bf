"""`python -m benchmarks rivals`: compares all pairs of policies on several scenarios, workloads and loads, in
Markdown.

Each scenario with a workload is a study of `testbed sweep` (docs/sweeps.md) with the loads as its axis, in a
folder of its own below ``--out``: runs that are there already are not computed again. The highest rates at
which objectives are kept come from `testbed capacity` (docs/answers.md). This module only defines the studies
and the tables. ``--into`` writes the tables to a page, in place of everything after its line "## The tables".
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from policies.registry import PAIRS
from testbed.codeversion import rules_digest
from testbed.control.choice import check_policy
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.studies.capacity.command import Options as CapacityOptions
from testbed.studies.capacity.command import capacity_command
from testbed.studies.capacity.search import TURNOVERS
from testbed.studies.sweep.command import measured
from testbed.studies.sweep.contrast import BETTER, EQUAL, UNRESOLVED, WORSE, Cell, cells_of
from testbed.studies.sweep.disk import make_folder
from testbed.studies.sweep.documents import difference, markdown, number
from testbed.studies.sweep.measures import FAIRNESS, GAP, GOODPUT, HIGHER_IS_BETTER, MET
from testbed.studies.sweep.pool import Local, sigterm_as_ctrl_c
from testbed.studies.sweep.runs import OK, Run, Setup, case_of
from testbed.studies.sweep.store import Lines
from testbed.studies.sweep.study import Options, read_study

CHAT = (
    "workload.arrivals=gamma",
    "workload.shape=0.5",
    'workload.n_input_tokens={distribution="lognormal",mean=754,sigma=0.84,max=2048}',
    'workload.n_output_tokens={distribution="lognormal",mean=239,sigma=0.86,max=1024}',
    "workload.lengths=hidden",
)
LONG_PROMPTS = (
    'workload.n_input_tokens={distribution="lognormal",mean=3000,sigma=0.9,max=8192}',
    'workload.n_output_tokens={distribution="lognormal",mean=150,sigma=0.7,max=512}',
    "workload.lengths=hidden",
)
WORKLOADS: dict[str, tuple[str, ...]] = {"own": (), "chat": CHAT, "long prompts": LONG_PROMPTS}
TRACE = (
    "workload.arrivals=trace",
    "workload.draw=windows",
    "workload.lengths=hidden",
    "workload.n_input_tokens=trace",
    "workload.n_output_tokens=trace",
)
LONGEST_PROMPT = 8192
"""Recorded requests with more input tokens are left out: two A100 that hold BLOOM-176B have room for two of
this length.
"""
LOADS = (0.5, 1.0, 2.0)
LEFT_OUT = (
    *(
        "milp",
        "milp-paper",
        "petals-optimized-order",
        "petals-optimized-number",
        "petals-optimized-rr",
        "cg-bprr",
    ),
    "swarm-ws-rr",
)
"""Pairs that are not compared by default: an exact optimum for small instances, and ablations."""


class Part(NamedTuple):
    """The studies of a scenario.

    - ``objective_s``: limit of the time per further token, about twice that of the fastest pair on idle
      servers
    - ``most_requests``: the most requests per run for saturation; 0: there is no such table, since it would
      take longer than all others of the scenario
    - ``n_requests``: requests per run; ``n_seeds``: runs with generated requests; ``n_windows``: runs with
      recorded ones (0: none)
    - ``workloads``: names in ``WORKLOADS``
    """

    objective_s: float
    most_requests: int
    n_requests: int
    n_seeds: int
    n_windows: int
    workloads: tuple[str, ...] = ("own",)


PARTS = {
    "clustered": Part(0.9, 4000, 200, 5, 3, ("own", "chat")),
    "abovenet": Part(0.9, 4000, 200, 5, 3, ("own", "chat")),
    "bellcanada": Part(0.9, 4000, 150, 5, 3, ("own", "chat")),
    "gts-ce": Part(0.9, 4000, 150, 5, 3, ("own", "chat")),
    "chain-7b": Part(0.3, 200, 120, 5, 3, ("own", "long prompts")),
    "helix-24": Part(0.6, 0, 100, 5, 3),
    "helix-regions": Part(0.6, 0, 100, 5, 0),
    "helix-42": Part(0.6, 0, 80, 3, 0),
}
TTFT_S = 10.0
GIVE_UP = 'backoff.give_up="600 s"'
COMPARED = {MET: "met", "ttft_s_p95": "TTFT p95", "per_token_s_mean": "time per token"}
NEAR_MET, NEAR_RATIO = 0.02, 0.02
SATURATION = "saturation.jsonl"
SATURATION_REQUESTS, SATURATION_RUNS, SATURATION_WIDTH = 100, 3, 0.1


class Table(NamedTuple):
    """One scenario with one workload at one load. ``cells``: one per pair; ``without``: pair -> why it has
    none.
    """

    title: str
    note: str
    cells: list[Cell]
    without: dict[str, str]


class Saturation(msgspec.Struct, frozen=True):
    """A line of ``saturation.jsonl``: the row of `testbed capacity` for one pair. ``key``: digest of all its
    inputs.
    """

    key: str
    row: dict[str, Any]


def settings_of(scenario: str, workload: Sequence[str], n_requests: int) -> tuple[str, ...]:
    """Returns the changes to the scenario that all runs of a workload have, in the syntax of ``--set``.

    All seeds have the same past requests, so that the placement of a pair is computed only once.
    """
    part = PARTS[scenario]
    common = (
        *workload,
        f"workload.n_requests={n_requests}",
        f'workload.slo="ttft={TTFT_S:g}s,tpot={part.objective_s:g}s"',
        GIVE_UP,
    )
    experiment = load_experiment(scenario, common)
    known = experiment.problem.length_samples
    if experiment.workload.sample is not None or not known:
        return common
    return (*common, f"workload.known_lengths={[list(lengths) for lengths in known]}")


def placeable(
    scenario: str, settings: Sequence[str], pairs: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Returns the pairs for which the scenario has all inputs, and (pair -> what is missing) for the
    others.
    """
    found, without = [], {}
    for pair in pairs:
        try:
            case_of(Setup(scenario), Run(tuple(settings), pair, 0))
        except UserError as error:
            without[pair] = str(error).partition(": ")[2].partition(";")[0]
        else:
            found.append(pair)
    return found, without


def tables(
    scenario: str,
    name: str,
    workload: Sequence[str],
    loads: Sequence[float],
    n_runs: int,
    options: argparse.Namespace,
) -> Iterator[Table]:
    """Does the missing runs of a study, and yields one table per load."""
    n_requests = _given(options.requests, PARTS[scenario].n_requests)
    settings = settings_of(scenario, workload, n_requests)
    pairs, without = placeable(scenario, settings, options.pairs)
    own_rate = load_experiment(scenario).problem.request_rate
    rates = [f"{load * own_rate:.6g}" for load in loads]
    study = read_study(
        scenario,
        Options(
            over=(f"workload.rate={','.join(rates)}", f"policy={','.join(pairs)}"),
            overrides=settings,
            n_runs=n_runs,
            baseline=options.beside,
        ),
    )
    print(f"{scenario}, {name}", file=sys.stderr)
    with measured(
        study, _folder(options.out / scenario / name.replace(" ", "-")), Local(options.jobs)
    ) as found:
        cells = cells_of(found.rows)
    what = load_experiment(scenario, settings).workload.source
    for load, rate in zip(loads, rates, strict=True):
        yield Table(
            f"{scenario}, {name}, {load:g} times its rate ({rate}/s)",
            f"{n_runs} {'windows' if workload[:1] == TRACE[:1] else 'seeds'} of {n_requests} requests. "
            f"{_trace_of(what)}",
            [cell for cell in cells if cell.point["workload.rate"] == rate],
            without,
        )


def _folder(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _trace_of(what: str) -> str:
    """Returns the scenario's sentence on which requests of a recording were left out; empty if none were."""
    return f"{what.partition(' tokens')[0]} tokens." if " without " in what else ""


def table_text(table: Table, beside: str) -> str:
    """Returns a table in Markdown. Pairs with equal figures share a row; rows are sorted by the met
    objectives.
    """
    served = [cell for cell in table.cells if cell.n_measured == len(cell.rows)]
    base = next((cell for cell in served if cell.policy == beside), None)
    header = ["pair", "met, %", "goodput, 1/s", "gave up, %"]
    header += ["TTFT, s", "TPOT, s", "gap, s", "decode tokens/s", "even"]
    header += [f"{words}, against `{beside}`" for words in COMPARED.values()]
    header += ["placing, CPU s", "routing, CPU ms"]
    alike: dict[tuple[str, ...], list[Cell]] = {}
    for cell in sorted(served, key=lambda cell: -_value(cell, MET)):
        alike.setdefault(tuple(_figures(cell, base)), []).append(cell)
    rows = []
    for figures, cells in alike.items():
        names = ", ".join(f"`{cell.policy}`" for cell in cells)
        rows.append([names, *figures, f"{_decision_s(cells, 'placement_cpu_s'):.2g}"])
        rows[-1].append(f"{1e3 * _decision_s(cells, 'routing_cpu_s'):.2g}")
    why = {
        cell.policy: next(row.record.reason for row in cell.rows if row.record.status != OK)
        for cell in table.cells
        if cell not in served
    }
    lines = [f"### {table.title}", "", table.note.rstrip(), "", markdown(header, rows)]
    lines += [
        f"No figures of `{pair}`: {reason.partition(';')[0]}.\n"
        for pair, reason in (why | table.without).items()
    ]
    return "\n".join(lines)


def _figures(cell: Cell, base: Cell | None) -> list[str]:
    n_failed = 100 * _value(cell, "n_failed") / _value(cell, "n_requests")
    return [
        f"{100 * _value(cell, MET):.3g}",
        number(cell.mean(GOODPUT)),
        f"{n_failed:.3g}",
        *(
            " / ".join(f"{_value(cell, f'{time}_{share}'):.3g}" for share in ("p50", "p95", "p99"))
            for time in ("ttft_s", "tpot_s", GAP)
        ),
        f"{_value(cell, 'decode_tokens_per_s'):.3g}",
        f"{_value(cell, FAIRNESS):.3g}",
        *(
            "" if base is None or base is cell else difference(cell.against(base, measure))
            for measure in COMPARED
        ),
    ]


def _value(cell: Cell, measure: str) -> float:
    """Returns the mean over runs; nan if no run has the measure."""
    found = cell.mean(measure)
    return float("nan") if found is None else found.mean


def _decision_s(cells: Sequence[Cell], name: str) -> float:
    """Returns the mean over runs in CPU seconds; of pairs that share a row the largest."""
    return max(fmean(getattr(row.record, name) or 0.0 for row in cell.rows) for cell in cells)


def score_text(found: Sequence[Table], beside: str) -> str:
    """Returns Markdown: how ``beside`` compares with each pair by the paired interval, the best pair of each
    table, and the tables in which ``beside`` is worse.
    """
    counts: dict[str, dict[str, Counter[str]]] = {}
    best: list[list[str]] = []
    n_near: Counter[str] = Counter()
    places: dict[str, Counter[str]] = {measure: Counter() for measure in COMPARED}
    n_nobody = n_always = 0
    losses = []
    for table in found:
        served = [cell for cell in table.cells if cell.n_measured == len(cell.rows)]
        base = next((cell for cell in served if cell.policy == beside), None)
        if base is None:
            continue
        best.append([table.title])
        for measure, words in COMPARED.items():
            sign = 1 if measure in HIGHER_IS_BETTER else -1
            own, top = _value(base, measure), max(sign * _value(cell, measure) for cell in served) * sign
            names = [cell.policy for cell in served if math.isclose(_value(cell, measure), top, rel_tol=1e-9)]
            near = NEAR_MET if measure == MET else NEAR_RATIO * abs(top)
            n_near[measure] += abs(own - top) <= near
            places[measure]["alone" if names == [beside] else "tied" if beside in names else "behind"] += 1
            if measure == MET:
                n_nobody += top == 0
                n_always += top == 1
            best[-1] += [", ".join(f"`{name}`" for name in names), f"{top:.3g}", f"{own:.3g}"]
            for cell in served:
                gap = cell.against(base, measure)
                if cell is base or gap is None:
                    continue
                counts.setdefault(cell.policy, {}).setdefault(measure, Counter())[gap.verdict or ""] += 1
                if gap.verdict == BETTER:
                    losses.append(f"- {table.title}: `{cell.policy}`, {words} {difference(gap)}")
    rows = [
        [
            f"`{pair}`",
            *(
                # The verdict is on the other pair: if that is worse, ``beside`` is better.
                " / ".join(str(of[measure][verdict]) for verdict in (WORSE, BETTER, EQUAL, UNRESOLVED))
                for measure in COMPARED
            ),
        ]
        for pair, of in counts.items()
    ]
    n_nearly = ", ".join(f"{words} {n_near[measure]}" for measure, words in COMPARED.items())
    standings = "; ".join(
        f"{words}: alone {of['alone']}, tied {of['tied']}, behind {of['behind']}"
        for measure, words in COMPARED.items()
        for of in (places[measure],)
    )
    columns = [f"{words}: better / worse / equal / unresolved" for words in COMPARED.values()]
    bests = [head for words in COMPARED.values() for head in (f"best {words}", "", f"`{beside}`")]
    return "\n".join(
        [
            f"### `{beside}` against each pair",
            "",
            f"Number of tables, of {len(best)}, by the paired 95 % interval.",
            "",
            markdown(["against", *columns], rows),
            f"### The best of each table, and `{beside}`",
            "",
            f"`{beside}` is best, or within 0.02 (met) or {NEAR_RATIO:.0%} (times) of the best mean, "
            f"in so many of {len(best)} tables: {n_nearly}.",
            "",
            f"With the best mean alone, or tied with another pair: {standings}. In {n_nobody} tables nobody meets "
            f"the objective, in {n_always} the best pair always does.",
            "",
            markdown(["table", *bests], best),
            f"### Where `{beside}` is worse, by the interval",
            "",
            *(losses or ["Nowhere."]),
            "",
        ]
    )


def saturation_text(scenario: str, options: argparse.Namespace) -> str:
    """Returns Markdown: per pair the highest rate at which nine requests in ten keep each objective."""
    part = PARTS[scenario]
    slo = f"ttft_p90={TTFT_S:g}s,tpot_p90={part.objective_s:g}s"
    settings = settings_of(scenario, (), min(SATURATION_REQUESTS, part.most_requests))
    pairs, _ = placeable(scenario, settings, options.pairs)
    folder = options.out / scenario / "saturation"
    make_folder(_folder(folder), SATURATION)
    rows: list[dict[str, Any]] = []
    with Lines(folder / SATURATION) as lines:
        stored = (msgspec.json.decode(line, type=Saturation) for _, line in lines.read())
        known = {found.key: found.row for found in stored}
        for pair in pairs:
            asked = CapacityOptions(
                slo=slo,
                policies=(pair,),
                overrides=settings,
                n_runs=SATURATION_RUNS,
                jobs=options.jobs,
                width=SATURATION_WIDTH,
                most_requests=part.most_requests,
            )
            alone = dataclasses.replace(asked, jobs=1)  # the result does not depend on the number of workers
            key = hashlib.sha256(f"{rules_digest()} {scenario} {alone}".encode()).hexdigest()[:32]
            if key not in known:
                print(f"{scenario}: saturation of {pair}", file=sys.stderr)
                answer, _, _ = capacity_command(scenario, asked)
                known[key] = answer["policies"][0]
                lines.append(Saturation(key, known[key]))
            rows.append(known[key])
    rows.sort(key=lambda row: -(row["max_rate"] or 0.0))
    shown = [
        [
            f"`{row['policy']}`",
            ("at most " if _are_few(row) else "") + _rate(row["max_rate"]),
            f"{_rate(row['low'])} to {_rate(row['high'])}" if row["low"] or row["high"] else "",
            row["limited_by"] or "",
            _rate(row["draining_rate"]),
            str(row["n_requests"] or ""),
            row["reason"] or "",
        ]
        for row in rows
    ]
    header = ["pair", "requests/s", "interval", "limited by", "drains up to", "requests", "why none"]
    return f"### {scenario}: {slo}\n\n{markdown(header, shown)}"


def _are_few(row: dict[str, Any]) -> bool:
    """Whether the rate may be too high: fewer requests were served than ``TURNOVERS`` times those in the
    system.
    """
    return row["mean_in_system"] is not None and row["n_requests"] < TURNOVERS * row["mean_in_system"]


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def run(arguments: Sequence[str]) -> int:
    """Does all studies and prints or writes the tables. Returns the exit code."""
    options = _options(arguments)
    found: list[Table] = []
    saturations: list[str] = []
    try:
        head = _head(options.into)
        traces = _traces(options)
        options.trace_load = _trace_loads(options, traces)
        for pair in options.pairs:
            check_policy(pair)
        with sigterm_as_ctrl_c():
            for scenario in options.scenarios:
                found += _of(scenario, traces, options)
                if options.saturation and PARTS[scenario].most_requests:
                    saturations.append(saturation_text(scenario, options))
    except UserError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("benchmarks: stopped; the same command goes on", file=sys.stderr)
        return 130
    text = "\n".join(
        [score_text(found, options.beside), *saturations, *(table_text(t, options.beside) for t in found)]
    )
    if options.into is None:
        print(text)
    else:
        options.into.write_text(head + text, encoding="utf-8")
    return 0


def _head(page: Path | None) -> str:
    """Returns the part of ``page`` that stays. Raises ``UserError`` if it cannot be read or has no
    such line.
    """
    if page is None:
        return ""
    mark = "\n## The tables\n"
    try:
        head, found, _ = page.read_text(encoding="utf-8").partition(mark)
    except OSError as error:
        raise UserError(f"--into {page}: {error.strerror}") from None
    if not found:
        raise UserError(f'--into {page}: has no line "{mark.strip()}", after which the tables are written')
    return f"{head}{mark}\n"


def _of(scenario: str, traces: dict[str, tuple[str, ...]], options: argparse.Namespace) -> Iterator[Table]:
    """Yields all tables of a scenario."""
    part = PARTS[scenario]
    for name, workload in WORKLOADS.items():
        if name in (options.workloads if options.workloads is not None else part.workloads):
            yield from tables(
                scenario, name, workload, options.loads, _given(options.seeds, part.n_seeds), options
            )
    for name, workload in traces.items() if part.n_windows else ():
        loads = [load * options.trace_load.get(name, 1.0) for load in options.loads]
        yield from tables(scenario, name, workload, loads, _given(options.seeds, part.n_windows), options)


def _given(number: int | None, planned: int) -> int:
    return planned if number is None else number


def _traces(options: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Returns name of a recording -> changes to the scenario. Raises ``UserError`` if ``--trace`` is
    invalid.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in options.trace:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise UserError(f"--trace {text}: must be NAME=FILE")
        if not Path(file).is_file():
            raise UserError(f"--trace {text}: there is no file {file}")
        found[name] = (
            *TRACE,
            f'workload.file="{Path(file).resolve()}"',  # relative paths would be relative to the scenario
            f"workload.max_input_tokens={LONGEST_PROMPT}",
        )
    return found


def _trace_loads(options: argparse.Namespace, names: Collection[str]) -> dict[str, float]:
    """Returns name of a recording -> factor on its loads. Raises ``UserError`` if ``--trace-load`` is
    invalid.
    """
    found = {}
    for text in options.trace_load:
        name, _, part = text.partition("=")
        if name not in names:
            raise UserError(f"--trace-load {text}: no --trace {name}; write NAME=PART of one")
        try:
            found[name] = float(part)
        except ValueError:
            raise UserError(
                f"--trace-load {text}: {part or 'nothing'} is not a number; write NAME=PART"
            ) from None
    return found


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks rivals", description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder of the studies; runs that it has are not computed again",
    )
    parser.add_argument(
        "--into",
        type=Path,
        help='a page whose part after "## The tables" is replaced; default: print to stdout',
    )
    parser.add_argument("--scenarios", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument(
        "--workloads", nargs="*", choices=list(WORKLOADS), help="default: those planned for each scenario"
    )
    parser.add_argument("--trace", nargs="*", default=[], metavar="NAME=FILE", help="recorded requests, too")
    parser.add_argument(
        "--trace-load",
        nargs="*",
        default=[],
        metavar="NAME=PART",
        help="factor on --loads for a trace, for example if its requests are longer",
    )
    parser.add_argument(
        "--loads", nargs="+", type=float, default=LOADS, help="loads as factors on the scenario's own rate"
    )
    parser.add_argument("--pairs", nargs="+", default=[pair for pair in PAIRS if pair not in LEFT_OUT])
    parser.add_argument("--beside", default="foresight", help="the pair that others are compared with")
    parser.add_argument(
        "--seeds", type=int, help="runs per pair and load; default: as planned for each scenario"
    )
    parser.add_argument(
        "--requests", type=int, help="requests per run; default: as planned for each scenario"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--saturation", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args(arguments)

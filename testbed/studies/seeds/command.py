"""``testbed up --runs``: does one run per seed, and prints the means over them, as `testbed simulate --runs`
does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from policies.problem import InfeasiblePlacement
from testbed.errors import EXIT_INTERRUPTED, RunError, TestbedError, UserError
from testbed.experiments import Override
from testbed.experiments.policy import PolicyChoice
from testbed.records.summary import RunSummary
from testbed.results.verified import verdict
from testbed.rundir import SEED, check_new_folder
from testbed.runs.session import RunOptions, RunSession, exit_code
from testbed.runtime.stage import choose_stage
from testbed.simulator.answer import answer
from testbed.simulator.cases import Case
from testbed.simulator.engine import EMULATED, TESTBED, Simulation, simulate
from testbed.simulator.runs import aggregate, cases_of, drawn_of, fingerprint, same_run_error
from testbed.simulator.text import comparison_text
from testbed.simulator.virtual import served_by
from testbed.terminal import say


def seeds_command(
    target: str,
    choice: PolicyChoice,
    overrides: Sequence[Override],
    seed: int | None,
    n_runs: int,
    out: Path | None,
    options: RunOptions,
    *,
    as_json: bool,
) -> int:
    """Run the scenario with ``n_runs`` seeds, each into its own folder in ``out``, and print the means.

    Returns the exit code: 0 only if all requests of all runs completed with the right tokens. A run that fails is reported with its
    reason and left out of the means. After Ctrl-C the means are over the runs that have ended. Raises
    ``UserError`` for settings that no seed can run, if no seed has a placement, and if all runs are equal;
    ``RunError`` if no run has a result.
    """
    if options.hold or options.page_port is not None:
        raise UserError("--hold and --page are for one run: leave out either these or --runs")
    rows: list[dict[str, Any]] = []
    prints: list[Any] = []
    code, drawn = 0, None
    cases = list(cases_of(target, choice, overrides, seed, n_runs))
    if _would_be_one_run(cases):
        raise same_run_error([{"id": cases[0].experiment.name, "n_runs": n_runs}])
    for case in cases:
        if out is None:
            out = Path("runs") / f"{case.experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        if not rows:
            check_new_folder(out)
            drawn = drawn_of(case.experiment)
        try:
            row, summary = _run(case, out, options)
        except KeyboardInterrupt:
            row, summary = None, None
        if row is None:
            code = EXIT_INTERRUPTED
            break
        code = 1 if summary is None or exit_code(summary) else code
        say(f"seed {row['seed']}: {_outcome(row, summary)} ({len(rows) + 1} of {n_runs} runs)")
        rows.append(row)
        prints.append(fingerprint(case, row))
    if code == EXIT_INTERRUPTED:
        say(f"interrupted: {len(rows)} of {n_runs} runs came to their end; everything is in {out}")
    if not rows:
        return code
    is_same_run = len(rows) > 1 and all(one == prints[0] for one in prints[1:])
    whole_row = aggregate(rows, drawn, is_same_run) | {"target": target}
    if not whole_row["feasible"]:
        assert out is not None, "there were runs"
        has_begun = any((out / f"{SEED}{row['seed']}").exists() for row in rows)
        kind = RunError if has_begun else UserError  # without a placement no run leaves a folder
        raise kind(f"{whole_row['id']}: no run came to a result: {whole_row['error']}")
    if is_same_run:
        raise same_run_error([whole_row])
    typer.echo(json.dumps(whole_row) if as_json else comparison_text([whole_row]))
    return code


def _would_be_one_run(cases: Sequence[Case]) -> bool:
    """Return whether all of several runs in virtual time would be the same, by simulations, which take less time."""
    first = cases[0].experiment
    requests = first.workload.requests
    if len(cases) < 2 or any(case.experiment.workload.requests != requests for case in cases):
        return False
    if choose_stage(first).clock == "real":
        return False
    try:
        rows = (answer(simulate(case, TESTBED, live=False)) for case in cases)
        prints = (
            fingerprint(case, row) if row["feasible"] else None for case, row in zip(cases, rows, strict=True)
        )
        one = next(prints)
        return one is not None and all(other == one for other in prints)
    except TestbedError:  # the runs have the reason
        return False


def _run(case: Case, out: Path, options: RunOptions) -> tuple[dict[str, Any] | None, RunSummary | None]:
    """Do one run. Returns its result (None if it was interrupted), and its summary (None if it broke, too).

    Raises ``UserError`` for settings that no seed can run.
    """
    experiment = case.experiment
    stage = choose_stage(experiment)
    clock = f"{stage.clock} clock"
    error: TestbedError
    try:
        ended = RunSession(experiment, out / f"{SEED}{experiment.seed}", options, say).run()
        summary = ended.summary
        if ended.interrupted or summary is None:
            return None, None
        if ended.error is None:
            placed, served = ended.placed, served_by(ended)
            row = answer(
                Simulation(case, EMULATED, clock, stage.why, placed.placement, placed.decision_s, served)
            )
            if options.objectives or experiment.objectives:
                row["goodput_rps"] = summary.goodput_rps
            return row, summary
        error = ended.error
    except UserError as problem:
        if not isinstance(problem.__cause__, InfeasiblePlacement):
            raise
        error = problem
    except RunError as problem:
        error = problem
    why = f"seed {experiment.seed}: {error}"
    return answer(Simulation(case, EMULATED, clock, stage.why, error=why)), None


def _outcome(row: dict[str, Any], summary: RunSummary | None) -> str:
    if not row["feasible"]:
        return str(row["error"]).partition(": ")[2]
    tokens = f"; {verdict(summary)}" if summary is not None and summary.compute == "blocks" else ""
    return f"{row['n_completed']:,} of {row['n_requests']:,} requests completed{tokens}"

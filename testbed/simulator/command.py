"""``testbed simulate``: simulates every target under every policy and seed; prints and writes results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from testbed.errors import UserError
from testbed.experiments import Change, Override
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.slo import Objectives
from testbed.records.plan import REFERENCE
from testbed.results.costs import ENERGY
from testbed.results.slo import goodput_rps
from testbed.rundir import SEED, check_new_folder
from testbed.simulator.answer import answer
from testbed.simulator.cases import Case, concurrency_of, instance_case, is_instance, without_setup
from testbed.simulator.engine import BUSIEST, MAX_STEPS, MODES, TESTBED, VIRTUAL, Simulation, simulate
from testbed.simulator.runs import add_gain, aggregate, cases_of, drawn_of, fingerprint, same_run_error
from testbed.simulator.summary import n_hop_rows, summarize_simulation
from testbed.simulator.tables import write_simulation
from testbed.simulator.text import comparison_text
from testbed.terminal import say, unsaid


@dataclass(frozen=True)
class Options:
    """The options of the command line. ``None`` for ``mode`` and ``session_setup``: the target's default."""

    choices: tuple[PolicyChoice, ...]
    n_runs: int = 1
    seed: int | None = None
    session_setup: str | None = None
    mode: str | None = None
    design_concurrency: str | None = None
    overrides: tuple[str, ...] = ()
    objectives: Objectives | None = None
    out: Path | None = None
    clock: str | None = None


def simulate_command(targets: Sequence[str], options: Options, *, as_json: bool) -> int:
    """Simulate every target under every policy; returns the exit code.

    With ``as_json`` one object per target and policy is printed as soon as it is known, also for an
    infeasible placement. As text, it is an error if all placements are infeasible. Raises ``UserError``.
    """
    _check(targets, options)
    several = len(targets) * len(options.choices) > 1
    if options.out is not None:
        check_new_folder(options.out)
    rows = []
    folders = _folders(targets)
    for target in targets:
        first: dict[str, Any] | None = None
        replays: list[dict[str, Any]] = []
        for choice in options.choices:
            row = _row(target, choice, options, folders[target] if several else None)
            rows.append(row)
            if first is None:
                first = row
            elif options.n_runs > 1:
                add_gain(first, row)
            # Printed later: if all policies' runs are replays, all are refused.
            replays.append(row)
            if not row.get("same_run"):
                for ready in replays if as_json else ():
                    print(json.dumps(ready), flush=True)
                replays = []
        if replays and len(replays) == len(options.choices):
            raise same_run_error(replays)
        for ready in replays if as_json else ():
            print(json.dumps(ready), flush=True)
    if not as_json:
        infeasible = [row for row in rows if not row["feasible"]]
        if len(infeasible) == len(rows):
            raise UserError("; ".join(dict.fromkeys(f"{row['id']}: {row['error']}" for row in infeasible)))
        typer.echo(comparison_text(rows))
    return 1 if any(row.get("n_failed") for row in rows) else 0


def _row(target: str, choice: PolicyChoice, options: Options, folder: str | None) -> dict[str, Any]:
    """Simulate a target under a policy; returns its object, or the one of all its runs."""
    seen: list[dict[str, Any]] = []
    drawn, first, is_same_run = None, None, True
    for case in _cases(target, choice, options):
        row = _one(case, options, folder, is_first=not seen)
        seen.append(row)
        if options.n_runs > 1:
            if first is None:
                drawn, first = drawn_of(case.experiment), fingerprint(case, row)
            elif is_same_run:
                is_same_run = fingerprint(case, row) == first
    whole = seen[0] if options.n_runs == 1 else aggregate(seen, drawn, is_same_run)
    whole["target"] = target
    return whole


def _folders(targets: Sequence[str]) -> dict[str, str]:
    """Return a folder name per target: the file's name, with a number if two are the same."""
    names: dict[str, str] = {}
    for target in targets:
        plain = _slug(Path(target).stem)
        name, number = plain, 2
        while name in names.values():
            name, number = f"{plain}-{number}", number + 1
        names[target] = name
    return names


def _check(targets: Sequence[str], options: Options) -> None:
    """Raise ``UserError`` for options that contradict each other, before anything is simulated."""
    policies = [choice.pair or "+".join(map(str, choice.halves)) for choice in options.choices]
    for what, named, known in (
        ("target", targets, targets),
        ("policy", policies, [choice.halves for choice in options.choices]),
    ):
        for i, name in enumerate(named):
            if known[i] in known[:i]:
                raise UserError(f"the {what} {name} is given twice; leave one out")
    if options.clock not in (None, "auto", "virtual", "real"):
        raise UserError(f"--clock must be auto or virtual, not {options.clock!r}")
    if options.clock == "real":
        raise UserError(
            "a simulation does not run in real time; use `testbed up --clock real`, or leave --clock out"
        )
    if options.clock == "virtual" and options.mode == REFERENCE:
        raise UserError("--clock virtual cannot be combined with --mode reference; leave one of the two out")
    if options.mode is not None and options.mode not in MODES:
        raise UserError(f"--mode must be {' or '.join(MODES)}, not {options.mode!r}")
    if options.session_setup not in (None, "reference", "none"):
        raise UserError(f"--session-setup must be reference or none, not {options.session_setup!r}")
    instances = [target for target in targets if is_instance(target)]
    if instances:
        for given, name in (
            (options.n_runs > 1, "--runs"),
            (options.seed is not None, "--seed"),
            (bool(options.overrides), "--set"),
        ):
            if given:
                raise UserError(
                    f"{name} is only for scenarios, since an instance file is complete; leave it out for "
                    f"{instances[0]}"
                )


def _cases(target: str, choice: PolicyChoice, options: Options) -> Iterator[Case]:
    setup = options.session_setup == "reference"
    if is_instance(target):
        yield instance_case(Path(target), choice, setup, concurrency_of(options.design_concurrency))
        return
    overrides: list[Override] = list(options.overrides)
    if options.session_setup is not None:
        overrides.append(Change("calibration.session_setup", setup))
    if options.design_concurrency is not None:
        overrides.append(f"policy.design_concurrency={options.design_concurrency}")
    yield from cases_of(target, choice, overrides, options.seed, options.n_runs)


def _one(case: Case, options: Options, target: str | None, *, is_first: bool) -> dict[str, Any]:
    """Simulate one case, the first or a further run, write its tables if asked for, and return its object.

    With several targets or policies the tables are in the folder ``target``.
    """
    mode = options.mode or (REFERENCE if case.source is not None else TESTBED)
    folder = _folder(case, options, target)
    is_virtual = options.clock == "virtual"
    of = "" if target is None else f"{target}, {case.policy}: "

    def announce(engine: str) -> None:
        """Say which engine serves the case and why, unless an earlier run of these had the same reason.

        Of several runs, without the use of the busiest link, which each would have another of.
        """
        text = engine if options.n_runs == 1 else engine.partition(BUSIEST)[0]
        if unsaid([of + text]):
            say(of + text if is_first else f"{of}seed {case.experiment.seed}: {text}")

    simulation = simulate(case, mode, is_virtual=is_virtual, folder=folder, announce=announce)
    row = answer(simulation)
    objectives = case.experiment.objectives if options.objectives is None else options.objectives
    if objectives and simulation.placement is not None:
        row["goodput_rps"] = goodput_rps(simulation.rows, objectives)
    bare_run: Simulation | None = None
    given = case.experiment.policy.design_concurrency
    if given is not None and simulation.placement and simulation.placement.design_concurrency is None:
        row["note"] = f"{case.policy} uses no design concurrency: {given} has no effect"
    if case.experiment.calibration.session_setup_s and simulation.placement is not None:
        bare_run = simulate(without_setup(case), mode, is_virtual=is_virtual)
        bare = answer(bare_run)
        row["mean_without_session_setup"] = bare["mean"]
        row["n_failed_without_session_setup"] = bare["n_failed"]
    has_use_of_hops = folder is not None or ENERGY in row
    if has_use_of_hops and simulation.served.summary is None and (n := n_hop_rows(simulation)) > MAX_STEPS:
        row["n_hops_left_out"] = n
    if folder is not None and simulation.placement is not None and simulation.engine != VIRTUAL:
        write_simulation(folder, simulation, summarize_simulation(simulation, objectives, bare_run))
    return row


def _folder(case: Case, options: Options, target: str | None) -> Path | None:
    """Return the folder for the tables of a case; ``None`` if they are not written."""
    folder = options.out
    if folder is not None and target is not None:
        folder = folder / target / _slug(case.policy)
    if folder is not None and options.n_runs > 1:
        folder = folder / f"{SEED}{case.experiment.seed}"
    return folder


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)

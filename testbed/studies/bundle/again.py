"""Computes a bundle's results again, from copies of its inputs in a fresh folder."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from netem.networks import IN_PROCESS
from policies.problem import PolicyError
from testbed.control.placing import load_to_run
from testbed.errors import RunError, UserError
from testbed.experiments import changed
from testbed.experiments.experiment import Experiment
from testbed.experiments.inputs import CALL, FILES, INPUTS, Inputs, copy_file
from testbed.experiments.policy import HALVES, PolicyChoice
from testbed.experiments.sources import Document, read_toml
from testbed.records.plan import PLAN, Plan, read_plan
from testbed.records.summary import read_summary
from testbed.results.slo import objectives_of
from testbed.rundir import TWIN
from testbed.runs.session import RunOptions, RunSession, placed_experiment
from testbed.simulator.cases import Case, instance_case
from testbed.simulator.engine import VIRTUAL, simulate
from testbed.simulator.summary import summarize_simulation
from testbed.simulator.tables import write_simulation
from testbed.studies.score import command as score
from testbed.studies.score.text import headline
from testbed.studies.sweep import study as sweep
from testbed.studies.sweep.command import TABLES, measured, workers_of, write_tables
from testbed.studies.sweep.executors import LOCAL
from testbed.studies.sweep.kept import REQUESTS
from testbed.studies.sweep.pool import sigterm_as_ctrl_c
from testbed.studies.sweep.runs import REAL
from testbed.studies.sweep.table import RESULTS

T = TypeVar("T")

_FABRIC_TOLERANCE_S = 1.5e-6
_OF_REAL_TIME = "the run was in real time: its measured times cannot be the same on any machine; compared is its twin in virtual time"
_OF_A_RUN = ("requests.parquet", "hops.parquet", "links.parquet", "events.jsonl", "trace.json")
_OF_A_SWEEP = (RESULTS, REQUESTS, *TABLES[1:])


class Again(NamedTuple):
    """What is to be compared: the same ``files`` in the folders ``bundled`` and ``found``.

    ``tolerance_s``: how far times may differ. ``note``: what cannot be the same, in words. ``measured``: columns and keys
    that are times of the machine.
    """

    bundled: Path
    found: Path
    files: tuple[str, ...]
    tolerance_s: float = 0.0
    note: str = ""
    measured: tuple[str, ...] = ()


@contextmanager
def unpacked(result: Path, inputs: Inputs | None, folder: Path) -> Iterator[None]:
    """Copy the inputs of ``result`` into the new ``folder``; the body runs where their command ran, and finds its modules."""
    here, path = Path.cwd(), list(sys.path)
    if inputs is None:
        folder.mkdir()
    else:
        (folder / inputs.folder).mkdir(parents=True, exist_ok=True)
        for file in (result / INPUTS / FILES).rglob("*"):
            copy_file(file, folder / file.relative_to(result / INPUTS / FILES))
        for file in sorted(folder.rglob("*.toml")) if inputs.renamed else ():
            text = file.read_text(encoding="utf-8")
            file.write_text(moved(text, inputs, folder, file.parent), encoding="utf-8")
        sys.path[:0] = [str(folder / place) for place in inputs.path]
    os.chdir(folder if inputs is None else folder / inputs.folder)
    try:
        yield
    finally:
        os.chdir(here)
        sys.path[:] = path


def call_in(folder: Path, inputs: Inputs) -> dict[str, Any]:
    """Return the command with paths as they are in the ``folder`` of ``unpacked``."""
    found: dict[str, Any] = json.loads(moved(_json(inputs.call), inputs, folder, folder / inputs.folder))
    return found


def moved(text: str, inputs: Inputs, folder: Path, start: Path) -> str:
    """Return ``text`` with paths relative to ``start`` in the place of the absolute ones that are renamed."""
    for old, new in sorted(inputs.renamed.items(), key=lambda names: -len(names[0])):
        text = text.replace(_json(old)[1:-1], _json(os.path.relpath(folder / new, start))[1:-1])
    return text


def _json(value: Any) -> str:
    """Return JSON in which letters stand as in a TOML file: not as escapes."""
    return json.dumps(value, ensure_ascii=False)


def _read(called: Callable[[Mapping[str, Any]], T], call: Mapping[str, Any]) -> T:
    """Return a command of a bundle as its module has it. Raises ``UserError`` if it is none of this version."""
    try:
        return called(call)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"the command in {INPUTS}/{CALL} is none of this version ({error!r}); use the bundle's own"
        ) from None


def score_again(result: Path, call: Mapping[str, Any], out: Path, jobs: int | None) -> Again:
    """Score the policy, or make the leaderboard again. Raises ``UserError``."""
    is_board, policies, options = _read(score.called, call)
    options = replace(options, out=out, jobs=jobs)
    if is_board:
        answer, _, _ = score.leaderboard_command(policies, options)
    else:
        answer, _, _ = score.score_command(policies[0], options)
    notes = []
    for one in answer["policies"] if is_board else [answer]:
        valid = "valid" if one["valid"] else f"not valid: {one['why']}"
        notes.append(f"{headline(one)}, {'' if one['checks'] else 'not checked, '}{valid}")
    measured = ("place_cpu_s", "route_cpu_ms", "out")
    return Again(result, out, (score.SCORE,), note="\n".join(notes), measured=measured)


def sweep_again(result: Path, call: Mapping[str, Any], out: Path, jobs: int | None) -> Again:
    """Do all runs of a sweep again. Raises ``UserError`` for one in real time."""
    target, options = _read(sweep.called, call)
    study = sweep.read_study(target, options)
    if study.engine == REAL:
        raise UserError(
            "this sweep measured a machine in real time (--engine real), which no other run repeats; with --engine "
            "virtual it can be repeated"
        )
    with sigterm_as_ctrl_c(), measured(study, out, workers_of(study, LOCAL, jobs)) as results:
        if results.stopped:
            raise KeyboardInterrupt("stopped; nothing is kept of it")
        write_tables(out, study, results)
    return Again(result, out, tuple(name for name in _OF_A_SWEEP if (result / name).is_file()))


def why_not_again(result: Path) -> str | None:
    """Return why a run cannot be served again; ``None``: it can. Raises ``UserError`` if its files cannot be read."""
    summary = read_summary(result)
    if summary.n_interrupted or summary.n_not_started:
        return "the run was interrupted, and nothing repeats the moment of that"
    if not read_plan(result).is_in_real_time:
        return None
    if not (result / TWIN / PLAN).is_file():
        return f"{_OF_REAL_TIME}, and it has none (--no-twin, or no request came)"
    return why_not_again(result / TWIN)


def run_again(result: Path, call: Mapping[str, Any], out: Path) -> Again:
    """Serve a run again, in the engine that served it; of a run in real time its twin.

    ``call`` has its policies by kind, if they are not shipped ones. Raises ``UserError`` and ``RunError``.
    """
    plan, note, run = read_plan(result), "", result
    if (why_not := why_not_again(result)) is not None:
        raise UserError(why_not)
    if plan.is_in_real_time:
        note = _OF_REAL_TIME
        result = result / TWIN
        plan = read_plan(result)
    if plan.is_simulated:
        _simulate(result, plan, call, out)
    else:
        _emulate(result, plan, call, out, run)
    is_exact = plan.is_simulated or plan.network == IN_PROCESS.name
    compared = _OF_A_RUN if is_exact else _OF_A_RUN[:3]  # the others are text, in which no tolerance holds
    files = tuple(name for name in compared if (result / name).is_file())
    return Again(result, out, files, 0.0 if is_exact else _FABRIC_TOLERANCE_S, note)


def _document(result: Path, call: Mapping[str, Any]) -> Document:
    document = read_toml(result / "scenario.toml")
    document.get("policy", {}).update((key, call[key]) for key in HALVES if key in call)
    return Document(document, str(document.get("name", "scenario")))


class _Again(RunSession):
    """A run whose servers are placed as for the workload of another: a twin's for what its run knew before requests came."""

    placed_for: Experiment

    def place(self) -> None:
        self.placed = placed_experiment(self.placed_for)


def _emulate(result: Path, plan: Plan, call: Mapping[str, Any], out: Path, run: Path) -> None:
    """Serve ``result`` again, with the placement for the workload of ``run``: itself, or the run whose twin it is."""
    document = _document(result, call)
    changes = {"clock": "virtual", "network.backend": plan.network}
    options = RunOptions(report=False, trace=(result / "trace.json").is_file(), with_twin=False, live=False)
    session = _Again(changed(load_to_run(document), changes), out, options)
    tables = read_toml(run / "scenario.toml")
    asked: dict[str, Any] = {key: tables[key] for key in ("workload", "endpoint") if key in tables}
    session.placed_for = changed(load_to_run(replace(document, tables={**document.tables, **asked})), changes)
    ended = session.run()
    if ended.error is not None:
        raise ended.error
    if ended.interrupted:
        raise KeyboardInterrupt


def _simulate(result: Path, plan: Plan, call: Mapping[str, Any], out: Path) -> None:
    summary = read_summary(result)
    try:
        if (result / "instance.json").is_file():
            halves = {"placement": plan.placement.policy, "routing": plan.routing, **call}
            choice = PolicyChoice(None, halves["placement"], halves["routing"])
            has_setup = summary.calibration.session_setup_s > 0
            case = instance_case(
                result / "instance.json", choice, has_setup, plan.placement.design_concurrency
            )
        else:
            case = Case(load_to_run(_document(result, call)))
        simulation = simulate(case, str(plan.mode), folder=out)
    except PolicyError as error:
        raise UserError(str(error)) from error
    if simulation.placement is None:
        raise RunError(f"there is no placement any more: {simulation.error}")
    if simulation.engine != VIRTUAL:
        write_simulation(out, simulation, summarize_simulation(simulation, objectives_of(summary)))

"""``testbed.simulate``, ``testbed.up`` and ``testbed.load``, and the ``Run`` that they return."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from policies.registry import pair_name
from testbed.api.choices import Chosen, PolicyLike, chosen_of, label_of
from testbed.api.html import table_html
from testbed.api.paths import folder_of, path_of
from testbed.api.progress import Listener, heard
from testbed.api.scenarios import Given, flag, plain, scenario, slo_text, whole
from testbed.control.placing import load_to_run
from testbed.errors import UserError
from testbed.experiments import Change, Override
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.slo import Objectives
from testbed.records.plan import REFERENCE, Plan, find_plan
from testbed.records.requests import METRICS
from testbed.records.summary import RunSummary, read_summary
from testbed.results.slo import parse_slo
from testbed.results.tables import hop_rows_table, read_requests, reading, request_table
from testbed.rundir import check_new_folder, not_a_run, parquet_path, scratch
from testbed.runs.session import Announce, Ended, RunOptions, RunSession
from testbed.runtime.signals import Interruption, outside_loop
from testbed.simulator.cases import (
    Case,
    concurrency_of,
    instance_case,
    is_instance,
    scenario_case,
    without_setup,
)
from testbed.simulator.engine import FAST, TESTBED, VIRTUAL, Simulation, engine_of
from testbed.simulator.engine import simulate as simulated
from testbed.simulator.hops import hop_table
from testbed.simulator.summary import summarize_simulation
from testbed.simulator.tables import write_simulation

ENGINES = (FAST, VIRTUAL, REFERENCE)
REQUESTS, HOPS = "requests.parquet", "hops.parquet"
_SHOWN = ("mean", "p50", "p95", "p99")


@dataclass(frozen=True, repr=False, eq=False)
class Run:
    """One run and its results.

    - ``policy``, ``seed``: which policies served which requests
    - ``engine``: "fast" (closed form and events), "reference" (the paper's public simulator), "virtual" or "real" (the
      testbed itself, in that time)
    - ``summary``, ``plan``: the records of ``summary.json`` and ``plan.json``
    - ``path``: the run's directory; ``None``: nothing was kept
    """

    policy: str
    engine: str
    summary: RunSummary
    plan: Plan
    path: Path | None
    _requests: Callable[[], pa.Table]
    _hops: Callable[[], pa.Table]

    @property
    def seed(self) -> int:
        return self.summary.seed

    @cached_property
    def requests(self) -> pa.Table:
        """A row per request: the columns of ``requests.parquet`` (docs/metrics.md). Times are scenario seconds."""
        return self._requests()

    @cached_property
    def hops(self) -> pa.Table:
        """A row per token and hop: the columns of ``hops.parquet``. Raises ``UserError`` if the run has none."""
        if self.summary.get("hops_left_out"):
            raise UserError(
                f"this run has {self.summary.n_hop_rows:,} rows of hops, too many to keep; simulate fewer requests"
            )
        return self._hops()

    def __reduce__(self) -> tuple[Any, ...]:
        hops = None if self.summary.get("hops_left_out") else self.hops
        return _run_of, (self.policy, self.engine, self.summary, self.plan, self.path, self.requests, hops)

    def __repr__(self) -> str:
        return f"<{self._about}>"

    @property
    def _about(self) -> str:
        summary = self.summary
        return (
            f"{summary.scenario}, {self.policy}, seed {summary.seed}, engine {self.engine}: {summary.n_completed} of "
            f"{summary.n_requests} requests completed"
        )

    def _repr_html_(self) -> str:
        rows = []
        for metric in METRICS:
            stats = self.summary.metrics.get(metric)
            if stats is not None and stats.n:
                cells = [f"{stats.get(name):.4g}" for name in _SHOWN]
                rows.append([f"{metric.removesuffix('_s')} [s]", *cells, str(stats.n)])
        return table_html(self._about, ["", *_SHOWN, "n"], rows)


def simulate(
    scenario: Given,
    policy: PolicyLike = None,
    *,
    seed: int | None = None,
    engine: str = FAST,
    design_concurrency: int | str | None = None,
    slo: str | Mapping[str, float] | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Listener | None = None,
) -> Run:
    """Simulate a scenario, or an instance file (``.json``), as `testbed simulate` does.

    - ``scenario``: as for ``testbed.scenario``; ``policy``: a pair (see docs/python.md); ``seed``: replaces the
      scenario's
    - ``engine``: "fast", or "virtual" where the fast engine cannot serve the scenario; "virtual": the testbed itself in
      virtual time; "reference": the paper's public simulator
    - ``design_concurrency``: |R|, a number, "auto" or "searched"
    - ``slo``: objectives for the goodput, as ``"ttft=5s,tpot=1s"`` or in seconds, ``{"ttft": 5, "tpot": 1}``
    - ``out``: a new folder for the tables; ``None``: nothing is written
    - ``progress``: called with a ``Progress``, such as ``print``

    Raises ``UserError`` for wrong input and if the placement is infeasible, ``RunError`` if a run breaks.
    """
    if engine not in ENGINES:
        raise UserError(f"the engine must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, not {engine!r}")
    folder = folder_of(out)
    if folder is not None:
        check_new_folder(folder, "out")
    interruption = Interruption()

    def run() -> Run:
        with heard(progress) as tell, chosen_of([policy]) as chosen:
            case = _case(scenario, chosen.names[0], seed, design_concurrency)
            objectives = _limits(slo) or case.experiment.objectives
            with scratch("virtual") as temporary:
                found = simulated(
                    case,
                    REFERENCE if engine == REFERENCE else TESTBED,
                    is_virtual=engine == VIRTUAL,
                    folder=folder or temporary / "run",
                    announce=tell,
                    live=False,
                    interruption=interruption,
                )
                return _result(found, objectives, folder, temporary / "run")

    return outside_loop(run, interruption.request)


def _case(
    source: Given,
    policy: str | None,
    seed: int | None,
    design_concurrency: int | str | None,
) -> Case:
    choice = PolicyChoice.of(policy)
    if isinstance(source, str | os.PathLike) and is_instance(os.fspath(source)):
        if seed is not None:
            raise UserError(f"{os.fspath(source)} is an instance file, which is complete; leave seed out")
        text = None if design_concurrency is None else str(design_concurrency)
        return instance_case(Path(source), choice, False, concurrency_of(text))
    made = scenario(source)
    changes: list[Override] = list(made.changes)
    if design_concurrency is not None:
        changes.append(Change("policy.design_concurrency", plain(design_concurrency, "design_concurrency")))
    return scenario_case(made.target, choice, changes, whole(seed, "seed"))


def up(
    scenario: Given,
    policy: PolicyLike = None,
    *,
    network: str | None = None,
    clock: str | None = None,
    seed: int | None = None,
    slo: str | Mapping[str, float] | None = None,
    out: str | os.PathLike[str] | None = None,
    twin: bool = True,
    report: bool = True,
    trace: bool = True,
    progress: Listener | None = None,
) -> Run:
    """Run the testbed itself, as `testbed up` does.

    - ``network``: "memory", "fabric", "netem" or "loopback"; ``clock``: "virtual" or "real"; ``None``: the scenario's
    - ``out``: a new folder for the run; ``None``: ``runs/NAME-TIME``. ``Run.path`` names it
    - ``twin``: repeat a run in real time in virtual time; ``report``, ``trace``: write ``report.html``, ``trace.json``
    - all else is as for ``simulate``

    Raises ``UserError`` for wrong input, ``RunError`` if the run breaks, and ``KeyboardInterrupt`` if it is interrupted;
    what was served until then is in the folder.
    """
    with heard(progress) as tell, chosen_of([policy]) as chosen:
        session = _session(scenario, chosen, network, clock, seed, slo, out, (twin, report, trace), tell)
        return _ended(session.run())


async def up_async(
    scenario: Given,
    policy: PolicyLike = None,
    *,
    network: str | None = None,
    clock: str | None = None,
    seed: int | None = None,
    slo: str | Mapping[str, float] | None = None,
    out: str | os.PathLike[str] | None = None,
    twin: bool = True,
    report: bool = True,
    trace: bool = True,
    progress: Listener | None = None,
) -> Run:
    """As ``up``, while other tasks of the event loop go on. A cancelled task interrupts its run first."""
    with heard(progress) as tell, chosen_of([policy]) as chosen:
        session = _session(scenario, chosen, network, clock, seed, slo, out, (twin, report, trace), tell)
        return _ended(await session.run_async())


def load(path: str | os.PathLike[str]) -> Run:
    """Return the run in a directory of `testbed up` or `testbed simulate --out`, of this or an earlier version.

    Raises ``UserError`` if it is not one; ``requests`` and ``hops`` of the run do, if it has no such table (yet).
    """
    folder = path_of(path, "a run is its directory's path")
    plan = find_plan(folder)
    if plan is None:
        raise not_a_run(folder)
    summary = read_summary(folder)
    return Run(
        policy=label_of(pair_name(summary.policy.placement, summary.policy.routing)),
        engine=engine_of(summary),
        summary=summary,
        plan=plan,
        path=folder,
        _requests=lambda: _read(folder, REQUESTS, lambda path: request_table(read_requests(path))),
        _hops=lambda: _read(folder, HOPS, lambda path: pq.read_table(parquet_path(path))),
    )


def _read(folder: Path, name: str, read: Callable[[Path], pa.Table]) -> pa.Table:
    """Return a table of a run. Raises ``UserError``."""
    with reading(folder, name) as path:
        return read(path)


def _session(
    source: Given,
    chosen: Chosen,
    network: str | None,
    clock: str | None,
    seed: int | None,
    slo: str | Mapping[str, float] | None,
    out: str | os.PathLike[str] | None,
    written: tuple[bool, bool, bool],
    tell: Announce,
) -> RunSession:
    made = scenario(source)
    given = {"network.backend": network, "clock": clock, "seed": whole(seed, "seed")}
    changes = [*made.changes, *(Change(key, value) for key, value in given.items() if value is not None)]
    experiment = load_to_run(made.target, [*changes, *PolicyChoice.of(chosen.names[0]).overrides()])
    twin, report, trace = written
    with_twin, report, trace = flag(twin, "twin"), flag(report, "report"), flag(trace, "trace")
    options = RunOptions(objectives=_limits(slo), with_twin=with_twin, report=report, trace=trace, live=False)
    return RunSession(experiment, folder_of(out), options, tell)


def _ended(ended: Ended) -> Run:
    if ended.error is not None:
        raise ended.error
    if ended.summary is None or ended.interrupted:
        raise KeyboardInterrupt(f"interrupted; what was served until then is in {ended.run_dir}")
    return load(ended.run_dir)


def _result(found: Simulation, objectives: Objectives, out: Path | None, temporary: Path) -> Run:
    experiment = found.case.experiment
    if found.placement is None:
        raise UserError(f"{experiment.name}: {found.error}")
    if found.engine == VIRTUAL:
        run = load(out or temporary)
        if out is None:  # the folder is about to go
            run = replace(run, path=None)
            run.requests.validate()
            if not run.summary.get("hops_left_out"):
                run.hops.validate()
        return run
    bare = None
    if experiment.calibration.session_setup_s:
        bare = simulated(without_setup(found.case), found.mode)
    summary = summarize_simulation(found, objectives, bare)
    if out is not None:
        write_simulation(out, found, summary)
    return Run(
        policy=label_of(found.case.policy),
        engine=found.engine,
        summary=summary,
        plan=found.plan,
        path=out,
        _requests=lambda: request_table(found.rows),
        _hops=lambda: hop_rows_table(experiment, hop_table(found)),
    )


def _run_of(*values: Any) -> Run:
    """Return a run that was pickled, with its tables."""
    policy, engine, summary, plan, path, requests, hops = values
    return Run(policy, engine, summary, plan, path, lambda: requests, lambda: hops)


def _limits(slo: str | Mapping[str, float] | None) -> Objectives | None:
    text = slo_text(slo)
    return None if text is None else parse_slo(text)

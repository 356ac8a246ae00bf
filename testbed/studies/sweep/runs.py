"""One run of a sweep: its description, the key under which its result is stored, and the result.

One process does many runs.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from policies.problem import InfeasiblePlacement
from policies.registry import offer
from testbed.codeversion import rules_digest
from testbed.control.placing import RememberedPlacements
from testbed.errors import RunError, UserError
from testbed.experiments import Change, Override, Target
from testbed.experiments.experiment import Experiment
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.provenance import source_digest
from testbed.experiments.slo import Objectives
from testbed.records.plan import REFERENCE
from testbed.rundir import scratch
from testbed.simulator.cases import Case, scenario_case
from testbed.simulator.engine import TESTBED, VIRTUAL, Simulation, simulate
from testbed.simulator.runs import draw_of, drawn_of, recorded_share
from testbed.studies.sweep.measures import columns_of, measures_of

FAST, REAL = "fast", "real"
ENGINES = (FAST, VIRTUAL, REAL, REFERENCE)
OK, INFEASIBLE, FAILED = "ok", "infeasible", "failed"


class Run(NamedTuple):
    """One run: changes to the scenario in the syntax of ``--set``, a policy (None: the scenario's own), a
    seed, the scenario and the engine (None: the study's).
    """

    changes: tuple[Override, ...]
    policy: str | None
    seed: int
    scenario: str | None = None
    engine: str | None = None


@dataclass(frozen=True)
class Setup:
    """The settings that all runs of a study share.

    ``target``: the scenario. ``objectives``: those of ``--slo`` (none: those of each scenario).
    ``known``: the keys of runs whose results are stored already. ``keeps_requests``: records have the rows
    per request. ``objects``: policies that are objects, by kind and name, and ``digests`` of them by name.
    """

    target: Target
    engine: str = FAST
    n_runs: int = 1
    objectives: Objectives = field(default_factory=Objectives)
    known: frozenset[str] = frozenset()
    keeps_requests: bool = False
    objects: Mapping[tuple[str, str], object] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a run, as it is stored.

    - ``key``: from ``key_of``; empty if the scenario could not be resolved
    - ``engine``, ``engine_why``: which engine served the run, and why, as `testbed simulate` states them
    - ``drawn``: how the run chose recorded requests (``testbed.simulator.runs.drawn_of``)
    - ``recorded_share``: share of a recording that the run uses, for ``testbed.results.intervals.mean_of``
    - ``took_s``: duration of the run in real seconds, including the time to read the scenario
    - ``placement_cpu_s``, ``routing_cpu_s``: CPU seconds of the policies, for the placement and for a mean
      route
    - ``is_known``: the result is stored already, and this record has nothing but its key
    - ``requests``: columns per request as JSON, on the way to their own file
    - ``again``: the run failed for a reason that may be temporary, so a later command tries it again
    """

    key: str
    status: str = OK
    reason: str = ""
    policy: str = ""
    engine: str = ""
    engine_why: str = ""
    measures: dict[str, float | int | None] = {}
    drawn: dict[str, Any] | None = None
    recorded_share: float = 0.0
    took_s: float = 0.0
    placement_cpu_s: float | None = None
    routing_cpu_s: float | None = None
    is_known: bool = False
    again: bool = False
    requests: bytes = b""


def lost_record(run: Run) -> Record:
    """Returns the record of a run whose process died twice. It is not stored, so the next command tries the
    run again.
    """
    why = "its process was killed twice, as the operating system does when memory runs out"
    return Record("", FAILED, why, run.policy or "", again=True)


Measures = dict[str, float | int | None]


class Runner:
    """Does runs one after the other, and computes equal placements only once. ``measure`` returns a run's
    measures.
    """

    def __init__(
        self, setup: Setup, measure: Callable[[Simulation, Objectives], Measures] = measures_of
    ) -> None:
        self._setup = setup
        self._measure = measure
        self._placements = RememberedPlacements()
        offer(setup.objects)

    def __call__(self, run: Run) -> Record:
        began_at_s = time.perf_counter()
        try:
            case = case_of(self._setup, run)
            key = key_of(case.experiment, self._setup, run.engine)
        except UserError as error:
            return Record("", FAILED, str(error), run.policy or "")
        if key in self._setup.known:
            return Record(key, is_known=True)
        found = self._served(case, run.engine or self._setup.engine)
        drawn = drawn_of(case.experiment)
        return msgspec.structs.replace(
            found,
            key=key,
            policy=case.policy,
            drawn=drawn,
            recorded_share=recorded_share(drawn),
            took_s=time.perf_counter() - began_at_s,
        )

    def _served(self, case: Case, engine: str) -> Record:
        try:
            simulation = self._simulate(case, engine)
        except (UserError, RunError) as error:
            return Record("", FAILED, str(error), again=isinstance(error, RunError))
        except Exception as error:  # one failed run must not end thousands of others
            return Record("", FAILED, f"{type(error).__name__}: {error}", again=True)
        if simulation.placement is None:
            reason = simulation.error or ""
            return Record("", INFEASIBLE, reason, engine=simulation.engine, engine_why=simulation.why)
        found = self._measure(simulation, self._setup.objectives or case.experiment.objectives)
        wrong = [name for name, value in found.items() if value is not None and not math.isfinite(value)]
        if wrong:
            return Record("", FAILED, f"{', '.join(wrong)}: not finite", engine=simulation.engine)
        return Record(
            "",
            engine=simulation.engine,
            engine_why=simulation.why,
            measures=found,
            placement_cpu_s=simulation.placement_cpu_s,
            routing_cpu_s=simulation.routing_cpu_s,
            requests=columns_of(simulation) if self._setup.keeps_requests else b"",
        )

    def _simulate(self, case: Case, engine: str) -> Simulation:
        if engine == REAL:
            return _served_in_real_time(case)
        mode = REFERENCE if engine == REFERENCE else TESTBED
        is_virtual = engine == VIRTUAL
        return simulate(case, mode, is_virtual=is_virtual, placements=self._placements, live=False)


def case_of(setup: Setup, run: Run) -> Case:
    """Returns the case to simulate. Each seed uses other requests of a recording, as in `testbed simulate
    --runs`.

    Raises ``UserError`` if the scenario is not valid.
    """
    choice = PolicyChoice.of(run.policy)
    changes = list(run.changes)
    if setup.engine == REAL:
        changes.append(Change("clock", "real"))
    target = run.scenario or setup.target
    case = scenario_case(target, choice, changes, run.seed)
    draw = draw_of(case.experiment, setup.n_runs)
    return case if draw is None else scenario_case(target, choice, [*changes, draw], run.seed)


def key_of(experiment: Experiment, setup: Setup, engine: str | None = None) -> str:
    """Returns a digest of all that determines a run's result: code, engine (``None``: that of ``setup``), objectives, resolved
    scenario, and the contents of policy files.
    """
    about = [rules_digest(), engine or setup.engine, dict(setup.objectives.common), experiment.document]
    about += [
        setup.digests.get(name) or source_digest(name)
        for name in (experiment.policy.placement, experiment.policy.routing, experiment.policy.online or "")
    ]
    return hashlib.sha256(msgspec.json.encode(about, order="sorted")).hexdigest()[:32]


def _served_in_real_time(case: Case) -> Simulation:
    """Serves the case with real nodes, as `testbed up --clock real` does. The run directory is not kept."""
    from testbed.runs.session import RunOptions, RunSession  # with all that a run needs
    from testbed.simulator.virtual import served_by

    options = RunOptions(report=False, trace=False, with_twin=False, live=False)
    with scratch("study") as folder:
        try:
            ended = RunSession(case.experiment, folder / "run", options).run()
        except UserError as error:
            if isinstance(error.__cause__, InfeasiblePlacement):
                return Simulation(case, REAL, REAL, "asked for", error=str(error))
            raise
        served = served_by(ended)
    placed = ended.placed
    return Simulation(case, REAL, REAL, "asked for", placed.placement, placed.decision_s, served)

"""The description of a sweep, read from a study file, the command line, or both."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from policies.registry import PAIRS
from testbed.control.choice import check_policy
from testbed.errors import ScenarioError, UserError
from testbed.experiments import Target, load_experiment
from testbed.experiments.changes import toml_text
from testbed.experiments.experiment import Experiment
from testbed.experiments.fields import Table
from testbed.experiments.filesread import FilesRead, files_read
from testbed.experiments.problems import explain, unknown
from testbed.experiments.slo import Objectives
from testbed.experiments.sources import read_toml, shipped_documents, value_of
from testbed.results.costs import COSTS, costs_given
from testbed.results.slo import parse_slo
from testbed.studies.sweep.axes import (
    LABEL,
    POLICY,
    SCENARIO,
    SEED,
    Axis,
    Point,
    Span,
    checked_axis,
    combined,
    drawn_axis,
    parse_over,
    value_range,
)
from testbed.studies.sweep.measures import (
    BEST_AT_ONE,
    GOODPUT,
    MEASURES,
    STATISTICS,
    TIMES,
    UNDER_OBJECTIVES,
)
from testbed.studies.sweep.pool import digest_of
from testbed.studies.sweep.runs import ENGINES, Run, Setup

DEFAULT_METRICS = ("ttft_s_mean", "tpot_s_mean", "per_token_s_mean")
DEFAULT_PARETO = ("tokens_per_s", "ttft_s_mean")
KEEP_REQUESTS = "requests"
MAX_DESIGN = 1 << 16
MAX_SEED = 1 << 62
"""Seeds are a column of 64 bits."""


class AxisTable(Table):
    """``[[axis]]``: values of one key, or with ``zip`` of several that change together."""

    key: str | None = None
    values: list[Any] | None = None
    range: str | None = None
    zip: dict[str, list[Any]] | None = None


class SpanTable(Table):
    """The range from which a key of ``[design.over]`` is drawn."""

    low: Annotated[float, Field(strict=False)]
    high: Annotated[float, Field(strict=False)]
    log: bool = False
    integer: bool = False


class DesignTable(Table):
    """``[design]``: ``n`` points drawn from the ranges of several keys."""

    kind: Literal["random", "sobol"]
    n: Annotated[int, Field(ge=1, le=MAX_DESIGN)]
    seed: Annotated[int, Field(ge=0)] = 0
    over: Annotated[dict[str, SpanTable], Field(min_length=1)]


class PublishedTable(Table):
    """``[[published]]``: a value of ``metric`` that somebody printed for ``policy``; see ``Published``."""

    metric: str
    policy: str
    value: Annotated[float, Field(strict=False, gt=0)]
    at: dict[str, Any] = Field(default_factory=dict)


class LatexTable(Table):
    """``[latex]``: what ``table.tex`` has. ``names`` are LaTeX, by key, metric, policy, or "policy".

    ``columns``: metrics, default those of the study. ``digits``: significant digits of means, default as in the other
    tables. ``intervals``, ``differences``: whether means have half-widths, and others than the baseline differences.
    """

    names: dict[str, str] = Field(default_factory=dict)
    columns: list[str] = Field(default_factory=list)
    digits: Annotated[int, Field(ge=1, le=15)] | None = None
    intervals: bool = True
    differences: bool = True


class StudyTable(Table):
    """A study file, or one of its parts with what all parts share."""

    scenario: str
    description: str = ""
    runs: Annotated[int, Field(ge=1)] = 1
    seed: Annotated[int, Field(ge=0)] | None = None
    engine: Literal["fast", "virtual", "real", "reference"] = "fast"
    policies: list[str] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    every: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    baseline: str | None = None
    slo: str | None = None
    metrics: list[str] = Field(default_factory=list)
    pareto: list[str] | None = None
    set: dict[str, Any] = Field(default_factory=dict)
    axis: list[AxisTable] = Field(default_factory=list)
    design: DesignTable | None = None
    published: list[PublishedTable] = Field(default_factory=list)
    keep: Literal["requests"] | None = None
    latex: LatexTable = LatexTable()


@dataclass(frozen=True)
class Options:
    """The options of the command line. An option that is not given has the value of the study file.

    Programs may give axes as data (``axes``) beside texts (``over``), and policies that are ``objects``, by kind and name.
    """

    over: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()
    objects: Mapping[tuple[str, str], object] = field(default_factory=dict)
    policies: tuple[str, ...] = ()
    keep: str | None = None
    overrides: tuple[str, ...] = ()
    n_runs: int | None = None
    seed: int | None = None
    engine: str | None = None
    baseline: str | None = None
    slo: str | None = None
    metrics: str | None = None
    pareto: str | None = None


class Published(NamedTuple):
    """A value of ``metric`` that somebody printed for ``policy`` at all points that have the values of
    ``at``.
    """

    metric: str
    policy: str
    value: float
    at: Point


@dataclass(frozen=True)
class Study:
    """A study: all combinations of the values of ``axes``, ``policies`` and ``n_runs`` seeds.

    ``target``: the scenario, unless the key ``scenario`` is an axis. ``policies``: names (none: the
    scenario's own policy). ``labels``: policy -> its name in tables and figures. ``every``: policy -> it takes
    part only in runs whose seed is a multiple of this. ``fixed``: changes to the scenario in the syntax of
    ``--set``. ``has_goodput``: whether there are objectives, of the study or of the scenario.
    """

    title: str
    description: str
    target: Target
    axes: tuple[Axis, ...]
    policies: tuple[str, ...]
    baseline: str | None
    fixed: tuple[str, ...]
    n_runs: int
    seed: int | None
    engine: str
    objectives: Objectives
    """Metric -> limit in seconds, for all runs; none: each scenario's own."""
    has_goodput: bool
    metrics: tuple[str, ...]
    pareto: tuple[str, str]
    costs: tuple[str, ...] = ()
    """Measures of what servers cost, as far as the scenario gives it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    every: Mapping[str, int] = field(default_factory=dict)
    published: tuple[Published, ...] = ()
    keeps_requests: bool = False
    objects: Mapping[tuple[str, str], object] = field(default_factory=dict)
    """Policies that are objects, by kind and name."""
    latex: LatexTable = field(default_factory=LatexTable)
    given: tuple[str, Options] | None = None
    """What ``read_study`` made it from, and the files that were ``read`` for that."""
    read: FilesRead = field(default_factory=FilesRead)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all axes, in the axes' order."""
        return tuple(chain.from_iterable(axis.keys for axis in self.axes))

    @property
    def n_points(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    @property
    def points(self) -> list[Point]:
        return list(combined(self.axes))

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of the measures of each run."""
        return (*MEASURES, *(UNDER_OBJECTIVES if self.has_goodput else ()), *self.costs)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Digests of ``objects``, by name. Raises ``UserError`` if one cannot be sent to another process."""
        try:
            return {name: digest_of(policy) for (_, name), policy in self.objects.items()}
        except Exception as error:  # pickling calls code of the object's
            raise UserError(
                f"a policy of this sweep cannot be copied to other processes ({type(error).__name__}: {error}); keep "
                "open files, locks and threads out of its attributes"
            ) from error

    def setup(self, known: frozenset[str] = frozenset()) -> Setup:
        return Setup(
            *(self.target, self.engine, self.n_runs, self.objectives, known, self.keeps_requests),
            *(self.objects, self.digests),
        )

    def run(self, point: Point, policy: str | None, seed: int) -> Run:
        changes = [
            f"{key}={text}" for key, text in point.items() if key != SCENARIO and not key.startswith(LABEL)
        ]
        scenario = point.get(SCENARIO)
        return Run((*self.fixed, *changes), policy, seed, None if scenario is None else value_of(scenario))

    def experiment(self) -> Experiment:
        """Returns the scenario with ``fixed`` and each axis' first value, unless drawn: it may be invalid without them."""
        listed = {
            key: text for axis in self.axes if not axis.is_drawn for key, text in axis.points[0].items()
        }
        run = self.run(listed, None, 0)
        return load_experiment(self.target if run.scenario is None else run.scenario, run.changes)

    def seeds(self, policy: str | None, seeds: Sequence[int]) -> list[int]:
        """Returns those of ``seeds`` with which ``policy`` takes part."""
        return [seed for seed in seeds if seed % self.every.get(policy or "", 1) == 0]

    def label(self, policy: str) -> str:
        return self.labels.get(policy, policy)

    def printed(self, metric: str, policy: str, point: Point) -> float | None:
        """Returns the published value beside which a mean is shown, or None."""
        for one in self.published:
            if (one.metric, one.policy) == (metric, policy) and one.at.items() <= point.items():
                return one.value
        return None


def read_study(target: str, options: Options) -> Study:
    """Returns the study that ``target`` and the command line describe.

    ``target``: a study file, the name of a shipped study, or a scenario; ``FILE:PART`` or ``NAME:PART`` is a
    part of a study. Options of the command line replace
    those of the file; an axis of the command line replaces the file's axis of the same key. Raises
    ``UserError`` for invalid options and files.
    """
    with files_read() as read:
        table, where, folder, names = _table(target)
        if table is None:
            study = study_of(StudyTable(scenario=target), options, target)
        else:
            study = study_of(table, options, _beside(folder, table.scenario), where, folder, names)
    return replace(study, given=(target, options), read=read)


def call_of(target: str, options: Options) -> dict[str, Any]:
    """Return a sweep's target and options as data for JSON; ``called`` reads them."""
    data = {name: value for name, value in vars(options).items() if name != "objects"}
    return {
        "command": "sweep",
        "target": target,
        "options": {**data, "axes": [vars(axis) for axis in options.axes]},
    }


def called(call: Mapping[str, Any]) -> tuple[str, Options]:
    """Return target and options of ``call_of``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` if it is none."""
    data: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in call["options"].items()
    }
    axes = [
        Axis(tuple(axis["keys"]), tuple(map(tuple, axis["values"])), axis["is_drawn"])
        for axis in data.pop("axes")
    ]
    return str(call["target"]), Options(**data, axes=tuple(axes))


def study_of(
    table: StudyTable,
    options: Options,
    target: Target,
    where: str | None = None,
    folder: Path | None = None,
    names: Collection[str] = (),
) -> Study:
    """Returns the study of the scenario ``target`` that ``table`` and the command line describe.

    ``where``: the study's file, ``folder``: what paths in it are relative to, if it has one. ``names``: keys and policies
    of all parts of the file. Raises ``UserError``.
    """
    title, where = Path(where or str(target)).stem, where or str(target)
    if options.keep not in (None, KEEP_REQUESTS):
        raise UserError(f"--keep must be {KEEP_REQUESTS}, not {options.keep}")
    given = [*(parse_over(text) for text in options.over), *options.axes]
    new = [axis for axis in given if axis.keys != (POLICY,)]
    replaced = {axis.keys for axis in new}
    axes = [axis for axis in _axes(table, where, folder) if axis.keys not in replaced] + new
    policies = tuple(table.policies)
    for what, given_to in (
        ("labels", table.labels),
        ("every", table.every),
        ("published", [one.policy for one in table.published]),
    ):
        if other := next((name for name in given_to if name not in policies), None):
            raise UserError(f"{where}: {what}: {unknown('policy', other, policies)}")
    if options.policies and any(axis.keys == (POLICY,) for axis in given):
        raise UserError(
            "policies are given with --policy and with --over policy=...: leave one of the two out"
        )
    policies = options.policies or policies
    for axis in given:
        if axis.keys == (POLICY,):
            policies = tuple(value for (value,) in axis.values)
    _check_axes(axes, policies)
    shown = [table.labels.get(name, name) for name in policies]
    if twice := next((label for i, label in enumerate(shown) if label in shown[:i]), None):
        raise UserError(f"{where}: labels: two policies are called {twice}; give one another label")
    objectives_text = options.slo or table.slo
    study = Study(
        title=title,
        description=table.description,
        target=target,
        axes=tuple(axes),
        policies=policies,
        baseline=options.baseline or table.baseline,
        fixed=(*(f"{key}={toml_text(value)}" for key, value in table.set.items()), *options.overrides),
        n_runs=table.runs if options.n_runs is None else options.n_runs,
        seed=table.seed if options.seed is None else options.seed,
        engine=options.engine or table.engine,
        objectives=parse_slo(objectives_text) if objectives_text else Objectives(),
        has_goodput=False,
        metrics=DEFAULT_METRICS,
        pareto=DEFAULT_PARETO,
        labels=table.labels,
        every=table.every,
        keeps_requests=(options.keep or table.keep) == KEEP_REQUESTS,
        objects=options.objects,
    )
    _check(study)
    stated = study.objectives or "workload.slo" in study.keys
    experiment = study.experiment()
    if "workload.rate" in study.keys and experiment.document.get("workload", {}).get("changes"):
        raise UserError(
            f"{study.target}: workload.changes sets rates of its own, which a sweep over workload.rate would leave as "
            "they are: remove them with --set workload.changes=[], or give them as a workload.curve, which is scaled"
        )
    study = replace(study, has_goodput=bool(stated or experiment.objectives), costs=costs_given(experiment))
    metrics = _listed(options.metrics) or table.metrics
    pareto = _listed(options.pareto) or table.pareto
    default = (*DEFAULT_METRICS, GOODPUT) if study.has_goodput else DEFAULT_METRICS
    study = replace(study, metrics=tuple(measure_of(study, name) for name in metrics) or default)
    if pareto is not None:
        both = [measure_of(study, name) for name in pareto]
        if len(both) != 2 or both[0] == both[1]:
            raise UserError(f"a Pareto front needs two metrics, not {', '.join(pareto)}")
        if neither := BEST_AT_ONE.intersection(both):
            raise UserError(
                f"{', '.join(neither)} is best at 1 and makes no Pareto front; give another metric"
            )
        study = replace(study, pareto=(both[0], both[1]))
    known = dict.fromkeys((POLICY, *study.keys, *study.policies, *names, *PAIRS))
    latex = table.latex.model_copy(
        update={
            "names": {_named(name, known, where): text for name, text in table.latex.names.items()},
            "columns": [measure_of(study, name) for name in table.latex.columns],
        }
    )
    return replace(study, latex=latex, published=tuple(_published(study, one) for one in table.published))


def _named(name: str, known: Collection[str], where: str) -> str:
    """Returns what ``name`` in ``[latex] names`` names: one of ``known``, a policy in two halves or of the user's, or a measure.

    Raises ``UserError`` if it names nothing.
    """
    metrics = (*TIMES, *MEASURES, *UNDER_OBJECTIVES, *COSTS)
    if name not in known and name not in metrics and not {"+", ":"} & set(name):
        raise UserError(f"{where}: latex.names: {unknown('key, metric or policy', name, [*known, *metrics])}")
    return _mean_of(name)


def _published(study: Study, one: PublishedTable) -> Published:
    for key in one.at:
        if key not in study.keys:
            raise UserError(f"published: {unknown('axis', key, study.keys)}")
    at = {key: toml_text(value) for key, value in one.at.items()}
    return Published(measure_of(study, one.metric), one.policy, one.value, at)


def _beside(folder: Path | None, scenario: str) -> str:
    """Returns the path of a scenario file that lies in the study's folder, or else ``scenario`` itself."""
    return str(folder / scenario) if folder is not None and (folder / scenario).is_file() else scenario


def _table(target: str) -> tuple[StudyTable | None, str, Path | None, tuple[str, ...]]:
    """Returns the content of the study file, its path (with the part), its folder (None for a shipped study), and the keys
    and policies of all its parts.

    Returns (None, ``target``, None, no names) if ``target`` is not a study file: it is a scenario then.
    """
    whole = target
    target, _, part = (target, "", "") if Path(target).exists() else target.partition(":")
    path = Path(target)
    folder: Path | None = path.parent
    if path.suffix == ".toml" and path.is_file():
        document = read_toml(path)
        if "scenario" not in document and "part" not in document:
            return None, whole, None, ()
    else:
        shipped = shipped_studies()
        if path.is_file() or target not in shipped or target in {name for name, _ in shipped_documents()}:
            return None, whole, None, ()
        path, folder = shipped[target], None
        document = read_toml(path)
    table = _checked(path, document, part)
    others = (_checked(path, document, name) for name in document.get("part", {}) if name != part)
    names = tuple(chain.from_iterable(map(_names, (table, *others))))
    return table, f"{path}:{part}" if part else str(path), folder, names


def _checked(path: Path, document: dict[str, Any], part: str) -> StudyTable:
    """Returns one part of a study file, or all of one without parts. Raises ``UserError``."""
    try:
        return StudyTable.model_validate(_part(document, str(path), part))
    except ValidationError as error:
        wrong = explain(error)
        raise ScenarioError(f"{path}: {'.'.join(map(str, wrong.key))}: {wrong.what}") from None


def _names(table: StudyTable) -> Iterator[str]:
    """Yields the keys of a study's axes, and its policies."""
    for axis in table.axis:
        yield from (axis.zip or {}) if axis.key is None else (axis.key,)
    yield from table.design.over if table.design else ()
    yield from table.policies


def _part(document: dict[str, Any], where: str, name: str) -> dict[str, Any]:
    """Returns the part ``name`` of a study file, with the keys that all its parts share.

    A part's keys replace shared ones; its tables (``[set]``, ``[labels]``) and lists of tables extend them.
    """
    document = dict(document)
    parts = document.pop("part", {})
    if not name and not parts:
        return document
    if not isinstance(parts, dict) or not isinstance(parts.get(name), dict):
        if not parts or not isinstance(parts, dict):
            raise UserError(f"{where}: has no parts; leave out :{name}")
        valid = ", ".join(parts)
        raise UserError(f"{where}: name a part of this study, as in {Path(where).stem}:PART; valid: {valid}")
    merged = document
    for key, value in parts[name].items():
        shared = document.get(key)
        if isinstance(shared, dict) and isinstance(value, dict):
            value = {**shared, **value}
        elif isinstance(shared, list) and isinstance(value, list) and key in ("axis", "published"):
            value = [*shared, *value]
        merged = {**merged, key: value}
    return merged


def parts_of(name: str) -> list[str]:
    """Returns the names of the parts of a shipped study."""
    return list(read_toml(shipped_studies()[name]).get("part", {}))


def shipped_studies() -> dict[str, Path]:
    """Returns the paths of the studies that are shipped with the testbed, by name."""
    folder = Path(str(resources.files("scenarios") / "studies"))
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def _axes(table: StudyTable, where: str, folder: Path | None) -> list[Axis]:
    def text(key: str, value: Any) -> str:
        return toml_text(_beside(folder, value) if key == SCENARIO and isinstance(value, str) else value)

    found = []
    for number, axis in enumerate(table.axis):
        at = f"{where}: axis.{number}"
        forms = [name for name in ("values", "range", "zip") if getattr(axis, name) is not None]
        if len(forms) != 1:
            raise UserError(f"{at}: give one of values, range and zip, not {' and '.join(forms) or 'none'}")
        if axis.zip is not None:
            if axis.key is not None or not axis.zip:
                raise UserError(
                    f"{at}: with zip there is no key beside it: write zip = {{ KEY = [...], KEY = [...] }}"
                )
            if len({len(values) for values in axis.zip.values()}) > 1:
                raise UserError(f"{at}: all keys of zip must have the same number of values")
            columns = [[text(key, value) for value in values] for key, values in axis.zip.items()]
            found.append(checked_axis(tuple(axis.zip), list(zip(*columns, strict=True)), at))
            continue
        if axis.key is None:
            raise UserError(f"{at}: key is missing")
        texts = (
            value_range(axis.range, at)
            if axis.range is not None
            else [text(axis.key, value) for value in axis.values or ()]
        )
        found.append(checked_axis((axis.key,), [(text,) for text in texts], at))
    if table.design is not None:
        spans = {key: Span(**span.model_dump()) for key, span in table.design.over.items()}
        design = table.design
        found.append(drawn_axis(design.kind, design.n, design.seed, spans, f"{where}: design"))
    return found


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in text.split(",")] if text else []


def _check_axes(axes: Sequence[Axis], policies: Sequence[str]) -> None:
    keys = [key for axis in axes for key in axis.keys]
    for what, names in (("axis", keys), ("policy", policies)):
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise UserError(f"the {what} {twice} is given twice; leave one out")
    if POLICY in keys:
        raise UserError('policies are listed under "policies", or with --over policy=...')


def _check(study: Study) -> None:
    if study.engine not in ENGINES:
        raise UserError(f"--engine must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, not {study.engine}")
    if study.n_runs < 1:
        raise UserError(f"--runs must be at least 1, not {study.n_runs}")
    if study.seed is not None and study.seed < 0:
        raise UserError(f"--seed must not be negative, but is {study.seed}")
    if study.seed is not None and study.seed > MAX_SEED:
        raise UserError(f"--seed must be at most {MAX_SEED}, not {study.seed}")
    changed = [change.partition("=")[0].strip() for change in study.fixed]
    if twice := next((key for key in changed if key in study.keys), None):
        raise UserError(
            f"{twice} is an axis and set to one value, too: leave it out of --over, or of --set and [set]"
        )
    if SEED in changed:
        raise UserError("seeds come from --runs and --seed: leave seed out of --set and [set]")
    for name in study.policies:
        check_policy(name)
    if study.baseline is not None and study.baseline not in study.policies:
        given = (
            f"valid: {', '.join(study.policies)}" if study.policies else "give these with --over policy=..."
        )
        raise UserError(f"the baseline {study.baseline} is none of the policies compared; {given}")


def _mean_of(name: str) -> str:
    return f"{name}_{STATISTICS[0]}" if name in TIMES else name


def measure_of(study: Study, name: str) -> str:
    """Returns the measure called ``name``; the name of a time alone means its mean.

    Raises ``UserError`` if there is no such measure, or if it needs objectives and there are none.
    """
    name = _mean_of(name)
    if name in UNDER_OBJECTIVES and not study.has_goodput:
        raise UserError(f"the metric {name} needs objectives: add --slo, for example --slo ttft=5s")
    if name in COSTS and name not in study.measures:
        raise UserError(
            f"the metric {name} needs what servers cost: give servers.N.cost_per_hour or servers.N.power_idle"
        )
    if name not in study.measures:
        raise UserError(unknown("metric", name, [*TIMES, *study.measures]))
    return name

"""``testbed.sweep``: many runs, and the ``Table`` of them."""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from testbed.api.choices import Chosen, PolicyLike, chosen_of, label_of
from testbed.api.html import table_html
from testbed.api.paths import folder_of
from testbed.api.progress import Listener, Progress, heard
from testbed.api.scenarios import Given, plain, scenario, slo_text, whole
from testbed.errors import UserError
from testbed.experiments.changes import toml_text
from testbed.experiments.units import counted
from testbed.results.intervals import Mean
from testbed.rundir import parquet_path, scratch
from testbed.runtime.signals import outside_loop
from testbed.studies.sweep.axes import POLICY, Axis, checked_axis, value_range
from testbed.studies.sweep.command import Measured, Shown, measured, workers_of, write_study
from testbed.studies.sweep.contrast import Cell, baselines, cells_of
from testbed.studies.sweep.disk import writing
from testbed.studies.sweep.documents import baseline_of, header_and_rows, notes
from testbed.studies.sweep.executors import LOCAL
from testbed.studies.sweep.kept import REQUESTS
from testbed.studies.sweep.measures import BEST_AT_ONE, HIGHER_IS_BETTER
from testbed.studies.sweep.runs import OK, Record
from testbed.studies.sweep.runs import Run as RunOfStudy
from testbed.studies.sweep.study import Options, Study, StudyTable, measure_of, read_study, study_of
from testbed.studies.sweep.table import results_table, typed


class Gain(NamedTuple):
    """What ``policy`` gains over ``against`` at one point of a sweep, over ``n`` seeds that both served.

    - ``at``: the point, value by key; ``metric``: a measure of docs/sweeps.md
    - ``gain``: the mean of the differences, seed by seed, in the metric's unit; above 0, ``policy`` is better, or has more of
      a metric that is best at 1 (``length_fairness_ratio``)
    - ``ci95``: the half-width of its 95 % interval (Student's t); ``None``: there is no spread to estimate it from
    - ``ratio``: ``gain`` over the mean of ``against``
    - ``verdict``: "better" or "worse" (of a metric that is best at 1: "more" or "less") if the interval does not contain 0, else
      "unresolved"; "equal" if all differences are 0; ``None`` without an interval
    - ``n_failed``, ``n_failed_against``: requests of ``policy`` and of ``against`` in these runs that did not complete, and are in no
      time: above 0, the two are not of the same requests
    """

    at: dict[str, Any]
    policy: str
    against: str
    metric: str
    gain: float
    ci95: float | None
    ratio: float | None
    verdict: str | None
    n: int
    n_failed: int
    n_failed_against: int


class Gains(tuple[Gain, ...]):
    """The gains of a sweep, one per point and policy; a table in a notebook."""

    def to_arrow(self) -> pa.Table:
        """Return a table with a row per gain; the keys of the points are columns."""
        rows = [{**gain.at, **gain._asdict()} for gain in self]
        return pa.Table.from_pylist([{key: row[key] for key in row if key != "at"} for row in rows])

    def to_pandas(self) -> Any:
        """Return ``to_arrow`` as a pandas DataFrame; pandas must be installed."""
        return self.to_arrow().to_pandas()

    def _repr_html_(self) -> str:
        keys = list(self[0].at) if self else []
        is_part = any(one.n_failed_against or one.n_failed for one in self)
        rows = []
        for one in self:
            interval = "" if one.ci95 is None else f" ± {one.ci95:.2g}"
            ratio = "" if one.ratio is None else f"{100 * one.ratio:+.1f} %"
            words = [one.policy, one.against, one.metric, f"{one.gain:+.4g}{interval}", ratio]
            left_out = [f"{one.n_failed_against:,} and {one.n_failed:,}"] if is_part else []
            words += [one.verdict or "", str(one.n), *left_out]
            rows.append([*(str(one.at[key]) for key in keys), *words])
        header = [*keys, "policy", "against", "metric", "gain", "relative", "verdict", "n"]
        header += ["requests left out"] if is_part else []
        return table_html("gains, paired seed by seed, with 95 % intervals", header, rows)


@dataclass(frozen=True, repr=False, eq=False)
class Table:
    """The results of a sweep.

    - ``runs``: a row per run: the keys of the axes, policy, seed, engine, ``engine_why``, every measure of the run, ``status`` ("ok",
      "infeasible" or "failed") and ``reason``
    - ``requests``: a row per request of all runs, with the keys, policy and seed; only with ``keep="requests"``
    - ``path``: the study's folder; ``None``: nothing was kept
    """

    runs: pa.Table
    requests: pa.Table | None
    path: Path | None
    _study: Study
    _cells: Sequence[Cell]
    _chosen: Chosen

    def __len__(self) -> int:
        return int(self.runs.num_rows)

    def __getitem__(self, column: str) -> Any:
        """Return a column of ``runs``."""
        if column not in self.runs.column_names:
            raise KeyError(column)
        return self.runs[column]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of ``runs`` as dicts."""
        return iter(self.runs.to_pylist())

    def to_pandas(self) -> Any:
        """Return ``runs`` as a pandas DataFrame; pandas must be installed."""
        return self.runs.to_pandas()

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies, in their order."""
        return tuple(dict.fromkeys(self._chosen.label(cell.policy) for cell in self._cells))

    def mean(
        self, metric: str = "per_token_s", policy: str | None = None
    ) -> list[tuple[dict[str, Any], Mean]]:
        """Return the mean of ``metric`` over seeds with its 95 % half-width, at every point where runs have it.

        ``policy``: that of the runs; it may be left out where there is only one. Raises ``UserError``.
        """
        name, measure = self._name(policy or self._only()), self._measure(metric)
        means = [(self._at(cell), cell.mean(measure)) for cell in self._cells if cell.policy == name]
        return [(at, mean) for at, mean in means if mean is not None]

    def gain(
        self, metric: str = "per_token_s", policy: str | None = None, against: str | None = None
    ) -> Gains:
        """Return what policies gain over another, paired seed by seed.

        - ``metric``: a measure of the runs; the name of a time alone means its mean
        - ``policy``: one of the sweep's; ``None``: all others, one after the other
        - ``against``: ``None``: the sweep's baseline, or else its first policy

        A point where the two share no seed with a value has no gain. Raises ``UserError``.
        """
        measure = self._measure(metric)
        if len(self.policies) < 2:
            raise UserError(
                "a gain is between two policies, but this sweep has only one; give sweep() several"
            )
        base_name = self._name(against) if against else baseline_of(self._study, self._cells)
        wanted = None if policy is None else self._name(policy)
        bases = baselines(self._cells, base_name)
        sign = 1 if measure in HIGHER_IS_BETTER | BEST_AT_ONE else -1
        gains = []
        for cell in self._cells:
            base = bases.get(tuple(cell.point.values()))
            if base is None or cell.policy == base_name or wanted not in (None, cell.policy):
                continue
            found = cell.against(base, measure)
            if found is not None:
                n_failed_against, n_failed = cell.n_left_out(base)
                gains.append(
                    Gain(
                        at=self._at(cell),
                        policy=self._chosen.label(cell.policy),
                        against=self._chosen.label(base_name),
                        metric=measure,
                        gain=sign * found.mean + 0.0,  # no -0.0
                        ci95=None if math.isnan(found.half_width) else found.half_width,
                        ratio=None if found.ratio is None else sign * found.ratio + 0.0,
                        verdict=found.verdict,
                        n=found.n,
                        n_failed=n_failed,
                        n_failed_against=n_failed_against,
                    )
                )
        return Gains(gains)

    def _only(self) -> str:
        if len(self.policies) > 1:
            raise UserError(f"say which policy is meant: {', '.join(self.policies)}")
        return self.policies[0]

    def _name(self, policy: str) -> str:
        for cell in self._cells:
            if policy in (cell.policy, self._chosen.label(cell.policy)):
                return cell.policy
        raise UserError(f"{policy} is none of the sweep's policies; valid: {', '.join(self.policies)}")

    def _measure(self, metric: str) -> str:
        return measure_of(self._study, metric)

    def _at(self, cell: Cell) -> dict[str, Any]:
        return {key: of[cell.point[key]] for key, of in self._values.items()}

    @cached_property
    def _values(self) -> dict[str, dict[str, Any]]:
        """The values of the axes: key -> text -> value."""
        return {**typed(self._study.axes)}

    def __repr__(self) -> str:
        return f"<{self._about}>"

    @property
    def _about(self) -> str:
        n_measured = sum(status == OK for status in self.runs["status"].to_pylist())
        most = (
            "" if n_measured == len(self) else f", {len(self) - n_measured} without a result (column reason)"
        )
        return f"sweep of {self._study.title}: {counted(len(self), 'runs')}{most}"

    def _repr_html_(self) -> str:
        header, rows = header_and_rows(self._study, self._cells)
        return table_html(" ".join([f"{self._about}.", *notes(self._study, self._cells)]), header, rows)


def sweep(
    scenario: Given,
    over: Mapping[str | tuple[str, ...], Sequence[Any] | str] | None = None,
    policies: Sequence[PolicyLike] = (),
    *,
    runs: int | None = None,
    seed: int | None = None,
    jobs: int | None = None,
    engine: str | None = None,
    slo: str | Mapping[str, float] | None = None,
    baseline: PolicyLike = None,
    metrics: Sequence[str] = (),
    keep: str | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Listener | None = None,
) -> Table:
    """Run a scenario at every combination of values, policies and seeds, as `testbed sweep` does.

    - ``scenario``: as for ``testbed.scenario``, or the name or file of a study, such as "paper:clustered"
    - ``over``: values by key path, in place of the scenario's; a range as text ("0.1:2:0.1"); several keys in a tuple change together, and each of
      their values is a tuple, too
    - ``policies``: pairs by name or as objects (docs/python.md); none: the scenario's own
    - ``runs``: seeds per point and policy, from ``seed`` (the scenario's) on; every policy gets the same requests
    - ``jobs``: worker processes; ``None``: one per CPU
    - ``engine``: "fast", "virtual", "real" or "reference"; ``slo``: objectives, "ttft=5s,tpot=1s"
    - ``baseline``, ``metrics``: what the table in a notebook, and the files in ``out``, compare and show
    - ``keep``: "requests": keep a row per request, ``Table.requests``
    - ``out``: the study's folder, in which a later call goes on; ``None``: nothing is kept
    - ``progress``: called with a ``Progress``, with ``n_done`` and ``n_total``

    A run that fails is a row with the reason. Raises ``UserError`` for wrong input, ``RunError`` if a worker dies.
    """
    given = _listed(policies, "policies")
    if None in given:
        raise UserError("None is no policy: give names, pairs or objects, or leave policies out")
    if over is not None and not isinstance(over, Mapping):
        raise UserError(f"over must be a dict of values by key, not {over!r}")
    axes = tuple(_axis(key, values) for key, values in (over or {}).items())
    stopped = Event()

    def do() -> Table:
        with heard(progress), chosen_of([*given, baseline]) as every, scratch("study") as temporary:
            names = tuple(name for name in every.names[:-1] if name is not None)
            base, chosen = every.names[-1], replace(every, names=names)
            options = Options(
                axes=axes,
                objects=chosen.objects,
                policies=names,
                keep=keep,
                n_runs=whole(runs, "runs"),
                seed=whole(seed, "seed"),
                engine=engine,
                baseline=next((name for name in names if base in (name, label_of(name))), base),
                slo=slo_text(slo),
                metrics=_names(metrics),
            )
            study = _study(scenario, options)
            study = replace(study, labels={**{name: chosen.label(name) for name in names}, **study.labels})
            folder = folder_of(out) or temporary / "sweep"
            workers = workers_of(study, LOCAL, whole(jobs, "jobs"))
            with measured(study, folder, workers, shown_to(progress, stopped)) as results:
                if results.stopped:
                    raise KeyboardInterrupt(results.stopped)
                if out is not None:
                    write_study(folder, study, results)
                return Table(
                    runs=_labelled(results_table(results.rows, study.axes, study.measures), chosen),
                    requests=_requests(folder, study, results, chosen),
                    path=None if out is None else folder,
                    _study=study,
                    _cells=cells_of(results.rows),
                    _chosen=chosen,
                )

    return outside_loop(do, stopped.set)


def _listed(values: Any, name: str) -> list[Any]:
    """Return a list of what may be given one by one, too. Raises ``UserError``."""
    if isinstance(values, str):
        return [values]
    try:
        return list(values)
    except TypeError:
        raise UserError(f"{name} must be a list, not {values!r}") from None


def _names(metrics: Any) -> str | None:
    """Return metrics as ``--metrics`` has them; ``None``: none. Raises ``UserError``."""
    names = _listed(metrics, "metrics")
    if other := next((name for name in names if not isinstance(name, str)), None):
        raise UserError(f"metrics are names such as ttft_s, not {other!r}")
    return ",".join(names) or None


def _study(source: Given, options: Options) -> Study:
    if isinstance(source, str | os.PathLike):
        return read_study(os.fspath(source), options)
    made = scenario(source)
    keys = {key for axis in options.axes for key in axis.keys}
    options = replace(
        options, overrides=tuple(str(change) for change in made.changes if change.key not in keys)
    )
    return study_of(StudyTable(scenario=made.name), options, made.target)


def _axis(key: str | tuple[str, ...], values: Sequence[Any] | str) -> Axis:
    where = f"over {key}"
    if key == POLICY:
        raise UserError("policies are no axis here: give them as policies=[...]")
    if isinstance(key, str) and isinstance(values, str):
        return checked_axis((key,), [(text,) for text in value_range(values, where)], where)
    keys = key if isinstance(key, tuple) else (key,)
    if (
        not isinstance(key, str | tuple)
        or isinstance(values, str | bytes)
        or not isinstance(values, Iterable)
    ):
        raise UserError(
            f"{where}: give a list of values for a key, or tuples for several keys, not {values!r}"
        )
    points = [
        tuple(value) if isinstance(value, tuple | list) and isinstance(key, tuple) else (value,)
        for value in values
    ]
    if any(len(point) != len(keys) for point in points):
        raise UserError(f"{where}: each value must be a tuple of {len(keys)}, one for each key")
    texts = [
        tuple(toml_text(plain(value, name)) for name, value in zip(keys, point, strict=True))
        for point in points
    ]
    return checked_axis(keys, texts, where)


def shown_to(progress: Listener | None, stopped: Event) -> Shown:
    """Return what tells ``progress`` of every run that is done, and ends the study once ``stopped`` is set."""

    def shown(
        done: Iterable[tuple[RunOfStudy, Record]], n_total: int
    ) -> Generator[tuple[RunOfStudy, Record], None, None]:
        for n_done, one in enumerate(done, 1):
            if stopped.is_set():
                raise KeyboardInterrupt
            yield one
            if progress is not None:
                progress(Progress(f"{n_done} of {n_total} runs", n_done, n_total))

    return shown


def _requests(folder: Path, study: Study, results: Measured, chosen: Chosen) -> pa.Table | None:
    """Return the rows per request of all runs, if the study keeps them; ``folder`` may be about to go."""
    if results.kept is None:
        return None
    path = folder / REQUESTS
    if not path.exists():
        with writing(path):
            results.kept.write(path, results.rows, study.axes)
    return _labelled(pq.read_table(parquet_path(path)), chosen)


def _labelled(table: pa.Table, chosen: Chosen) -> pa.Table:
    """Return ``table`` with the labels of policies that are objects."""
    if not chosen.objects:
        return table
    labels = {name: chosen.label(name) for name in table[POLICY].unique().to_pylist()}
    names = pa.array([labels[name] for name in table[POLICY].to_pylist()], pa.string())
    return table.set_column(table.column_names.index(POLICY), POLICY, names)

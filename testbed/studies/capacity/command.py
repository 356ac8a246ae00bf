"""``testbed capacity``: searches for the highest rate of each policy, all at the same time on the same
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from testbed.control.choice import check_policy
from testbed.errors import EXIT_INTERRUPTED, UserError
from testbed.experiments import Change, Override, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.slo import Objective, Objectives
from testbed.results.intervals import Mean
from testbed.results.slo import parse_slo_statistics
from testbed.simulator.runs import draw_of, drawn_of
from testbed.studies.capacity.measures import load_measures
from testbed.studies.capacity.search import (
    STEPS_DOWN,
    STEPS_UP,
    RateTrial,
    Search,
    SearchResult,
    search,
    stopped,
)
from testbed.studies.capacity.seeds import is_wide, most_seeds, runs_needed
from testbed.studies.capacity.text import capacity_text
from testbed.studies.capacity.verdict import PLACEMENT, REQUESTS, Verdict, costs_over_seeds, verdict_of
from testbed.studies.sweep.axes import SEED
from testbed.studies.sweep.pool import Local, n_workers, sigterm_as_ctrl_c
from testbed.studies.sweep.runs import FAST, Record, Run, Runner, Setup, lost_record
from testbed.studies.sweep.store import default_folder, kept_runs
from testbed.terminal import say

RUNS = "capacity.jsonl"
WIDTH = 0.02
LEAST_REQUESTS, MOST_REQUESTS = 100, 20_000


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    ``policies``: names (none: the scenario's own policy). ``out``: the folder that keeps runs; None: one in
    ``runs`` for this scenario, these objectives and these overrides. ``width``: the highest rate is found to within a
    factor of 1 + ``width``. ``most_requests``: at most so many generated requests are served per run.
    """

    slo: str
    policies: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    n_runs: int = 5
    seed: int | None = None
    jobs: int | None = None
    out: Path | None = None
    width: float = WIDTH
    most_requests: int = MOST_REQUESTS


def capacity_command(target: str, options: Options) -> tuple[dict[str, Any], str, int]:
    """Returns the object for ``--json``, the text for the terminal, and the exit code (1 if a run failed).

    A policy without a placement is a row with its reason. Stopped by Ctrl-C or SIGTERM, it returns what was
    found until then and ``EXIT_INTERRUPTED``. Raises ``UserError`` for invalid options, and
    ``KeyboardInterrupt`` if it is stopped before any rate was judged.
    """
    objectives = parse_slo_statistics(options.slo)
    _check(options)
    changes: list[Override] = [*options.overrides, *_seeded(options.seed)]
    experiment = load_experiment(target, changes)
    draw = draw_of(experiment, options.n_runs)
    first = experiment if draw is None else load_experiment(target, [*changes, draw])
    drawn = drawn_of(first)
    start = _start(experiment, target)
    least, most = _requests(experiment, target, options.overrides, options.most_requests)
    seeds = range(experiment.seed, experiment.seed + options.n_runs)
    limits_s: dict[str, float] = {}
    for objective in objectives:
        limits_s[objective.metric] = max(objective.limit_s, limits_s.get(objective.metric, 0.0))
    policies: Sequence[str | None] = options.policies or (None,)
    jobs = n_workers(options.jobs)
    default = default_folder("capacity", target, options.slo, options.overrides)
    is_stopped = False
    with sigterm_as_ctrl_c(), kept_runs(options.out, default, RUNS) as kept:
        searches = _Searches(
            {policy: search(start, least, most, options.width, options.n_runs > 1) for policy in policies},
            options.overrides,
            seeds,
            objectives,
            kept.result,
            can_set_requests=most > least,
        )
        setup = Setup(target, FAST, options.n_runs, Objectives(limits_s), frozenset(kept.known))
        begin = partial(Runner, measure=load_measures)
        try:
            kept.keep_all(Local(jobs).results(begin, setup, searches.begin(), lost_record, searches.more))
        except KeyboardInterrupt:
            if not searches.judged:
                raise KeyboardInterrupt(kept.stopped()) from None
            is_stopped = True
            say(kept.stopped())
    rows = [_row(searches, policy, objectives, options.n_runs, most_seeds(drawn)) for policy in policies]
    answer: dict[str, Any] = {
        "scenario": target,
        "objectives": {objective.name: objective.limit_s for objective in objectives},
        "seeds": list(seeds),
        "start_rate": start,
        "lowest_rate": start / 2**STEPS_DOWN,
        "highest_rate": start * 2**STEPS_UP,
        "width_ratio": options.width,
        "arrivals": first.workload.source,
        "drawn": drawn,
        "policies": rows,
        "stopped": is_stopped,
        "out": str(kept.folder),
        "n_computed": kept.n_computed,
        "n_found": kept.n_found,
    }
    text = f"{capacity_text(answer)}\n{kept.in_words}"
    code = 1 if any(row["failed"] for row in rows) else 0
    return answer, text, EXIT_INTERRUPTED if is_stopped else code


def _seeded(seed: int | None) -> list[Change]:
    return [] if seed is None else [Change(SEED, seed)]


def _check(options: Options) -> None:
    if options.n_runs < 1:
        raise UserError(f"--runs must be at least 1, not {options.n_runs}")
    n_workers(options.jobs)
    if options.seed is not None and options.seed < 0:
        raise UserError(f"--seed must not be negative, but is {options.seed}")
    if any(change.partition("=")[0].strip() == SEED for change in options.overrides):
        raise UserError("seeds come from --runs and --seed: leave seed out of --set")
    for i, name in enumerate(options.policies):
        if name in options.policies[:i]:
            raise UserError(f"the policy {name} is given twice; leave one out")
        check_policy(name)


def _start(experiment: Experiment, target: str) -> float:
    """Returns the scenario's own rate (requests/s). Raises ``UserError`` if arrivals are not set by
    one rate.
    """
    workload = experiment.document["workload"]
    if workload.get("changes"):
        raise UserError(
            f"{target}: workload.changes sets several rates, but a capacity is one rate: "
            "remove them with --set workload.changes=[]"
        )
    arrivals_s = {request.arrival_at_s for request in experiment.workload.requests}
    if len(experiment.workload.requests) > 1 and len(arrivals_s) == 1:
        raise UserError(
            f"{target}: all requests arrive at the same time, so a rate has no effect; "
            "a capacity needs arrivals one after the other"
        )
    return float(workload["rate"])


def _requests(experiment: Experiment, target: str, overrides: Sequence[str], most: int) -> tuple[int, int]:
    """Returns how many requests a run has at first, and at most.

    Requests of a recording or a list are always as many as the scenario sets.
    """
    n = len(experiment.workload.requests)
    if experiment.workload.sample is None and n < most:
        try:
            load_experiment(target, [*overrides, Change("workload.n_requests", most)])
        except UserError:
            return n, n
        return max(n, min(LEAST_REQUESTS, most)), most
    return n, n


class _Searches:
    """The searches of all policies, which advance as the results of their runs arrive."""

    def __init__(
        self,
        searches: dict[str | None, Search],
        overrides: Sequence[str],
        seeds: range,
        objectives: Sequence[Objective],
        result: Callable[[Record], Record],
        *,
        can_set_requests: bool,
    ) -> None:
        self._result = result
        self._searches, self._overrides, self._seeds = searches, tuple(overrides), seeds
        self._objectives, self._can_set_requests = objectives, can_set_requests
        self._asked: dict[str | None, RateTrial] = {}
        self._records: dict[str | None, dict[int, Record]] = {}
        self._found: dict[str | None, SearchResult] = {}
        self.judged: dict[str | None, list[Verdict]] = {}
        self.names: dict[str | None, str] = {}
        """The policies' names as the records of runs have them."""

    def found(self, policy: str | None) -> tuple[SearchResult, bool]:
        """Returns the result of a policy's search, or what is known of it, and whether it has ended."""
        if policy in self._found:
            return self._found[policy], True
        return stopped(self.judged.get(policy, [])), False

    def begin(self) -> list[list[Run]]:
        return [self._ask(policy, lambda s=s: next(s)) for policy, s in self._searches.items()]  # type: ignore[misc]

    def more(self, run: Run, record: Record) -> list[list[Run]]:
        """Record a result. If it was the last one of its policy's rate, judge that rate and return the next
        runs.
        """
        policy = run.policy
        records = self._records[policy]
        record = records[run.seed] = self._result(record)
        if record.policy:
            self.names[policy] = record.policy
        if len(records) < len(self._seeds):
            return []
        asked = self._asked[policy]
        verdict = verdict_of(
            asked.rate, asked.n_requests, [records[seed] for seed in self._seeds], self._objectives
        )
        _say_verdict(policy, verdict)
        self.judged.setdefault(policy, []).append(verdict)
        runs = self._ask(policy, lambda: self._searches[policy].send(verdict))
        return [runs] if runs else []

    def _ask(self, policy: str | None, go_on: Callable[[], RateTrial]) -> list[Run]:
        try:
            asked = go_on()
        except StopIteration as end:
            self._found[policy] = end.value
            return []
        self._asked[policy], self._records[policy] = asked, {}
        changes: tuple[Override, ...] = (*self._overrides, Change("workload.rate", asked.rate))
        if self._can_set_requests:
            changes = (*changes, Change("workload.n_requests", asked.n_requests))
        return [Run(changes, policy, seed) for seed in self._seeds]


def _say_verdict(policy: str | None, verdict: Verdict) -> None:
    """Print a verdict on stderr, as the progress of the search."""
    whose = "" if policy is None else f"{policy}: "
    result = verdict.error or ("kept" if verdict.is_kept else f"broken by {verdict.broken_by}")
    say(f"{whose}{verdict.rate:g} requests/s, {verdict.n_requests:,} requests: {result}")


def _row(
    searches: _Searches, policy: str | None, objectives: Sequence[Objective], n_runs: int, most: int
) -> dict[str, Any]:
    found, has_ended = searches.found(policy)
    kept, at_edge = found.kept, found.broken or found.at_bottom
    shown = kept or at_edge
    is_same_run = shown is not None and shown.is_same_run
    has_interval = has_ended and n_runs > 1 and not is_same_run
    draining = [v.rate for v in found.judged if kept and v.rate <= kept.rate and not v.is_growing]
    odd = [v.rate for v in found.judged if kept and v.rate > kept.rate and v.is_kept]
    return {
        "policy": searches.names.get(policy, policy or ""),
        "engine": None if shown is None else shown.engine,
        "engine_why": None if shown is None else shown.engine_why,
        "max_rate": None if kept is None or found.error else kept.rate,
        "low": found.low if has_interval else None,
        "high": found.high if has_interval else None,
        "same_run": is_same_run,
        "is_wide": has_interval and is_wide(found),
        "runs_needed": runs_needed(found, n_runs, most) if has_interval else None,
        "limited_by": at_edge.broken_by if at_edge is not None else None,
        "limited_at": _limited_at(at_edge, objectives),
        "broken_at": found.broken.rate if found.broken is not None else None,
        "goodput_rps": _mean(kept.goodput) if kept else None,
        "goodput_rps_ci95": _half(kept.goodput) if kept else None,
        **({"costs": costs_over_seeds(kept)} if kept is not None and kept.costs else {}),
        "at_max": _values(kept, objectives),
        "at_broken": _values(at_edge, objectives),
        "metastable": None if kept is None else kept.is_growing,
        "drains_at_broken": None if found.broken is None else not found.broken.is_growing,
        "draining_rate": max(draining, default=None),
        "ttft_thirds_s": list(kept.thirds_s) if kept is not None and kept.thirds_s is not None else None,
        "also_kept_at": odd,
        "broken_below": found.broken_below,
        "n_requests": None if shown is None else shown.n_requests,
        "mean_in_system": None if kept is None else kept.rate * kept.mean_s,
        "n_rates": found.n_judged,
        "failed": bool(found.error),
        "stopped": not has_ended,
        "reason": _reason(found, objectives) if has_ended else _until_stopped(found),
    }


def _until_stopped(found: SearchResult) -> str:
    """Returns what is known of a search that was stopped."""
    kept, broken = found.kept, found.broken
    if kept is not None and broken is not None:
        return f"stopped: kept at {kept.rate:g} and broken at {broken.rate:g} requests/s; the search had not ended"
    if kept is not None:
        return f"stopped: every rate judged so far keeps it, up to {kept.rate:g} requests/s"
    if broken is not None:
        return f"stopped: no rate judged so far keeps it, down to {broken.rate:g} requests/s"
    return "stopped before any rate was judged"


def _reason(found: SearchResult, objectives: Sequence[Objective]) -> str | None:
    """Returns why the search found no rate, or why it found only a bound; None if it found the
    highest rate.
    """
    if found.error:
        return found.error
    if found.kept is None:
        bottom = found.at_bottom
        assert bottom is not None, "without a rate that is kept, the lowest was judged"
        if bottom.broken_by == PLACEMENT:
            return bottom.reason
        what = "requests fail" if bottom.broken_by == REQUESTS else f"{bottom.broken_by} is missed"
        missed_at = _limited_at(bottom, objectives)
        what += f" at {', '.join(missed_at)}" if missed_at else ""
        return f"no rate keeps it: at {bottom.rate:g} requests/s, the lowest tried, {what}"
    if found.broken is None:
        return f"every rate up to {found.kept.rate:g} requests/s, the highest tried, keeps it"
    return None


def _values(verdict: Verdict | None, objectives: Sequence[Objective]) -> dict[str, Any] | None:
    """Returns the values of all objectives at one rate, in seconds."""
    if verdict is None:
        return None
    values: dict[str, dict[str, Any]] = {}
    for objective in objectives:
        values[objective.name] = _value(verdict.values.get(objective.name))
        of_clients = verdict.by_client.get(objective.name)
        if of_clients:
            values[objective.name] |= {
                "clients": {client: _value(value) for client, value in of_clients.items()},
                "missed_at": verdict.missed_at(objective),
            }
    return {"rate": verdict.rate, **values}


def _value(of: Mean | None) -> dict[str, Any]:
    return {"value_s": _mean(of), "ci95_s": _half(of)}


def _limited_at(verdict: Verdict | None, objectives: Sequence[Objective]) -> list[str]:
    """Returns the clients at which the objective is missed that breaks a rate, the worst first."""
    named = {objective.name: objective for objective in objectives}
    broken_by = named.get(verdict.broken_by or "") if verdict is not None else None
    return verdict.missed_at(broken_by) if verdict is not None and broken_by is not None else []


def _mean(of: Mean | None) -> float | None:
    return None if of is None else of.mean


def _half(of: Mean | None) -> float | None:
    return None if of is None or of.n < 2 else of.half_width

"""``testbed advise``: judges combinations of added servers, with the workers of ``testbed sweep``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from testbed.control.choice import check_policy
from testbed.errors import ScenarioError, UserError
from testbed.experiments import Change, load_experiment
from testbed.experiments.policy import FIXED, PolicyChoice
from testbed.experiments.provenance import n_cpus
from testbed.experiments.slo import Objective, Objectives, parse_statistic
from testbed.experiments.units import RATE
from testbed.results.slo import parse_slo_statistics
from testbed.simulator.runs import cases_of, drawn_of
from testbed.studies.advise.candidates import Addition, Fleet, WiderLink, parse_candidates, parse_cost
from testbed.studies.advise.judging import Judging, Variant, numbers
from testbed.studies.advise.search import LOOK_AHEAD, combinations, cost_of, everything, greedy, one_less
from testbed.studies.advise.text import advise_text
from testbed.studies.capacity.measures import load_measures
from testbed.studies.capacity.verdict import costs_over_seeds
from testbed.studies.sweep.axes import SEED
from testbed.studies.sweep.pool import Local, sigterm_as_ctrl_c
from testbed.studies.sweep.runs import FAST, Run, Runner, Setup, case_of, lost_record
from testbed.studies.sweep.store import default_folder, kept_runs

RUNS = "advice.jsonl"
DEFAULT_METRIC = "e2e_mean"
EXACT, GREEDY = "exact", "greedy"


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Without ``slo`` and ``metric``, the goal is to lower ``DEFAULT_METRIC``. ``most``: up to so many
    combinations, all are tried; with more, a greedy search chooses some. ``out``: the folder that keeps runs;
    None: one in ``runs`` for this scenario and these overrides.
    """

    budget: str
    candidates: str
    slo: str | None = None
    metric: str | None = None
    policy: str | None = None
    overrides: tuple[str, ...] = ()
    n_runs: int = 5
    seed: int | None = None
    jobs: int | None = None
    most: int = 100
    losses: bool = True
    out: Path | None = None


def advise_command(target: str, options: Options) -> tuple[dict[str, Any], str]:
    """Returns the object for ``--json``, and the text for the terminal.

    Raises ``UserError`` for invalid options, ``RunError`` if a run of a combination failed, and
    ``KeyboardInterrupt`` with how to go on if it is stopped.
    """
    budget, candidates = _checked(options)
    objectives, costs = _objectives(options), [candidate.cost for candidate in candidates]
    n_seeds = 2 * options.n_runs  # to choose and to measure: with a recording, no two use the same requests
    first = next(cases_of(target, PolicyChoice.of(options.policy), options.overrides, options.seed, n_seeds))
    seed = first.experiment.seed
    seeds = range(seed, seed + options.n_runs)
    search_seeds = range(seeds.stop, seeds.stop + options.n_runs)
    fleets = {
        seed: Fleet.of(load_experiment(target, [*options.overrides, Change(SEED, seed)]))
        for seed in (*seeds, *search_seeds)
    }
    losses = fleets[seed].losses if options.losses else []
    only_once = fleets[seed].once(candidates)
    paid = combinations(costs, budget, options.most, only_once)
    is_slo = options.slo is not None
    search = greedy(costs, budget, only_once) if paid is None else everything(costs, paid, stops=is_slo)
    default = default_folder("advise", target, options.overrides)
    with sigterm_as_ctrl_c(), kept_runs(options.out, default, RUNS) as kept:
        setup = Setup(target, FAST, n_seeds, Objectives(), frozenset(kept.known))
        added = _added(setup, options, candidates, fleets[seed], seed)
        judging = Judging(
            candidates,
            fleets,
            seeds,
            search_seeds,
            options.overrides,
            options.policy,
            objectives,
            is_slo,
            search,
            [lost for lost, _ in losses],
            kept.result,
        )
        begin = partial(Runner, measure=load_measures)
        jobs = n_cpus() if options.jobs is None else options.jobs
        try:
            kept.keep_all(Local(jobs).results(begin, setup, judging.begin(), lost_record, judging.more))
        except KeyboardInterrupt:
            raise KeyboardInterrupt(kept.stopped()) from None
    answer = {
        "scenario": target,
        "seeds": list(seeds),
        "search_seeds": list(search_seeds),
        "drawn": drawn_of(first.experiment),
        "goal": _goal(options, objectives),
        "budget": float(budget),
        "candidates": added,
        "method": GREEDY if paid is None else EXACT,
        "look_ahead": LOOK_AHEAD if paid is None else None,
        "n_combinations": None if paid is None else len(paid),
        **_found(judging, candidates, budget, objectives, is_slo),
        "losses": [
            {
                "server": fleets[seed].servers[lost]["name"],
                "n_alike": n_alike,
                **_outcome(judging, objectives, is_slo, judging.measured(judging.none, lost)),
            }
            for lost, n_alike in sorted(losses, key=lambda loss: judging.severity(loss[0]), reverse=True)
        ],
        "out": str(kept.folder),
        "n_computed": kept.n_computed,
        "n_found": kept.n_found,
    }
    return answer, f"{advise_text(answer)}\n{kept.in_words}"


def _checked(options: Options) -> tuple[Fraction, tuple[Addition, ...]]:
    """Returns the budget and the candidates. Raises ``UserError`` if any option is invalid."""
    for name, value, least in (
        ("--runs", options.n_runs, 1),
        ("--jobs", options.jobs, 1),
        ("--exact", options.most, 0),
        ("--seed", options.seed, 0),
    ):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, not {value}")
    if any(change.partition("=")[0].strip() == SEED for change in options.overrides):
        raise UserError("seeds come from --runs and --seed: leave seed out of --set")
    if options.slo is not None and options.metric is not None:
        raise UserError("give either --slo, objectives to reach, or --metric, a time to lower, not both")
    if options.policy is not None:
        check_policy(options.policy)
    candidates = parse_candidates(options.candidates)
    budget = parse_cost(options.budget, "--budget")
    cheapest = min(candidates, key=lambda candidate: candidate.cost)
    if cheapest.cost > budget:
        raise UserError(
            f"--budget {float(budget):g} pays none of the candidates: "
            f"the cheapest, {cheapest.name}, costs {float(cheapest.cost):g}"
        )
    return budget, candidates


def _objectives(options: Options) -> tuple[Objective, ...]:
    """Returns the objectives of ``--slo``, or the metric to lower as an objective with limit 0."""
    if options.slo is not None:
        return parse_slo_statistics(options.slo)
    try:
        return (Objective(*parse_statistic(options.metric or DEFAULT_METRIC), 0.0),)
    except ValueError as error:
        raise UserError(f"--metric: {error}") from error


def _goal(options: Options, objectives: Sequence[Objective]) -> dict[str, Any]:
    if options.slo is None:
        return {"metric": objectives[0].name}
    return {"objectives": {objective.name: objective.limit_s for objective in objectives}}


def _added(
    setup: Setup, options: Options, candidates: Sequence[Addition], fleet: Fleet, seed: int
) -> list[dict[str, Any]]:
    """Returns each candidate's cost and site; hardware and memory (bytes) of a server, rates (bit/s) of a link,
    as resolved with the first seed.

    Raises ``UserError`` for a candidate that the scenario does not accept.
    """
    found: list[dict[str, Any]] = []
    for candidate in candidates:
        if isinstance(candidate, WiderLink):
            found.append(_widened(candidate, fleet))
            continue
        counts = tuple(int(other is candidate) for other in candidates)
        changes = fleet.changes(candidates, counts)
        try:
            case = case_of(setup, Run((*options.overrides, *changes), options.policy, seed))
        except ScenarioError as error:
            # The message names an option that the user did not give: only its reason is kept.
            why = re.sub(r"^servers\.\d+\.\w+: ", "", str(error).rpartition(f"{changes[0]}: ")[2])
            raise UserError(f"--candidates: {candidate.name}: {why}") from None
        if case.experiment.policy.placement.startswith(FIXED):
            raise UserError(
                f"{setup.target}: its placement is fixed and puts no blocks on added servers; "
                "choose another policy with --policy"
            )
        spec = case.experiment.problem.servers[-1]
        found.append(
            {
                "candidate": candidate.name,
                "cost": float(candidate.cost),
                "hardware": spec.hardware,
                "memory_bytes": spec.memory_bytes,
                "site": case.experiment.sites[spec.name],
            }
        )
    return found


def _widened(wider: WiderLink, fleet: Fleet) -> dict[str, Any]:
    """Returns what a wider link is. Raises ``UserError`` if there is no such link, or if it is as wide already."""
    now_bps = fleet.rate_bps(wider)
    site = fleet.site_of(wider.place)
    if wider.rate_bps <= now_bps:
        raise UserError(
            f"--candidates: {wider.name}: the {wider.link} of {site} has {RATE.format(now_bps)} already; "
            "give a higher rate"
        )
    return {
        "candidate": wider.name,
        "cost": float(wider.cost),
        "link": wider.link,
        "rate_bps": wider.rate_bps,
        "now_bps": now_bps,
        "site": site,
    }


def _found(
    judging: Judging,
    candidates: Sequence[Addition],
    budget: Fraction,
    objectives: Sequence[Objective],
    is_slo: bool,
) -> dict[str, Any]:
    costs = [candidate.cost for candidate in candidates]
    outcome = partial(_outcome, judging, objectives, is_slo)
    now, best = judging.measured(judging.none), judging.measured(judging.best)
    tried = [counts for counts in judging.scores if cost_of(costs, counts) <= budget]
    record = judging.judged[now].cell.rows[0].record

    def alone(candidate: Addition) -> dict[str, Any]:
        variant = judging.measured(tuple(int(other is candidate) for other in candidates))
        return {**outcome(variant), "against_best": outcome(variant, best)["difference"]}

    def combination(variant: Variant) -> dict[str, Any]:
        add = {c.name: n for c, n in zip(candidates, variant.counts, strict=True) if n}
        return {"add": add, "cost": float(cost_of(costs, variant.counts)), **outcome(variant)}

    return {
        "policy": record.policy,
        "engine": record.engine or None,
        "engine_why": record.engine_why or None,
        "n_tried": len(tried),
        "now": outcome(now),
        "best": {
            **combination(best),
            "is_kept_in_search": judging.scores[judging.best].is_reached if is_slo else None,
            "without_one": [
                {
                    "candidate": candidate.name,
                    **outcome(judging.measured(one_less(judging.best, i)), best),
                }
                for i, candidate in enumerate(candidates)
                if judging.best[i]
            ],
        },
        "first": [
            {
                "candidate": candidate.name,
                "cost": float(candidate.cost),
                "is_paid": candidate.cost <= budget,
                **alone(candidate),
            }
            for candidate in candidates
        ],
        "tried": [
            combination(judging.searched(counts))
            for counts in sorted(tried, key=lambda c: (cost_of(costs, c), c))
        ],
    }


def _outcome(
    judging: Judging,
    objectives: Sequence[Objective],
    is_slo: bool,
    variant: Variant,
    base: Variant | None = None,
) -> dict[str, Any]:
    """Returns a variant's values (seconds) and their differences to ``base``, over the same seeds.

    ``base`` is by default the scenario without changes.
    """
    now = Variant(judging.none, variant.seeds)
    judged, compared = judging.judged[variant], judging.judged[base or now]
    values, differences = {}, {}
    for objective in objectives:
        value_s, ci95_s = numbers(judged.verdict.values.get(objective.name))
        values[objective.name] = {"value_s": value_s, "ci95_s": ci95_s}
        found = judged.cell.against(compared.cell, objective.name)
        if found is not None:
            mean_s, ci95_s = numbers(found)
            differences[objective.name] = {
                "mean_s": mean_s,
                "ci95_s": ci95_s,
                "n": found.n,
                "ratio": found.ratio,
                "verdict": found.verdict,
            }
    return {
        "values": values,
        "difference": differences,
        **({"costs": costs_over_seeds(judged.verdict)} if judged.verdict.costs else {}),
        "is_kept": judged.verdict.is_kept if is_slo and not judged.error else None,
        "share_without_placement": None if judged.error else judged.n_without,
        "n_failed": None if judged.error else judged.n_failed,
        "reason": judged.error or judged.verdict.reason or None,
    }

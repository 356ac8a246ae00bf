"""``testbed score``: runs a policy on a suite's settings, and scores it against the frozen reference figures."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from testbed.control.choice import check_policy
from testbed.errors import UserError
from testbed.experiments.filesread import FilesRead, files_read
from testbed.experiments.inputs import keep_inputs
from testbed.experiments.policy import PolicyChoice
from testbed.experiments.provenance import PROVENANCE, provenance, source_digest
from testbed.results.intervals import Mean, mean_of
from testbed.rundir import write_json
from testbed.studies.score import leaderboard
from testbed.studies.score.measures import figures_in
from testbed.studies.score.running import Check, Checker, LimitedRunner, Limits, broken_rule, lost
from testbed.studies.score.suite import REFERENCE, SUITE, Setting, Suite, all_changes, read_suite
from testbed.studies.score.text import leaderboard_text, score_text
from testbed.studies.sweep.command import Shown
from testbed.studies.sweep.disk import writing
from testbed.studies.sweep.executors import LOCAL, executor_of
from testbed.studies.sweep.pool import Executor, digest_of, sigterm_as_ctrl_c
from testbed.studies.sweep.progress import with_progress
from testbed.studies.sweep.runs import INFEASIBLE, OK, Record, Run, Setup
from testbed.studies.sweep.store import KeptRuns, default_folder, kept_runs
from testbed.studies.sweep.study import MAX_SEED

RUNS, SCORE = "score.jsonl", "score.json"
FRESH_SEEDS = "fresh.json"
"""In a score's folder: its fresh seeds, so that a command that was stopped goes on with the same ones."""
FROZEN, FRESH = "frozen", "fresh"
FIRST_FRESH_SEED, N_FRESH_SEEDS = 1000, 1_000_000
"""Fresh seeds are drawn from this range, which no suite's frozen seeds reach."""
DEFAULT_SUITE = "geo-4"
_N_CHECKED = 3
"""So many settings are served once more to see whether decisions repeat themselves."""
_SLOWER_BESIDE_OTHERS = 4.0
"""Decisions beside other runs may take so many times as long as alone, since these share caches and cores."""


@dataclass(frozen=True)
class Options:
    """The options of the command line. ``seeds``: frozen, fresh (both are scored), or numbers in their place.

    Programs may give policies that are ``objects``, by kind and name, and the ``fresh_seeds``, which are drawn else.
    """

    suite: str = DEFAULT_SUITE
    is_quick: bool = False
    seeds: str = FROZEN
    jobs: int | None = None
    out: Path | None = None
    objects: Mapping[tuple[str, str], object] = field(default_factory=dict)
    has_checks: bool = True
    fresh_seeds: tuple[int, ...] = ()
    executor: str = LOCAL


SETUP = Setup("")
"""Every run states its own scenario."""


def _setup(options: Options) -> Setup:
    digests = {name: digest_of(policy) for (_, name), policy in options.objects.items()}
    return replace(SETUP, objects=options.objects, digests=digests)


class Scored(NamedTuple):
    """A policy's score on some seeds: ``mean`` over seeds, and a row per setting."""

    mean: Mean
    rows: list[dict[str, Any]]

    @property
    def why(self) -> str:
        """Why it is not valid: the rule that it broke first; empty if it broke none."""
        return next((f"{row['name']}: {row['why']}" for row in self.rows if row["is_broken"]), "")


Records = Mapping[tuple[str, int], Record]
"""The records of a policy by setting and seed."""


def score_command(policy: str, options: Options) -> tuple[dict[str, Any], str, int]:
    """Return the object for ``--json``, the text, and the exit code: 0 if the score is valid, else 1.

    Raises ``UserError`` for invalid options, and ``KeyboardInterrupt`` with what is kept if it is stopped.
    """
    suite = read_suite(options.suite)
    best = suite.best()
    check_policy(policy)
    default = default_folder("score", suite.name, policy)
    with sigterm_as_ctrl_c():
        answer, kept = score(suite, policy, options, default)
    return answer, f"{score_text(answer, best)}\n{kept}", 0 if answer["valid"] else 1


def score(
    suite: Suite, policy: str, options: Options, default: Path, shown: Shown = with_progress
) -> tuple[dict[str, Any], str]:
    """Return the object of a policy's score, and what was computed and kept, in words.

    Without ``options.out`` runs are kept in the folder ``default``. ``shown`` shows the progress. Raises as
    ``score_command``.
    """
    with kept_runs(options.out, default, RUNS) as kept, files_read() as read:
        (answer,), _ = _answers(suite, [policy], [policy], options, kept, shown)
        _keep(suite, [policy], options, answer, kept, read)
    return answer, kept.in_words


def _keep(
    suite: Suite,
    policies: Sequence[str],
    options: Options,
    answer: Mapping[str, Any],
    kept: KeptRuns,
    read: FilesRead,
) -> None:
    """Write ``SCORE`` with all that it was computed from beside the runs, unless a program gave its own objects."""
    if not kept.is_stored or options.objects:
        return
    read.files |= {suite.folder, suite.folder / SUITE, suite.folder / REFERENCE}
    read.policies |= {half for half in _halves(policies) if ":" in half}
    with writing(kept.folder / SCORE):
        write_json(kept.folder / PROVENANCE, provenance())
        keep_inputs(kept.folder, call_of(policies, options, answer), read)
        write_json(kept.folder / SCORE, answer)


def _halves(policies: Sequence[str]) -> list[str]:
    """Return the names of placement and routing policies, or of pairs."""
    return [half for policy in policies for half in vars(PolicyChoice.of(policy)).values() if half]


def call_of(policies: Sequence[str], options: Options, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the command that scores ``policies`` on the same seeds, as data for JSON; ``called`` reads it."""
    is_board = "policies" in answer
    fresh = (answer["policies"][0] if is_board else answer)["fresh_seeds"]
    given = {"suite": options.suite, "is_quick": options.is_quick, "seeds": options.seeds}
    given |= {"has_checks": options.has_checks, "fresh_seeds": fresh}
    return {"command": "score", "all": is_board, "policies": list(policies), "options": given}


def called(call: Mapping[str, Any]) -> tuple[bool, list[str], Options]:
    """Return whether it is a leaderboard, its policies and options. Raises ``KeyError`` or ``TypeError`` for other data."""
    given = call["options"]
    options = Options(**{**given, "fresh_seeds": tuple(given["fresh_seeds"])})
    return bool(call["all"]), list(call["policies"]), options


def leaderboard_command(policies: Sequence[str], options: Options) -> tuple[dict[str, Any], str, int]:
    """Score the suite's reference policies and ``policies``, and write the leaderboard into ``options.out``.

    Returns and raises as ``score_command``; the object has an answer per policy.
    """
    suite = read_suite(options.suite)
    suite.best()
    names = list(dict.fromkeys([*suite.references, *policies]))
    for name in policies:
        check_policy(name)
    default = default_folder("leaderboard", suite.name, *policies)
    with sigterm_as_ctrl_c(), kept_runs(options.out, default, RUNS) as kept, files_read() as read:
        answers, records = _answers(suite, names, policies, options, kept)
        leaderboard.save(kept.folder, suite, answers, records, asked_settings(suite, options))
        answer = {"suite": suite.name, "out": str(kept.folder), "policies": answers}
        _keep(suite, policies, options, answer, kept, read)
    text = leaderboard_text(*leaderboard.header_and_rows(answers))
    text += f"\n{kept.folder}: {leaderboard.PAGE}, {leaderboard.TEXT}, {leaderboard.TABLE}; {kept.in_words}"
    given = [answer for answer in answers if answer["policy"] in policies]
    return answer, text, 0 if all(one["valid"] for one in given) else 1


def asked_settings(suite: Suite, options: Options) -> tuple[Setting, ...]:
    """Return the settings that are scored."""
    return suite.quick_settings() if options.is_quick else suite.settings


def _answers(
    suite: Suite,
    policies: Sequence[str],
    given: Sequence[str],
    options: Options,
    kept: KeptRuns,
    shown: Shown = with_progress,
) -> tuple[list[dict[str, Any]], dict[str, dict[tuple[str, int], Record]]]:
    """Return an answer per policy, and the records of all runs. ``given``: the policies that were asked for by name."""
    settings = asked_settings(suite, options)
    shared = _setup(options)
    code = [[half, shared.digests.get(half) or source_digest(half)] for half in _halves(given)]
    frozen, fresh = _seeds(suite, options, kept, code)
    workers = executor_of(options.executor, options.jobs, is_apart=True)
    try:
        records = run_all(suite, settings, policies, (*frozen, *fresh), workers, kept, shared, shown)
        alone = executor_of(options.executor, 1, is_apart=True)
        for policy in records:
            _time_alone(suite, settings, policy, records[policy], alone, kept, shared)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(kept.stopped()) from None
    return [
        _answer(suite, settings, policy, frozen, fresh, records[policy], options, kept) for policy in policies
    ], records


def _answer(
    suite: Suite,
    settings: Sequence[Setting],
    policy: str,
    frozen: Sequence[int],
    fresh: Sequence[int],
    records: Records,
    options: Options,
    kept: KeptRuns,
) -> dict[str, Any]:
    scored = scored_of(suite, settings, frozen, records)
    anew = scored_of(suite, settings, fresh, records) if fresh else None
    why = scored.why or ("" if anew is None else anew.why)
    is_shipped = policy in suite.references and ":" not in policy  # tests hold these to the rules
    if not why and options.has_checks and not is_shipped:
        why = _checked(suite, settings, policy, (*frozen, *fresh)[-1], records, options)
    return {
        "suite": suite.name,
        "policy": policy,
        "quick": options.is_quick,
        "seeds": list(frozen),
        "combined_score": scored.mean.mean,
        "interval": _interval(scored.mean),
        "fresh_score": None if anew is None else anew.mean.mean,
        "fresh_interval": None if anew is None else _interval(anew.mean),
        "fresh_seeds": list(fresh),
        "valid": not why,
        "checks": options.has_checks,
        "why": why,
        "settings": [{k: v for k, v in row.items() if k != "is_broken"} for row in scored.rows],
        "out": str(kept.folder),
    }


def _seeds(
    suite: Suite, options: Options, kept: KeptRuns, code: list[list[str]]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the seeds in the place of the frozen ones, and the fresh ones. Raises ``UserError``."""
    frozen = suite.quick_seeds if options.is_quick else suite.seeds
    if options.seeds == FROZEN:
        return frozen, ()
    if options.seeds == FRESH:
        return frozen, options.fresh_seeds or _fresh(len(frozen), kept, code)
    try:
        found = tuple(int(seed) for seed in options.seeds.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0 or max(found) > MAX_SEED or len(set(found)) < len(found):
        raise UserError(
            f"--seeds {options.seeds}: must be frozen, fresh, or different numbers of at most {MAX_SEED}, such as 20,21,22"
        )
    return found, ()


class _Fresh(msgspec.Struct):
    """``FRESH_SEEDS``: the seeds, and the policies for which they were drawn, each with the digest of its code."""

    code: list[list[str]]
    seeds: list[int]


def _fresh(n_seeds: int, kept: KeptRuns, code: list[list[str]]) -> tuple[int, ...]:
    """Draw fresh seeds. They stay those of the folder until other policies, or other ``code`` of theirs, are scored there."""
    path, known = kept.folder / FRESH_SEEDS, _Fresh(code, [])
    with contextlib.suppress(OSError, msgspec.MsgspecError):  # there are none yet, or none that can be read
        known = msgspec.json.decode(path.read_bytes(), type=_Fresh)
    drawn: dict[int, None] = dict.fromkeys(known.seeds if known.code == code else ())
    while len(drawn) < n_seeds:
        drawn[FIRST_FRESH_SEED + secrets.randbelow(N_FRESH_SEEDS)] = None
    if kept.is_stored:
        with writing(path):
            write_json(path, msgspec.to_builtins(_Fresh(code, list(drawn))))
    return tuple(drawn)[:n_seeds]


def run_all(
    suite: Suite,
    settings: Sequence[Setting],
    policies: Sequence[str],
    seeds: Sequence[int],
    workers: Executor,
    kept: KeptRuns,
    shared: Setup = SETUP,
    shown: Shown = with_progress,
) -> dict[str, dict[tuple[str, int], Record]]:
    """Do the runs of all policies that are not kept yet; returns the records by policy, setting and seed."""
    asked: dict[Run, tuple[str, str, int]] = {}
    groups = []
    for setting in settings:
        changes = all_changes(setting)
        for policy in policies:
            group = {setting.run(changes, policy, seed): (policy, setting.name, seed) for seed in seeds}
            groups.append(list(group))
            asked |= group
    found: dict[str, dict[tuple[str, int], Record]] = {policy: {} for policy in policies}
    begin = partial(LimitedRunner, limits=suite.limits)
    setup = replace(shared, known=frozenset(kept.known))
    results = workers.results(begin, setup, groups, lost)
    for run, record in shown(results, len(asked)):
        kept.keep(record)
        of, name, seed = asked[run]
        found[of][name, seed] = kept.result(record)
    return found


def _time_alone(
    suite: Suite,
    settings: Sequence[Setting],
    policy: str,
    records: dict[tuple[str, int], Record],
    alone: Executor,
    kept: KeptRuns,
    shared: Setup,
) -> None:
    """Serve a policy's runs whose decisions took too long once more, with no run beside them; the shorter times count.

    Ends with the first whose decisions take too long again.
    """
    longest = Limits(*(_SLOWER_BESIDE_OTHERS * limit for limit in suite.limits))
    by_name = {setting.name: setting for setting in settings}
    begin = partial(LimitedRunner, limits=suite.limits)
    for (name, seed), record in records.items():
        if record.status != OK or not broken_rule(record, suite.limits) or broken_rule(record, longest):
            continue
        run = by_name[name].run(all_changes(by_name[name]), policy, seed)
        ((_, again),) = alone.results(begin, shared, [[run]], lost)
        times = {
            of: min(getattr(one, of) or 0.0 for one in (record, again))
            for of in ("placement_cpu_s", "routing_cpu_s")
        }
        if again.status == OK:
            record = records[name, seed] = msgspec.structs.replace(record, **times)
            kept.keep(record)
        if broken_rule(record, suite.limits):
            return


def scored_of(suite: Suite, settings: Sequence[Setting], seeds: Sequence[int], records: Records) -> Scored:
    """Return the score of a policy: per seed the mean over settings, and of these the mean with its interval."""
    best = suite.best()
    scores = {
        (setting.name, seed): leaderboard.score_in(
            records[setting.name, seed], best[setting.name], suite.limits
        )
        for setting in settings
        for seed in seeds
    }
    mean = mean_of([fmean(scores[setting.name, seed] for setting in settings) for seed in seeds])
    assert mean is not None, "there is at least one seed"
    rows = []
    for setting in settings:
        found = [records[setting.name, seed] for seed in seeds]
        score = fmean(scores[setting.name, seed] for seed in seeds)
        rows.append({"name": setting.name, "score": score, **_row(found, suite.limits)})
    return Scored(mean, rows)


_MEANS = ("met_ratio", "goodput", "given_up_ratio", "ttft_p95_s", "tpot_p95_s", "tpot_p50_s")


def _row(records: Sequence[Record], limits: Limits) -> dict[str, Any]:
    """Return a setting's figures, means over seeds; ``None`` where a seed has none."""
    row: dict[str, Any] = {}
    done = [figures_in(record) for record in records if record.status == OK]
    for name in _MEANS:
        values = [getattr(figures, name) for figures in done]
        row[name] = fmean(values) if len(values) == len(records) and None not in values else None
    for name, key, factor in (
        ("place_cpu_s", "placement_cpu_s", 1.0),
        ("route_cpu_ms", "routing_cpu_s", 1e3),
    ):
        values = [getattr(record, key) for record in records if getattr(record, key) is not None]
        row[name] = factor * fmean(values) if values else None
    failed = [record for record in records if record.status != OK]
    broken = next((text for record in records if (text := broken_rule(record, limits))), "")
    row["why"] = next((record.reason for record in failed), "") or broken
    row["is_broken"] = bool(broken) or any(_is_at_fault(record) for record in failed)
    return row


def _is_at_fault(record: Record) -> bool:
    """Whether a run failed by its policy: not for want of a placement, or of what the scenario does not state."""
    return record.status != INFEASIBLE and bool(record.key or record.again)


def _checked(
    suite: Suite, settings: Sequence[Setting], policy: str, seed: int, records: Records, options: Options
) -> str:
    """Return what the policy's decisions depend on beside what it is given, where that is found; empty if nothing is.

    The settings that took least are served once more in other processes, where a clock, a hash or a draw of its own
    differs, and one of them with the output lengths of other requests.
    """
    done = [setting for setting in settings if records[setting.name, seed].status == OK]
    again = sorted(done, key=lambda setting: records[setting.name, seed].took_s)[:_N_CHECKED]
    checks: dict[Check, str] = {}
    for setting in again:
        run = setting.run(all_changes(setting), policy, seed)
        checks[Check(run, figures_in(records[setting.name, seed]))] = setting.name
    if again:
        checks[next(iter(checks))._replace(figures=None)] = again[0].name
    if not checks:
        return ""
    begin = partial(Checker, limits=suite.limits)
    workers = executor_of(options.executor, options.jobs, is_apart=True)
    results = workers.results(
        begin, _setup(options), [[check] for check in checks], lambda check: lost(check.run).reason
    )
    return next((f"{checks[check]}: {why}" for check, why in results if why), "")


def _interval(mean: Mean) -> list[float] | None:
    return [mean.mean - mean.half_width, mean.mean + mean.half_width] if mean.n > 1 else None

"""Several runs of one scenario: which recorded requests each uses, and means over them with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from testbed.errors import UserError
from testbed.experiments import Change, Override, Target
from testbed.experiments.experiment import Experiment
from testbed.experiments.policy import PolicyChoice
from testbed.records.base import data_of
from testbed.results.failures import commonest
from testbed.results.intervals import LESS, MORE, mean_of, sign_of
from testbed.results.unused import unused_from, unused_over_runs
from testbed.simulator.answer import MEANS, MOST_REASONS, PERCENTILES, TIMES
from testbed.simulator.cases import Case, scenario_case

BOOTSTRAP = "bootstrap"
SAME_RUN = "no seed changes anything in its runs, so they have no interval"
"""Said of a policy whose runs with several seeds are all the same."""
_VERDICTS = {MORE: "gain", LESS: "loss"}
"""Of a policy whose times the first one's are compared with."""


def cases_of(
    target: Target, choice: PolicyChoice, overrides: Sequence[Override], seed: int | None, n_runs: int
) -> Iterator[Case]:
    """Yield a case for each of ``n_runs`` consecutive seeds.

    With recorded requests each seed uses other ones, the same under every policy. If the scenario does not
    set ``workload.draw``, they are windows that share no request if there are enough, else a block bootstrap.
    Raises ``UserError``.
    """
    first = scenario_case(target, choice, overrides, seed)
    draw = draw_of(first.experiment, n_runs)
    if draw is not None:
        overrides = [*overrides, draw]
        first = scenario_case(target, choice, overrides, seed)
    yield first
    for number in range(1, n_runs):
        yield scenario_case(target, choice, overrides, first.experiment.seed + number)


def draw_of(experiment: Experiment, n_runs: int) -> Change | None:
    """Return the change with which ``n_runs`` runs choose their recorded requests, or ``None``.

    ``None``: the scenario sets ``workload.draw``, its requests are generated, or there is a single run.
    Raises ``UserError`` if the scenario sets "windows" and has fewer windows than runs.
    """
    sample, n = experiment.workload.sample, len(experiment.workload.requests)
    if n_runs < 2 or sample is None or not n:
        return None
    n_windows = sample.n_recorded // n
    if sample.draw is None:
        return Change("workload.draw", "windows" if n_runs <= n_windows else BOOTSTRAP)
    if sample.draw == "windows" and n_runs > n_windows:
        raise UserError(
            f"{n_runs} seeds need as many windows of {n:,} requests, but {sample.n_recorded:,} recorded "
            f"requests have only {n_windows}; lower --runs or workload.n_requests, or set workload.draw = "
            f'"{BOOTSTRAP}"'
        )
    return None


def drawn_of(experiment: Experiment) -> dict[str, Any] | None:
    """Return how runs chose their recorded requests, for the output; ``None``: they were generated."""
    sample = experiment.workload.sample
    if sample is None:
        return None
    n = len(experiment.workload.requests)
    return {"draw": sample.draw or "first", "n_requests": n, "n_recorded": sample.n_recorded}


def drawn_text(drawn: dict[str, Any]) -> str:
    """Return a sentence on how runs chose their recorded requests (``drawn_of``)."""
    n, n_all = drawn["n_requests"], drawn["n_recorded"]
    if drawn["draw"] == "windows":
        return f"each run uses a window of its own: {n:,} of the {n_all:,} recorded requests"
    if drawn["draw"] == "first":
        return f"all runs use the first {n:,} of the {n_all:,} recorded requests, as workload.draw says"
    return (
        f"each run draws {n:,} requests, in blocks, from the same {n_all:,} recorded ones: too few for "
        "separate windows. Intervals are widened, since the recording's length limits how narrow they can be; more runs "
        "hardly help"
    )


def recorded_share(drawn: dict[str, Any] | None) -> float:
    """Return the share of the recording that each run draws with a bootstrap, else 0, for ``mean_of``.

    ``testbed.results.intervals.mean_of`` widens intervals of runs that share one recording.
    """
    if drawn is None or drawn["draw"] != BOOTSTRAP:
        return 0.0
    return float(drawn["n_requests"] / drawn["n_recorded"])


def fingerprint(case: Case, row: dict[str, Any]) -> Any:
    """Return a value that is equal for two runs only if their requests and all their times are the same."""
    times = [{k: v for k, v in r.items() if k != "route"} for r in row["requests"] or ()]
    return case.experiment.workload.requests, times, row.get("error")


def same_run_error(rows: Sequence[dict[str, Any]]) -> UserError:
    """Return the error for runs that are all the same, so that there is no interval."""
    first = rows[0]
    return UserError(
        f"{first['id']}: all {first['n_runs']} runs are the same, since the seed changes nothing in the "
        "scenario, and an interval over them would mean nothing; leave --runs out, or let something be "
        "drawn (arrivals, lengths, or workload.draw of a trace)"
    )


def aggregate(rows: list[dict[str, Any]], drawn: dict[str, Any] | None, is_same_run: bool) -> dict[str, Any]:
    """Return one object for several seeds: means over the runs with the half-widths of their 95 % intervals.

    ``is_same_run``: every run is the same as the first, so that the half-widths are ``None``.
    """
    feasible = [row for row in rows if row["feasible"]]
    whole: dict[str, Any] = {
        key: rows[0][key] for key in ("id", "policy", "mode", "engine", "engine_why", "session_setup_ms")
    }
    whole |= {"feasible": bool(feasible), "n_runs": len(rows), "n_feasible": len(feasible)}
    if drawn is not None:
        whole["drawn"] = drawn
    whole["same_run"] = is_same_run
    errors = list(dict.fromkeys(row["error"] for row in rows if not row["feasible"]))
    if errors:
        whole["error"] = "; ".join(errors[:3])
    share = recorded_share(drawn)

    def over_runs(values: Iterable[float | None]) -> tuple[float | None, float | None]:
        found = mean_of([value for value in values if value is not None], share)
        if found is None:
            return None, None
        return found.mean, None if found.n < 2 or is_same_run else found.half_width

    for key in ("mean", "mean_without_session_setup"):
        if any(key in row for row in feasible):
            found = {name: over_runs(row[key][name] for row in feasible) for name in MEANS}
            whole[key] = {name: mean for name, (mean, _) in found.items()}
            whole[f"{key}_ci95"] = {name: half for name, (_, half) in found.items()}
    if feasible:
        whole["percentiles"], whole["percentiles_ci95"] = {}, {}
        for name in TIMES:
            of = {p: over_runs(row["percentiles"][name][p] for row in feasible) for p in PERCENTILES}
            whole["percentiles"][name] = {p: mean for p, (mean, _) in of.items()}
            whole["percentiles_ci95"][name] = {p: half for p, (_, half) in of.items()}
        reasons = chain.from_iterable(row["failed_because"].items() for row in feasible)
        whole["failed_because"] = commonest(reasons, MOST_REASONS)
        whole["mean_waiting_of_all_ms"] = over_runs(row["mean_waiting_of_all_ms"] for row in feasible)[0]
        unused = unused_over_runs([unused_from(row["unused_blocks"]) for row in feasible])
        whole["unused_blocks"] = None if unused is None else data_of(unused)
        whole["n_empty"] = sum(not row["n_completed"] for row in feasible)
    for key in ("n_requests", "n_completed", "n_failed", "n_never_admitted"):
        whole[key] = sum(row.get(key, 0) for row in rows)
    if "mean_without_session_setup" in whole:
        key = "n_failed_without_session_setup"
        whole[key] = sum(row.get(key, 0) for row in feasible)
    for key in ("note", "online"):
        if key in rows[0]:
            whole[key] = rows[0][key]
    if "goodput_rps" in rows[0]:
        whole["goodput_rps"], whole["goodput_rps_ci95"] = over_runs(row["goodput_rps"] for row in feasible)
    whole["decision_s"] = sum(row["decision_s"] for row in rows) / len(rows)
    whole["runs"] = [{k: v for k, v in row.items() if k != "requests"} for row in rows]
    return whole


def add_gain(base: dict[str, Any], row: dict[str, Any]) -> None:
    """Add to ``row`` the key ``gain``: differences to ``base``, another policy on the same target, by seed.

    Each metric has ``gain_ms``, the mean of the differences base - row (above 0: ``row`` is faster),
    ``ci95_ms`` (the half-width of its 95 % interval), ``ratio`` (``gain_ms`` over base's mean in these runs)
    and ``verdict``: "gain" or "loss" if the interval does not contain 0, else "unresolved", or "equal" if every pair is.
    It is ``None`` with fewer than two runs where both have the metric.
    """
    pairs = [
        (a, b) for a, b in zip(base["runs"], row["runs"], strict=True) if a["feasible"] and b["feasible"]
    ]
    share = recorded_share(row.get("drawn"))

    def gain(name: str, p: str | None = None) -> dict[str, Any] | None:
        def value(run: dict[str, Any]) -> float | None:
            found: float | None = run["mean"][name] if p is None else run["percentiles"][name][p]
            return found

        both = [
            (a, b) for a, b in ((value(a), value(b)) for a, b in pairs) if a is not None and b is not None
        ]
        found = mean_of([a - b for a, b in both], share)
        if found is None or found.n < 2:
            return None
        of_base = math.fsum(a for a, _ in both) / len(both)
        return {
            "gain_ms": found.mean,
            "ci95_ms": found.half_width,
            "ratio": found.mean / of_base if of_base else None,
            "verdict": _VERDICTS.get(sign := sign_of(both, found), sign),
            "n_runs": found.n,
        }

    row["gain"] = {
        "against": base["policy"],
        "n_left_out": [sum(pair[side]["n_failed"] for pair in pairs) for side in (0, 1)],
        "mean": {name: gain(name) for name in TIMES},
        "percentiles": {name: {p: gain(name, p) for p in PERCENTILES} for name in TIMES},
    }

"""``testbed score --all``: every reference policy's score in one page, and all runs in one table."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from testbed.results.intervals import mean_of
from testbed.rundir import LEADERBOARD, STUDY_PAGE, parquet_path, replacing
from testbed.studies.score.marks import Best, Figures, score_of
from testbed.studies.score.measures import figures_in
from testbed.studies.score.running import Limits, broken_rule
from testbed.studies.score.suite import Setting, Suite
from testbed.studies.sweep.disk import save_text, writing
from testbed.studies.sweep.documents import markdown
from testbed.studies.sweep.runs import OK, Record
from testbed.studies.sweep.webpage import page_text

PAGE, TEXT, TABLE = STUDY_PAGE, "leaderboard.md", LEADERBOARD
_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in ("suite", "policy", "setting")),
        ("seed", pa.int64()),
        *((name, pa.string()) for name in ("status", "reason")),
        ("score", pa.float64()),
        *((name, pa.float64()) for name in Figures.__struct_fields__),
        *((name, pa.float64()) for name in ("place_cpu_s", "route_cpu_ms")),
    ]
)


def score_in(record: Record, best: Best, limits: Limits) -> float:
    """Return the score of a run: 0 if it has no figures, or broke a rule."""
    if record.status != OK or broken_rule(record, limits):
        return 0.0
    return score_of(figures_in(record), best)


def frozen_answers(suite: Suite) -> list[dict[str, Any]]:
    """Return an answer per reference policy from the frozen figures, with what the page's table needs of it.

    Raises ``UserError`` if the suite has none.
    """
    best = suite.best()
    assert suite.reference is not None, "its best figures are from there"
    answers = []
    for policy in suite.references:
        rows, scores = [], []
        for setting in suite.settings:
            found = suite.reference.policies[setting.name][policy]
            of_seeds = [score_of(figures, best[setting.name]) for figures in found] or [0.0] * len(
                suite.seeds
            )
            scores.append(of_seeds)
            row: dict[str, Any] = {"name": setting.name, "score": fmean(of_seeds)}
            for name in ("met_ratio", "given_up_ratio"):
                row[name] = fmean(getattr(figures, name) for figures in found) if found else None
            rows.append(row)
        mean = mean_of([fmean(of_seed) for of_seed in zip(*scores, strict=True)])
        assert mean is not None, "there is at least one seed"
        interval = [mean.mean - mean.half_width, mean.mean + mean.half_width] if mean.n > 1 else None
        answer = {"policy": policy, "valid": True, "combined_score": mean.mean, "interval": interval}
        answers.append({**answer, "fresh_score": None, "settings": rows})
    return answers


def frozen_text(suite: Suite) -> str:
    """Return the leaderboard of the reference policies in Markdown, from the frozen figures."""
    answers = sorted(frozen_answers(suite), key=lambda answer: -answer["combined_score"])
    header, rows = header_and_rows(answers)
    used = [at for at in range(len(header)) if any(row[at] for row in rows)]
    table = markdown([header[at] for at in used], [[row[at] for at in used] for row in rows])
    names = [setting.name for setting in suite.settings]
    by_setting = [
        [f"`{name}`", *(f"{answer['settings'][at]['score']:.2f}" for answer in answers)]
        for at, name in enumerate(names)
    ]
    return "\n".join(
        [
            f"# {suite.name}: the leaderboard",
            "",
            f"{suite.description}: the reference policies on the frozen seeds {', '.join(map(str, suite.seeds))}. 1 is the best",
            "of them in every setting and every figure; [score.md](score.md) has the formula. A policy without a placement in a",
            f"setting has 0 there. `python -m benchmarks suite {suite.name} --page docs/leaderboard.md` writes this page from the",
            "suite's frozen figures; `testbed score --all` measures them again, and yours beside them.",
            "",
            table,
            "## By setting",
            "",
            markdown(["setting", *(f"`{answer['policy']}`" for answer in answers)], by_setting),
        ]
    )


def header_and_rows(answers: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the page's table, the best policy first: its score, where it is the best, and what deciding took."""
    header = [
        "policy",
        "score",
        "on fresh seeds",
        "best in",
        "met",
        "given up",
        "placing, CPU s",
        "routing, CPU ms",
    ]
    highest: dict[str, float] = {}
    for answer in answers:
        for row in answer["settings"]:
            highest[row["name"]] = max(row["score"], highest.get(row["name"], 0.0))
    rows = []
    for answer in sorted(answers, key=lambda answer: -answer["combined_score"]):
        settings = answer["settings"]
        n_best = sum(row["score"] >= highest[row["name"]] - 1e-9 for row in settings)
        rows.append(
            [
                answer["policy"] + ("" if answer["valid"] else " (not valid)"),
                _with_interval(answer["combined_score"], answer["interval"]),
                ""
                if answer["fresh_score"] is None
                else _with_interval(answer["fresh_score"], answer["fresh_interval"]),
                f"{n_best} of {len(settings)}",
                f"{fmean(row['met_ratio'] or 0.0 for row in settings):.1%}",
                f"{fmean(1.0 if row['given_up_ratio'] is None else row['given_up_ratio'] for row in settings):.1%}",
                _largest(settings, "place_cpu_s"),
                _largest(settings, "route_cpu_ms"),
            ]
        )
    return header, rows


def groups_of(settings: Sequence[Setting]) -> dict[str, set[str]]:
    """Return the settings of each group by its name: those of one scenario, and those with one kind of load.

    A setting is called SCENARIO or SCENARIO-LOAD. A group has more than one setting, and not all.
    """
    groups: dict[str, set[str]] = {}
    for setting in settings:
        scenario = Path(setting.target).stem
        load = setting.name.removeprefix(scenario).removeprefix("-")
        for name in (scenario, load):
            groups.setdefault(name, set()).add(setting.name)
    return {name: of for name, of in groups.items() if name and 1 < len(of) < len(settings)}


def answers_of_group(
    answers: Sequence[Mapping[str, Any]], group: Collection[str], runs: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the answers as if the suite had only the settings of a ``group``; ``runs`` are the lines of the table."""
    found = []
    for answer in answers:
        by_seed: dict[int, list[float]] = {seed: [] for seed in answer["seeds"]}
        for run in runs:
            if run["policy"] == answer["policy"] and run["setting"] in group and run["seed"] in by_seed:
                by_seed[run["seed"]].append(run["score"])
        mean = mean_of([fmean(scores) for scores in by_seed.values()])
        assert mean is not None, "there is at least one seed"
        interval = [mean.mean - mean.half_width, mean.mean + mean.half_width] if mean.n > 1 else None
        settings = [row for row in answer["settings"] if row["name"] in group]
        part = {"combined_score": mean.mean, "interval": interval, "fresh_score": None, "settings": settings}
        found.append({**answer, **part})
    return found


def save(
    folder: Path,
    suite: Suite,
    answers: Sequence[Mapping[str, Any]],
    records: Mapping[str, Mapping[tuple[str, int], Record]],
    settings: Sequence[Setting],
) -> None:
    """Write the page, the same as Markdown, and the table of all runs. Raises as ``save_text``."""
    description, best, limits = suite.description, suite.best(), suite.limits
    header, rows = header_and_rows(answers)
    seeds = ", ".join(map(str, answers[0]["seeds"]))
    about = (
        f"{description}. Frozen seeds {seeds}; 1 is the best of the reference policies, setting by setting. "
        "Shares are means over settings, where a policy without a placement meets nothing; CPU times are the largest."
    )
    failures = [f"{answer['policy']}: {answer['why']}" for answer in answers if answer["why"]]
    save_text(folder / TEXT, f"# {suite.name}\n\n{about}\n\n{markdown(header, rows)}")
    lines: list[dict[str, Any]] = [
        {
            "suite": suite.name,
            "policy": policy,
            "setting": setting,
            "seed": seed,
            "status": record.status,
            "reason": record.reason,
            "score": score_in(record, best[setting], limits),
            **(record.measures if record.status == OK else {}),
            "place_cpu_s": record.placement_cpu_s,
            "route_cpu_ms": None if record.routing_cpu_s is None else 1e3 * record.routing_cpu_s,
        }
        for policy, of in records.items()
        for (setting, seed), record in of.items()
    ]
    parts = {
        name: header_and_rows(answers_of_group(answers, group, lines))
        for name, group in groups_of(settings).items()
    }
    save_text(folder / PAGE, page_text(suite.name, [about], (header, rows), failures, [], parts))
    path = folder / TABLE
    with writing(path), replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(lines, _SCHEMA), parquet_path(temporary))


def _with_interval(score: float, interval: Sequence[float] | None) -> str:
    return f"{score:.3f}" + ("" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.3f}")


def _largest(settings: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [row[name] for row in settings if row.get(name) is not None]
    return f"{max(values):.2g}" if values else ""

"""`python -m benchmarks suite FOLDER`: makes ``reference.json``, the frozen figures of a suite's reference policies.

It is for a new suite only: figures that were published under a suite's name never change. ``--page`` and ``--data`` write
the documents that are made of them.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from testbed.experiments.provenance import n_cpus
from testbed.results.intervals import EQUAL
from testbed.studies.score.command import RUNS, run_all
from testbed.studies.score.leaderboard import frozen_text
from testbed.studies.score.marks import Best, Figures, best_of, rate_of, score_of
from testbed.studies.score.measures import figures_in
from testbed.studies.score.running import Limits, broken_rule
from testbed.studies.score.suite import REFERENCE, Reference, Suite, read_suite
from testbed.studies.sweep.contrast import BETTER, WORSE
from testbed.studies.sweep.disk import save_text
from testbed.studies.sweep.documents import markdown
from testbed.studies.sweep.pool import Local
from testbed.studies.sweep.runs import OK, Record
from testbed.studies.sweep.store import kept_runs

OfPolicies = Mapping[str, Sequence[Figures]]
"""The figures of each policy in a setting, by seed; none if it has none."""
ALIKE = 0.01
"""Figures that differ by a smaller share are equal here."""


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks suite", description=__doc__)
    parser.add_argument("folder", help="a suite's folder, or a shipped suite's name")
    parser.add_argument("--out", type=Path, help="keeps the runs; those there are not done again")
    parser.add_argument(
        "--page", type=Path, help="run nothing: write the leaderboard from the figures that are there"
    )
    parser.add_argument("--data", type=Path, help="likewise: write every policy's figures in every setting")
    parser.add_argument("--jobs", type=int, default=n_cpus())
    parser.add_argument("--only", nargs="+", help="make the figures of these settings, and keep all others")
    options = parser.parse_args(arguments)
    suite = read_suite(options.folder)
    pages = ((options.page, frozen_text), (options.data, data_text))
    if any(path is not None for path, _ in pages):
        for path, text in pages:
            if path is not None:
                save_text(path, text(suite))
        return 0
    if options.out is None:
        parser.error("--out is missing: the folder that keeps the runs")
    settings = [setting for setting in suite.settings if not options.only or setting.name in options.only]
    with kept_runs(options.out, options.out, RUNS) as kept:
        found = run_all(
            suite, settings, suite.references, suite.seeds, Local(options.jobs, is_apart=True), kept
        )
    policies = {
        setting.name: {
            policy: _figures([found[policy][setting.name, seed] for seed in suite.seeds], suite.limits)
            for policy in suite.references
        }
        for setting in settings
    }
    if options.only and suite.reference is not None:
        policies = suite.reference.policies | policies
    policies = {
        setting.name: policies[setting.name] for setting in suite.settings if setting.name in policies
    }
    best = {setting: best_of(of) for setting, of in policies.items()}
    reference = Reference(suite.name, best, policies)
    path = save_text(
        suite.folder / REFERENCE, msgspec.json.format(msgspec.json.encode(reference)).decode() + "\n"
    )
    print(f"{path}: {len(best)} settings, {len(suite.references)} policies; {kept.in_words}")
    return 0


def data_text(suite: Suite, of: str = "foresight") -> str:
    """Returns the frozen figures in Markdown: how ``of`` stands beside each other policy, and every setting's table."""
    best = suite.best()
    assert suite.reference is not None, "its best figures are from there"
    of_settings = suite.reference.policies
    lines = [
        f"# {suite.name}: every policy in every setting",
        "",
        f"Means over the frozen seeds {', '.join(map(str, suite.seeds))}, from which [the leaderboard](../leaderboard.md) follows;",
        "[rivals.md](../rivals.md) explains them, and says who wins where and why.",
        f"`python -m benchmarks suite {suite.name} --data docs/data/{suite.name}.md` writes this page from the suite's figures.",
        "",
        f"## `{of}` beside each policy",
        "",
        f"In how many of {len(suite.settings)} settings it is better / alike (within {ALIKE:.0%}) / worse, and how many the other",
        "cannot serve at all. p95 are compared by their 1 / p95, as the score does.",
        "",
        markdown(
            ["beside", *COMPARED, "without"],
            [_beside(other, of, of_settings) for other in suite.references if other != of],
        ),
        f"## Where another is better by more than {ALIKE:.0%}",
        "",
        markdown(["setting", "figure", "best", "", f"`{of}`"], list(_behind(of, of_settings))),
        "## The settings",
        "",
    ]
    for setting in suite.settings:
        about, objective = setting.about, setting.changes[-1].partition('"')[2].rstrip('"')
        lines += [f"### `{setting.name}`", "", f"{about[0].upper()}{about[1:]}. Objective: {objective}.", ""]
        lines += _table(of_settings[setting.name], best[setting.name])
    return "\n".join(lines).rstrip() + "\n"


def _beside(other: str, of: str, of_settings: Mapping[str, OfPolicies]) -> list[str]:
    """Returns the row of ``other``: in how many settings ``of`` is better than it, alike and worse, by each figure."""
    pairs = [(found[of], found[other]) for found in of_settings.values() if found[other]]
    row = [f"`{other}`"]
    for _, value in COMPARED.values():
        counts = Counter(_verdict(value(own), value(others)) for own, others in pairs)
        row.append(" / ".join(str(counts[verdict]) for verdict in (BETTER, EQUAL, WORSE)))
    return [*row, str(len(of_settings) - len(pairs))]


def _behind(of: str, of_settings: Mapping[str, OfPolicies]) -> Iterator[list[str]]:
    """Yields a row for every figure of a setting by which another policy is better than ``of``."""
    for setting, found in of_settings.items():
        for name, (shown, value) in COMPARED.items():
            first = max(
                (policy for policy in found if found[policy]), key=lambda policy: value(found[policy])
            )
            if _verdict(value(found[of]), value(found[first])) == WORSE:
                yield [f"`{setting}`", name, f"`{first}`", shown(found[first]), shown(found[of])]


def _table(found: OfPolicies, best: Best) -> list[str]:
    """Returns lines with the policies of a setting, the best first; those with equal figures share a row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for policy in sorted(found, key=lambda policy: -_score(found[policy], best)):
        if figures := found[policy]:
            cells = (f"{_score(figures, best):.3f}", *(shown(figures) for shown in SHOWN.values()))
            alike.setdefault(cells, []).append(f"`{policy}`")
    lines = [
        markdown(["policy", "score", *SHOWN], [[", ".join(names), *cells] for cells, names in alike.items()])
    ]
    if without := ", ".join(f"`{policy}`" for policy, figures in found.items() if not figures):
        lines += [f"Without figures: {without}.", ""]
    return lines


def _verdict(own: float, other: float) -> str:
    if math.isclose(own, other, rel_tol=ALIKE):
        return EQUAL
    return BETTER if own > other else WORSE


def _score(figures: Sequence[Figures], best: Best) -> float:
    return fmean(score_of(one, best) for one in figures) if figures else 0.0


def _mean(name: str) -> Callable[[Sequence[Figures]], float]:
    return lambda figures: fmean(getattr(one, name) for one in figures)


def _rate(name: str) -> Callable[[Sequence[Figures]], float]:
    return lambda figures: fmean(rate_of(getattr(one, name)) for one in figures)


def _seconds(name: str) -> Callable[[Sequence[Figures]], str]:
    def shown(figures: Sequence[Figures]) -> str:
        values = [getattr(one, name) for one in figures]
        return "given up" if None in values else f"{fmean(values):.3g}"

    return shown


def _share(name: str) -> Callable[[Sequence[Figures]], str]:
    return lambda figures: f"{_mean(name)(figures):.1%}"


def _figures(records: Sequence[Record], limits: Limits) -> list[Figures]:
    """Returns the figures by seed; none if a seed has none: the policy cannot serve the setting, or broke a rule."""
    if any(record.status != OK or broken_rule(record, limits) for record in records):
        return []
    return [figures_in(record) for record in records]


SHOWN: dict[str, Callable[[Sequence[Figures]], str]] = {
    "met": _share("met_ratio"),
    "goodput, 1/s": lambda figures: f"{_mean('goodput')(figures):.3g}",
    "given up": _share("given_up_ratio"),
    "TTFT p95, s": _seconds("ttft_p95_s"),
    "TPOT p50, s": _seconds("tpot_p50_s"),
    "TPOT p95, s": _seconds("tpot_p95_s"),
}
COMPARED = {
    "goodput": (SHOWN["goodput, 1/s"], _mean("goodput")),
    "TTFT p95": (SHOWN["TTFT p95, s"], _rate("ttft_p95_s")),
    "TPOT p95": (SHOWN["TPOT p95, s"], _rate("tpot_p95_s")),
}
"""What policies are compared by: (how it is shown, what is better the higher it is)."""

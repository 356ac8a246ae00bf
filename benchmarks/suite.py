"""`python -m benchmarks suite FOLDER`: makes ``reference.json``, the frozen figures of a suite's reference policies.

It is for a new suite only: figures that were published under a suite's name never change.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from testbed.experiments.provenance import n_cpus
from testbed.studies.score.command import RUNS, run_all
from testbed.studies.score.leaderboard import frozen_text
from testbed.studies.score.marks import Figures, best_of
from testbed.studies.score.measures import figures_in
from testbed.studies.score.running import Limits, broken_rule
from testbed.studies.score.suite import REFERENCE, Reference, read_suite
from testbed.studies.sweep.disk import save_text
from testbed.studies.sweep.pool import Local
from testbed.studies.sweep.runs import OK, Record
from testbed.studies.sweep.store import kept_runs


def run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks suite", description=__doc__)
    parser.add_argument("folder", help="a suite's folder, or a shipped suite's name")
    parser.add_argument("--out", type=Path, help="keeps the runs; those there are not done again")
    parser.add_argument(
        "--page", type=Path, help="run nothing: write the leaderboard from the figures that are there"
    )
    parser.add_argument("--jobs", type=int, default=n_cpus())
    parser.add_argument("--only", nargs="+", help="make the figures of these settings, and keep all others")
    options = parser.parse_args(arguments)
    suite = read_suite(options.folder)
    if options.page is not None:
        save_text(options.page, frozen_text(suite))
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


def _figures(records: Sequence[Record], limits: Limits) -> list[Figures]:
    """Returns the figures by seed; none if a seed has none: the policy cannot serve the setting, or broke a rule."""
    if any(record.status != OK or broken_rule(record, limits) for record in records):
        return []
    return [figures_in(record) for record in records]

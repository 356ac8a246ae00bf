"""What a score measures of a run."""

from __future__ import annotations

import msgspec

from testbed.experiments.slo import Objectives
from testbed.results.slo import n_met
from testbed.simulator.engine import Simulation
from testbed.studies.score.marks import PERCENTILE, Figures, percentile
from testbed.studies.sweep.runs import Measures, Record


def figures_of(simulation: Simulation, objectives: Objectives) -> Measures:
    """Return the figures of a run (``Figures``, by name)."""
    rows = simulation.rows
    done = [row for row in rows if row.is_completed]
    n_given_up = len(rows) - len(done)
    met_ratio = n_met(rows, objectives) / len(rows)
    arrivals_s = [row.arrival_at_s for row in rows]
    ttfts_s = [row.times.ttft_s for row in done if row.times.ttft_s is not None]
    tpots_s = [row.times.tpot_s for row in done if row.times.tpot_s is not None]
    span_s = max(arrivals_s) - min(arrivals_s)
    return msgspec.structs.asdict(
        Figures(
            met_ratio=met_ratio,
            goodput=met_ratio * len(rows) / span_s if span_s else 0.0,
            given_up_ratio=n_given_up / len(rows),
            ttft_p95_s=percentile(ttfts_s, n_given_up, PERCENTILE),
            tpot_p95_s=percentile(tpots_s, n_given_up, PERCENTILE),
            tpot_p50_s=percentile(tpots_s, 0, 0.5),
        )
    )


def figures_in(record: Record) -> Figures:
    """Return the figures of a stored run."""
    return msgspec.convert(record.measures, Figures)

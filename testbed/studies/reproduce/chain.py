"""`testbed reproduce chain`: response times printed in the chain-composition paper (arXiv 2604.14993, Table I)
beside simulated ones, of the shipped study ``chain``. See docs/validation.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

from testbed.errors import UserError
from testbed.experiments.provenance import n_cpus
from testbed.experiments.slo import Objectives
from testbed.results.intervals import mean_of
from testbed.simulator.engine import Simulation
from testbed.studies.sweep.pool import Local, sigterm_as_ctrl_c
from testbed.studies.sweep.progress import with_progress
from testbed.studies.sweep.runs import FAILED, Measures, Run, Runner, lost_record
from testbed.studies.sweep.study import Options, Study, read_study

METRIC = "e2e_s_mean"


def chain_command(runs: int, seed: int, jobs: int | None = None) -> tuple[dict[str, Any], str]:
    """Returns the object for ``--json`` and the text for the terminal: mean response times over seeds.

    The seeds are ``seed`` to ``seed + runs - 1``. ``jobs``: how many workers (None: one per CPU). Raises
    ``UserError`` if ``runs`` is less than 1 or ``seed`` is negative.
    """
    study = read_study("chain", Options(n_runs=runs, seed=seed))
    times_s = _times_s(study, range(seed, seed + runs), jobs or n_cpus())
    rows = []
    for policy in study.policies:
        simulated = []
        for point in study.points:
            found = [times_s[study.run(point, policy, seed + run)] for run in range(runs)]
            mean = mean_of([time_s for time_s in found if time_s is not None])
            simulated.append(
                {
                    "rate": float(point["workload.rate"]),
                    "n_runs": mean.n if mean else 0,
                    "response_s": mean.mean if mean else None,
                    "ci95_s": mean.half_width if mean and math.isfinite(mean.half_width) else None,
                }
            )
        printed_s = study.printed(METRIC, policy, study.points[0])
        rows.append(
            {"name": study.label(policy), "pair": policy, "response_s": printed_s, "simulated": simulated}
        )
    answer = {"scenario": study.target, "runs": runs, "seed": seed, "rows": rows}
    return answer, "\n".join(_lines(answer))


def _times_s(study: Study, seeds: Sequence[int], jobs: int) -> dict[Run, float | None]:
    """Returns the mean time from arrival to the last token of every run, in seconds.

    None if a request failed or the policy found no placement.
    """
    groups = [
        [study.run(point, policy, seed) for seed in seeds]
        for policy in study.policies
        for point in study.points
    ]
    times_s: dict[Run, float | None] = {}
    begin = partial(Runner, measure=_response)
    with sigterm_as_ctrl_c(), closing(Local(jobs).results(begin, study.setup(), groups, lost_record)) as done:
        for run, record in with_progress(done, sum(map(len, groups))):
            if record.status == FAILED:
                raise UserError(record.reason)
            times_s[run] = record.measures.get(METRIC)
    return times_s


def _response(simulation: Simulation, _: Objectives) -> Measures:
    times_s = [row.times.e2e_s for row in simulation.rows if row.times.e2e_s is not None]
    return {
        METRIC: math.fsum(times_s) / len(times_s)
        if times_s and len(times_s) == len(simulation.rows)
        else None
    }


def _lines(answer: dict[str, Any]) -> Sequence[str]:
    runs, rates = answer["runs"], [found["rate"] for found in answer["rows"][0]["simulated"]]
    over = f"means over {runs} runs with 95 % intervals" if runs > 1 else "one run, so without intervals"
    lines = [
        f"{answer['scenario']}: mean response time in seconds, from arrival to the last token; {over}",
        f"{'in the paper':13}{'here':19}{'printed':>9}"
        + "".join(f"{f'at {rate:g}/s':>17}" for rate in rates),
    ]
    for row in answer["rows"]:
        line = f"{row['name']:13}{row['pair']:19}{row['response_s']:9.1f}"
        for found in row["simulated"]:
            text = "no answer" if found["response_s"] is None else f"{found['response_s']:.1f}"
            if found["ci95_s"] is not None:
                text += f" ±{found['ci95_s']:.1f}"
            line += f"{text:>17}"
        lines.append(line)
    lines += [
        "Servers are as the paper models them: sessions need room for their caches and do not slow each other down.",
        "The paper states neither load nor round-trip times nor the servers' speed, so those of the scenario are assumed:",
        "compare the order of the policies, not the times.",
    ]
    return lines

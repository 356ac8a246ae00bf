"""`testbed reproduce chain`: simulates four policies on the paper's servers and model, and prints their
response times beside those of the paper's Table I.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from testbed.errors import UserError
from testbed.results.intervals import mean_of
from testbed.scenario.policy import PolicyChoice
from testbed.simulate.cases import scenario_case
from testbed.simulate.engine import simulate

SCENARIO = "chain-7b"
RATES = (0.5, 1.0, 2.0)
"""Requests per second. There are several, since the paper does not state the load of its Table I."""


class Printed(NamedTuple):
    """A line of Table I: its name there, the pair of policies here, and the mean response time in seconds."""

    name: str
    pair: str
    response_s: float


TABLE_I = (
    Printed("PETALS", "petals", 31.4),
    Printed("BPRR", "proposed", 19.8),
    Printed("JFFC only", "whole-model", 10.0),
    Printed("proposed", "chain-composition", 7.3),
)


def chain_command(runs: int, seed: int, announce: Callable[[str], None]) -> tuple[dict[str, Any], str]:
    """Returns the object for ``--json`` and the text for the terminal: mean response times over seeds.

    The seeds are ``seed`` to ``seed + runs - 1``. Raises ``UserError`` if ``runs`` is less than 1.
    """
    if runs < 1:
        raise UserError(f"--runs must be at least 1, not {runs}")
    if seed < 0:
        raise UserError(f"--seed must not be negative, but is {seed}")
    rows = []
    for printed in TABLE_I:
        simulated = []
        for rate in RATES:
            announce(f"{printed.name} at {rate:g} requests per second")
            means_s = [_response_s(printed.pair, rate, seed + run) for run in range(runs)]
            done_s = [mean_s for mean_s in means_s if mean_s is not None]
            mean = mean_of(done_s)
            simulated.append(
                {
                    "rate": rate,
                    "n_runs": len(done_s),
                    "response_s": mean.mean if mean else None,
                    "ci95_s": mean.half_width if mean and math.isfinite(mean.half_width) else None,
                }
            )
        rows.append({**printed._asdict(), "simulated": simulated})
    answer = {"scenario": SCENARIO, "runs": runs, "seed": seed, "rows": rows}
    return answer, "\n".join(_lines(answer))


def _response_s(pair: str, rate: float, seed: int) -> float | None:
    """Returns the mean time from arrival to the last token in seconds.

    None if a request failed or the policy found no placement.
    """
    # The paper's model: sessions need room for their caches, and do not slow each other down.
    settings = [f"workload.rate={rate}", "compute.batching=none"]
    case = scenario_case(SCENARIO, PolicyChoice(pair), settings, seed)
    times_s = [row.times.e2e_s for row in simulate(case, "testbed").rows]
    return (
        math.fsum(t for t in times_s if t is not None) / len(times_s)
        if times_s and None not in times_s
        else None
    )


def _lines(answer: dict[str, Any]) -> Sequence[str]:
    runs = answer["runs"]
    over = f"means over {runs} runs with 95 % intervals" if runs > 1 else "one run, so without intervals"
    lines = [
        f"{SCENARIO}: mean response time in seconds, from arrival to the last token; {over}",
        f"{'in the paper':13}{'here':19}{'printed':>9}"
        + "".join(f"{f'at {rate:g}/s':>17}" for rate in RATES),
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

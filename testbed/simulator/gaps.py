"""Computes the seconds between two consecutive output tokens of a request, as its client sees them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.problem import decode_step_s
from testbed.simulator.engine import Simulation


def token_gaps_s(simulation: Simulation) -> NDArray[np.float64]:
    """Return an array with the gaps of all requests: one for every token but a request's first.

    A gap includes any waiting between its two tokens. Without disturbances the gaps follow from the closed
    form, where each token takes longer than the one before by the same time, since its context is one token
    longer.
    """
    served = simulation.served
    if served.gaps_s is not None:
        return np.asarray(served.gaps_s, dtype=np.float64)
    problem = simulation.case.experiment.problem
    found = []
    for r in served.outcomes:
        if r.time_s is None or r.route is None:
            continue
        n_input, n_gaps = r.plan.n_input_tokens, r.plan.n_output_tokens - 1
        first_s, second_s = (
            decode_step_s(problem, r.plan.served, r.route.hops, n_cached)
            for n_cached in (n_input, n_input + 1)
        )
        found.append(first_s + (second_s - first_s) * np.arange(n_gaps))
    return np.concatenate(found) if found else np.zeros(0)

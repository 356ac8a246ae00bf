"""Computes the seconds between two consecutive output tokens of a request, as its client sees them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.problem import Hop, RequestSpec
from testbed.simulator.engine import Simulation
from testbed.simulator.hops import chain_delays, token_parts


def token_gaps_s(simulation: Simulation) -> NDArray[np.float64]:
    """Return an array with the gaps of all requests: one for every token but a request's first.

    A gap includes any waiting between its two tokens. Where nobody waits, it is a token's hops in closed form, which
    requests of as long a prompt on the same chain share.
    """
    served = simulation.served
    if served.gaps_s is not None:
        return np.asarray(served.gaps_s, dtype=np.float64)
    experiment, delays_of = simulation.case.experiment, chain_delays(simulation)
    done = [(r.plan.served, r.route.hops) for r in served.outcomes if r.time_s is not None and r.route]
    longest: dict[tuple[int, int, tuple[Hop, ...]], RequestSpec] = {}
    for request, hops in done:
        kind = request.client, request.n_input_tokens, hops
        if kind not in longest or longest[kind].n_output_tokens < request.n_output_tokens:
            longest[kind] = request
    known = {}
    for (client, n_input, hops), request in longest.items():
        up_s, down_s, computes_s = token_parts(experiment, request, hops, delays_of)
        gaps_s = (up_s[1] + down_s[1] + computes_s[1:]).sum(axis=1) + experiment.problem.hub_s(client)
        known[client, n_input, hops] = gaps_s
    found = [
        known[request.client, request.n_input_tokens, hops][: request.n_output_tokens - 1]
        for request, hops in done
    ]
    return np.concatenate(found) if found else np.zeros(0)

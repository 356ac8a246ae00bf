"""A large problem for the simulator: BLOOM-176B on A100 and MIG servers at random places, with one client."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from policies.interfaces import session_setup_of
from policies.problem import Problem
from policies.registry import resolve_placement
from policies.workload import RequestPlan
from testbed.experiments.compute_tables import CalibrationTable
from testbed.experiments.profiles import (
    HardwareShelf,
    named_model,
    resolve_calibration,
    resolve_model,
    server_spec,
)
from testbed.experiments.roofline import block_of

RATE_PER_SERVER_RPS = 0.1 / 9
"""Arrivals per second and server, as in the paper's sweep of servers and rate together."""

_CALIBRATION = "petals-scattered"
_A100_EVERY = 5
_N_INPUT_TOKENS, _N_OUTPUT_TOKENS = 20, 128
_STEP_S = 1e-5
_NEAREST_STEPS, _PLANE_STEPS = 500, 7000
"""The RTT of two places is 5 ms plus 70 ms times their distance on the unit square, in steps of ``_STEP_S``
(10 us).
"""


def large_problem(n_servers: int, seed: int) -> Problem:
    """Returns a problem of 70 blocks. Every fifth server is an A100 (86.13 GB), the others are MIG slices
    (9.1 GB).

    Hardware and overheads are those of the paper's sweeps. ``request_rate`` is proportional to the number of
    servers.
    """
    rng = np.random.default_rng([seed, 0])
    table = named_model("bloom-176b")
    _, model = resolve_model(table)
    _, added = resolve_calibration(CalibrationTable(set=_CALIBRATION), "proposed")
    shelf = HardwareShelf({}, _CALIBRATION, block_of(table))
    profiles = {name: shelf.get(name, ("hardware",)) for name in ("a100-sweep", "mig-1g-sweep")}
    kinds = ["a100-sweep" if j % _A100_EVERY == 0 else "mig-1g-sweep" for j in range(n_servers)]
    places = rng.random((n_servers + 1, 2))
    # Row by row: all rows at once need several times the memory of the result. Equal times share one float.
    time_s = [step * _STEP_S for step in range(_NEAREST_STEPS + 2 * _PLANE_STEPS)]
    rows = []
    for row, place in enumerate(places):
        steps = _NEAREST_STEPS + np.rint(_PLANE_STEPS * np.hypot(*(place - places).T)).astype(np.int32)
        steps[row] = 0
        rows.append(tuple(time_s[step] for step in steps[1:].tolist()))
    lengths = (_N_INPUT_TOKENS, _N_OUTPUT_TOKENS)
    return Problem(
        model=model,
        servers=tuple(
            server_spec(f"{k}-{j}", k, profiles[k], None, lengths, model.token_bytes)
            for j, k in enumerate(kinds)
        ),
        clients=("client",),
        raw_rtt_s=(rows[0],),
        token_rtt_s=(tuple(t + added.token_overhead_s for t in rows[0]),),
        input_rtt_base_s=(tuple(t + added.input_overhead_base_s for t in rows[0]),),
        input_rtt_slope_s=((added.input_overhead_slope_s,) * n_servers,),
        server_rtt_s=tuple(rows[1:]),
        n_input_tokens=_N_INPUT_TOKENS,
        n_output_tokens=_N_OUTPUT_TOKENS,
        request_rate=RATE_PER_SERVER_RPS * n_servers,
        join_order=tuple(rng.permutation(n_servers).tolist()),
        initial_delay_s=added.initial_delay_s,
    )


def poisson_requests(problem: Problem, n_requests: int, seed: int) -> list[RequestPlan]:
    """Returns requests with Poisson arrivals at the problem's rate, all with the problem's lengths."""
    gaps_s = np.random.default_rng([seed, 1]).exponential(1 / problem.request_rate, n_requests)
    return [
        RequestPlan(i, 0, at_s, problem.n_input_tokens, problem.n_output_tokens)
        for i, at_s in enumerate(accumulate(gaps_s.tolist()))
    ]


def session_setup_s(placement: str) -> float:
    """Returns the session setup (seconds) that the paper's simulator adds to every request under
    ``placement``.
    """
    table = CalibrationTable(set=_CALIBRATION, session_setup=True)
    setup = session_setup_of(resolve_placement(placement))
    return resolve_calibration(table, setup)[1].session_setup_s

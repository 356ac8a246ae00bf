"""A simulated run's hops, token by token, from the closed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.problem import RequestSpec, return_times_s
from testbed.experiment import Experiment
from testbed.results.model import HopTable, hub_times_s
from testbed.simulation.engine import SimulatedRequest, Simulation
from testbed.simulation.network import ChangingNetwork, busy_s, way_times_s
from testbed.simulation.record import STEP_COLUMNS, Record


def hop_table(simulation: Simulation) -> HopTable:
    """A row per completed request's token and hop, from the closed form; the model's columns are the same.

    Of a run with faults the rows are its own steps, those of failed requests too.

    Compute holds k tau or k tau^I, what a step costs once and what the calibration adds; network the rest of
    the hop's time. What the client computes comes after a token's last hop.
    """
    experiment = simulation.case.experiment
    if simulation.record is not None:
        columns = _recorded(experiment, simulation.record).T
    else:
        network = ChangingNetwork(experiment, loses_nothing=True) if experiment.changes else None
        parts = [
            _hop_rows(experiment, network, r) for r in simulation.requests if r.time_s is not None and r.hops
        ]
        columns = np.concatenate(parts).T if parts else np.zeros((12, 0))
        columns = np.vstack((columns, np.zeros(columns.shape[1])))
    whole = columns[:6].astype(np.int64)
    sent_at_s, arrived_at_s, departed_at_s, received_at_s = columns[6:10]
    none_s = np.zeros(columns.shape[1])
    request, token, hop, server, first, last = whole
    hub_s = hub_times_s(experiment, last)
    return HopTable(
        request=request,
        token=token,
        hop=hop,
        server=server,
        first=first,
        last=last,
        sent_at_s=sent_at_s,
        arrived_at_s=arrived_at_s,
        departed_at_s=departed_at_s,
        received_at_s=received_at_s,
        up_bytes=columns[10].astype(np.int64),
        down_bytes=columns[11].astype(np.int64),
        replayed_tokens=columns[12].astype(np.int64),
        client_s=none_s,
        tail_s=hub_s,
        model_network_s=(arrived_at_s - sent_at_s) + (received_at_s - departed_at_s),
        model_link_queue_s=none_s,
        model_compute_s=departed_at_s - arrived_at_s,
        model_client_s=hub_s,
    )


def _recorded(experiment: Experiment, record: Record) -> Any:
    """The steps of a run with faults, by request, with what the calibration adds moved to the server."""
    rows = np.array(record.steps).reshape(-1, STEP_COLUMNS)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    calibration, n_tokens = experiment.calibration, rows[:, 10] / experiment.problem.model.token_bytes
    is_prompt = (rows[:, 1] == 0) | (rows[:, 12] > 0)
    inputs_s = calibration.input_overhead_base_s + calibration.input_overhead_slope_s * n_tokens
    added_s = np.where(is_prompt, inputs_s, calibration.token_overhead_s)
    rows[:, 6:10] += np.outer(added_s / 2, (0, -1, 1, 0))
    return rows


def _hop_rows(experiment: Experiment, network: ChangingNetwork | None, r: SimulatedRequest) -> Any:
    """Array (tokens x hops, 12): request, token, hop, server, first, last, four instants, bytes each way."""
    plan, calibration = r.plan, experiment.calibration
    n_hops, n_out = len(r.hops), plan.n_output_tokens
    network_s, compute_s = _parts(experiment, r)
    token_bytes = experiment.problem.model.token_bytes
    rows = np.zeros((n_out, n_hops, 12))
    rows[:, :, 0] = plan.index
    rows[:, :, 1] = np.arange(n_out)[:, None]
    rows[:, :, 2] = np.arange(n_hops)
    rows[:, :, 3:6] = np.array([tuple(hop) for hop in r.hops])
    later = (np.arange(n_out) > 0).astype(int)
    computes_s = compute_s[later] + np.outer(np.maximum(np.arange(n_out) - 1, 0), _context_s(experiment, r))
    times_s = network_s[later] + computes_s
    began_at_s = plan.arrival_at_s + r.waiting_s + r.setup_s
    ends_at_s = began_at_s + np.cumsum(times_s.reshape(-1)).reshape(n_out, n_hops)
    ends_at_s += np.arange(n_out)[:, None] * experiment.problem.hub_token_s  # after every token before
    rows[:, :, 6] = ends_at_s - times_s
    rows[:, :, 7] = rows[:, :, 6] + network_s[later] / 2
    rows[:, :, 8] = rows[:, :, 7] + computes_s
    rows[:, :, 9] = ends_at_s
    rows[:, :, 10:12] = token_bytes
    rows[0, :, 10:12] = token_bytes * plan.n_input_tokens
    if network is not None:
        request = RequestSpec(plan.client, plan.n_input_tokens, n_out)
        steps = np.array(list(network.steps(request, r.hops, began_at_s)))
        # What the calibration adds is half of it in either way there, and belongs to the server here.
        half_s = np.where(
            later, calibration.token_overhead_s, calibration.input_overhead_s(plan.n_input_tokens)
        )
        added_s = np.repeat(half_s / 2, n_hops)
        rows[:, :, 6:10] = (steps + np.outer(added_s, (0, -1, 1, 0))).reshape(n_out, n_hops, 4)
    return rows.reshape(-1, 12)


def _context_s(experiment: Experiment, r: SimulatedRequest) -> Any:
    """How much longer every token after the second computes than the one before; array (hops,)."""
    servers = experiment.problem.servers
    return np.array([hop.n_blocks * servers[hop.server].context_slope_s for hop in r.hops])


def _parts(experiment: Experiment, r: SimulatedRequest) -> tuple[Any, Any]:
    """Network and compute seconds, arrays (2, hops): of the prompt, of the second token."""
    problem, plan, calibration = experiment.problem, r.plan, experiment.calibration
    request = RequestSpec(plan.client, plan.n_input_tokens, plan.n_output_tokens)
    network_s, compute_s = np.zeros((2, len(r.hops))), np.zeros((2, len(r.hops)))
    steps = ((0, plan.n_input_tokens), (plan.n_input_tokens, 1))
    previous: int | None = None
    for i, hop in enumerate(r.hops):
        input_s, token_s = way_times_s(problem, request, previous, hop.server)
        added_s = (calibration.input_overhead_s(plan.n_input_tokens), calibration.token_overhead_s)
        for row, (all_s, more_s) in enumerate(zip((input_s, token_s), added_s, strict=True)):
            compute_s[row, i] = busy_s(problem, hop, *steps[row]) + more_s
            network_s[row, i] = all_s - more_s
        previous = hop.server
    network_s[:, -1] += return_times_s(problem, request, r.hops[-1].server)
    return network_s, compute_s

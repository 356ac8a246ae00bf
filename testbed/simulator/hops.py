"""Makes the hop table of the fast and the reference engine, token by token, from the closed form."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from policies.problem import Hop, RequestSpec
from testbed.experiments.experiment import Experiment
from testbed.fast.delays import ChainDelays, delays_of
from testbed.fast.idle import closed_delays
from testbed.fast.outcome import SimulatedRequest
from testbed.fast.steps import COLUMNS
from testbed.records.links import LinksUsed
from testbed.results.hop_table import HopTable
from testbed.results.links import on_links, use_by_hops
from testbed.results.model import hub_times_s
from testbed.simulator.engine import FAST, Simulation

DelaysOf = Callable[[RequestSpec, Sequence[Hop]], ChainDelays]


def hop_table(simulation: Simulation) -> HopTable:
    """Return a table with a row per token and hop of each completed request; the model's columns are equal.

    Compute time is k tau or k tau^I (k blocks), the fixed time of a step, and the calibration's overheads.
    Network time is the rest of the hop. The client computes after a token's last hop.
    """
    experiment = simulation.case.experiment
    if (steps := simulation.served.steps) is not None:
        table, clients = _as_stepped(experiment, steps)
        if simulation.served.links is not None:
            changes = experiment.network.changes
            for _, on_link in on_links(experiment, table, clients, changes):
                table.model_link_queue_s[on_link.row] += on_link.wait_s.clip(0.0)
        return table
    delays = chain_delays(simulation)
    parts = [_hop_rows(experiment, r, delays) for r in simulation.served.outcomes if r.time_s is not None]
    columns = np.concatenate(parts).T if parts else np.zeros((12, 0))
    whole = columns[:6].astype(np.int64)
    sent_at_s, arrived_at_s, departed_at_s, received_at_s = columns[6:10]
    none_s = np.zeros(columns.shape[1])
    request, token, hop, server, first, last = whole
    hub_s = hub_times_s(experiment, _clients(experiment, request), last)
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
        replayed_tokens=none_s.astype(np.int64),
        client_s=none_s,
        tail_s=hub_s,
        model_network_s=(arrived_at_s - sent_at_s) + (received_at_s - departed_at_s),
        model_link_queue_s=none_s,
        model_compute_s=departed_at_s - arrived_at_s,
        model_client_s=hub_s,
    )


def links_over_time(simulation: Simulation, hops: HopTable | None) -> LinksUsed | None:
    """Return the use of links over time; ``None``: the engine has none of it. ``hops``: the rows of hops, if they are kept.

    In closed form nothing was sent, and the rows say when messages were on links. Without them the use is spread over
    each request's time.
    """
    served, experiment = simulation.served, simulation.case.experiment
    if served.links is None or served.n_steps is not None or hops is None:
        return served.links
    until_s = max((row.ended_at_s or 0.0 for row in simulation.rows), default=0.0)
    clients, changes = _clients(experiment, hops.request), experiment.network.changes
    return use_by_hops(experiment, hops, clients, changes, until_s, shares_links=True)


def chain_delays(simulation: Simulation) -> DelaysOf:
    """Return the delays of chains with which the closed form served, as a function of (request, chain)."""
    experiment = simulation.case.experiment
    return closed_delays(experiment) if simulation.engine == FAST else partial(delays_of, experiment)


def _clients(experiment: Experiment, requests: Any) -> Any:
    """Return the number of the client of each of ``requests``."""
    plans = sorted((plan.index, plan.client) for plan in experiment.workload.requests)
    indices, clients = np.array(plans, dtype=np.int64).reshape(-1, 2).T
    return clients[np.searchsorted(indices, requests)]


def _as_stepped(experiment: Experiment, steps: array[float]) -> tuple[HopTable, Any]:
    """Return the rows of ``testbed.fast.steps``, ordered by request, token and hop, and the number of each row's client."""
    rows = np.frombuffer(steps, dtype=np.float64).reshape(-1, len(COLUMNS))
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    columns: dict[str, Any] = {
        name: column if name.endswith("_s") else column.astype(np.int64)
        for name, column in zip(COLUMNS, rows.T, strict=True)
    }
    none_s = np.zeros(len(rows))
    clients = _clients(experiment, columns["request"])
    hub_s = hub_times_s(experiment, clients, columns["last"])
    ends_token = np.append(columns["hop"][1:] == 0, True)[: len(rows)]
    table = HopTable(
        **columns,
        tail_s=np.where(ends_token, hub_s, 0.0),
        model_network_s=none_s,
        model_link_queue_s=none_s.copy(),
        model_compute_s=none_s,
        model_client_s=hub_s,
    )
    table.model_network_s, table.model_compute_s = table.network_s, table.compute_s
    return table, clients


def _hop_rows(experiment: Experiment, r: SimulatedRequest, delays_of: DelaysOf) -> Any:
    """Return (tokens x hops, 12): request, token, hop, server, first, last, four instants, bytes each way."""
    assert r.route is not None and r.setup_s is not None and r.ttft_s is not None
    plan, hops = r.plan, r.route.hops
    n_hops, n_out = len(hops), plan.n_output_tokens
    up_s, down_s, computes_s = token_parts(experiment, plan.served, hops, delays_of)
    token_bytes = experiment.problem.model.token_bytes
    rows = np.zeros((n_out, n_hops, 12))
    rows[:, :, 0] = plan.index
    rows[:, :, 1] = np.arange(n_out)[:, None]
    rows[:, :, 2] = np.arange(n_hops)
    rows[:, :, 3:6] = np.array([tuple(hop) for hop in hops])
    later = (np.arange(n_out) > 0).astype(int)
    ups_s, hub_s = up_s[later], experiment.problem.hub_s(plan.client)
    # The prompt may leave a little later, behind the acknowledgement of the opening's answer.
    ups_s[0, 0] += r.ttft_s - r.waiting_s - r.setup_s - hub_s - (ups_s + computes_s + down_s[later])[0].sum()
    times_s = ups_s + computes_s + down_s[later]
    began_at_s = plan.arrival_at_s + r.waiting_s + r.setup_s
    ends_at_s = began_at_s + np.cumsum(times_s.reshape(-1)).reshape(n_out, n_hops)
    ends_at_s += np.arange(n_out)[:, None] * hub_s  # after every token before
    rows[:, :, 6] = ends_at_s - times_s
    rows[:, :, 7] = rows[:, :, 6] + ups_s
    rows[:, :, 8] = rows[:, :, 7] + computes_s
    rows[:, :, 9] = ends_at_s
    rows[:, :, 10:12] = token_bytes
    rows[0, :, 10:12] = token_bytes * plan.n_input_tokens
    if experiment.problem.forwarding:
        rows[:, :-1, 11] = 0  # sent on to the next server
    return rows.reshape(-1, 12)


def token_parts(
    experiment: Experiment, request: RequestSpec, hops: Sequence[Hop], delays_of: DelaysOf
) -> tuple[Any, Any, Any]:
    """Return seconds up and down, arrays (2, hops) for the prompt and for later tokens, and computing.

    The last is an array (tokens, hops).
    """
    problem, n_input, n_out = experiment.problem, request.n_input_tokens, request.n_output_tokens
    delays = np.array(delays_of(request, hops))
    computes_s = np.zeros((n_out, len(hops)))
    cached = n_input + np.arange(n_out - 1)
    for i, hop in enumerate(hops):
        server = problem.servers[hop.server]
        computes_s[:, i] = server.step_base_s
        computes_s[0, i] += server.prefill_of_s(n_input, hop.blocks) + delays[0, i, 2]
        for law, n in server.kinds(hop.blocks):
            attended = np.minimum(cached, law.window_tokens) if law.window_tokens else cached
            decode_s = law.decode_s + law.context_slope_s * (attended - law.decode_context_tokens)
            computes_s[1:, i] += n * decode_s
        computes_s[1:, i] += delays[1, i, 2]
    return delays[:, :, 0], delays[:, :, 1], computes_s

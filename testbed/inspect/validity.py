"""``testbed validate``: checks a scenario and its placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from testbed.control.placing import load_to_run, place_experiment
from testbed.experiments import Override, changed, load_experiment
from testbed.experiments.assumed import assumed_batching
from testbed.experiments.experiment import Experiment
from testbed.experiments.hours import hours_in_words
from testbed.experiments.shared_links import own_links_in_words
from testbed.experiments.units import counted
from testbed.fast.rehearsal import rehearsal
from testbed.runs.session import check_online
from testbed.runtime.blocks import blocks_missing, check_model
from testbed.runtime.gpus import missing_gpu, shared_out
from testbed.runtime.wiring import check_frames, check_rates
from testbed.simulator.cases import Case
from testbed.simulator.engine import TESTBED, simulate

_COMPARED = 50
"""Requests of the quick comparison of ways to batch."""


def validate_command(scenario: str, changes: Sequence[Override]) -> tuple[dict[str, Any], str]:
    """Check ``scenario`` with ``changes``; returns the object for ``--json`` and the text for the terminal.

    The code of policies that the file names as ``module:Class`` is not run, and the placement is not checked
    then. Raises ``UserError``.
    """
    experiment = load_experiment(scenario, changes)
    not_loaded = experiment.policy.code_in_file
    if experiment.policy.unread and not not_loaded:
        experiment = load_to_run(scenario, changes)
    check_frames(experiment)
    check_rates(experiment)
    if blocks_missing() is None:
        check_model(experiment)
    missing = missing_gpu(experiment)
    own = [row for row in experiment.network.sites if row.has_links]
    remarks = (
        [f"sites' own links: {'; '.join(f'{row.name} {own_links_in_words(row)}' for row in own)}"]
        if own
        else []
    )
    remarks += [missing] if missing else []
    if (assumed := assumed_batching(experiment)) is not None:
        assumed = f"{assumed}; {_in_batches(experiment)}"
        remarks.append(assumed)
    blocks = shared_out(experiment, remarks.append)
    placement = None
    if not not_loaded:
        placement = place_experiment(experiment, rehearsal).placement
        check_online(experiment, placement)
    remarks += hours_in_words(experiment, placement)
    n_servers, n_clients = experiment.problem.n_servers, len(experiment.problem.clients)
    n_requests = len(experiment.workload.requests)
    answer: dict[str, Any] = {
        "valid": True,
        "name": experiment.name,
        "n_servers": n_servers,
        "n_clients": n_clients,
        "n_requests": n_requests,
        "design_concurrency": placement and placement.design_concurrency,
        "sites": [{"name": row.name, "up_bps": row.up, "down_bps": row.down} for row in own],
        "not_loaded": list(not_loaded),
        "missing_gpu": missing,
        "assumed_batching": assumed,
        "away_at_the_beginning": [
            experiment.problem.servers[j].name for j in sorted(experiment.faults.absent)
        ],
        "devices": blocks and [blocks.device_of(n) for n in range(n_servers)],
    }
    if placement is None:
        placed = f"placement not checked: {', '.join(not_loaded)} in the file would run code"
    else:
        placed = f"{placement.policy} places all blocks"
        if placement.design_concurrency:
            placed += f" for |R| = {placement.design_concurrency}"
    counts = (
        f"{counted(n_servers, 'servers')}, {counted(n_clients, 'clients')}, {counted(n_requests, 'requests')}"
    )
    return answer, "\n".join([f"{experiment.name}: valid; {counts}; {placed}", *remarks])


def _in_batches(experiment: Experiment) -> str:
    """Return in words what sharing steps would change for the first requests, by a quick simulation."""
    if not all(server.session_slope_s or server.experts_s for server in experiment.problem.servers):
        return (
            "what sharing steps would cost is unknown, since not all hardware has a session_slope "
            '(compute.batching = "serial" is the other extreme)'
        )
    if (
        experiment.faults.planned
        or experiment.faults.absent
        or experiment.network.changes
        or experiment.policy.code_in_file
        or experiment.policy.online
    ):
        return 'state it, or compare with compute.batching = "continuous"'
    requests = experiment.workload.requests[:_COMPARED]
    times_s = []
    for each in (experiment, changed(experiment, {"compute.batching": "continuous"})):
        few = replace(each, workload=replace(each.workload, requests=requests))
        rows = simulate(Case(few), TESTBED).rows
        done = [row.times.tpot_s for row in rows if row.times.tpot_s is not None]
        if not done:
            return 'state it, or compare with compute.batching = "continuous"'
        times_s.append(sum(done) / len(done))
    alone_ms, shared_ms = (1e3 * time_s for time_s in times_s)
    return (
        f'with "continuous", the first {counted(len(requests), "requests")} would have '
        f"{shared_ms:.4g} ms per token after the first in place of {alone_ms:.4g} ms"
    )

"""Makes the summary of a simulated run, which has what every run's has."""

from __future__ import annotations

from collections.abc import Sequence

from testbed.codeversion import code_version
from testbed.experiments.slo import Objectives
from testbed.records.events import Moved, Replayed
from testbed.records.plan import REFERENCE
from testbed.records.requests import RequestRow
from testbed.records.summary import SIMULATION, Decision, RunSummary, WithoutSetup
from testbed.results.costs import ENERGY, costs_given, costs_of
from testbed.results.failures import add_faults, add_recoveries
from testbed.results.requests import stats, values_of
from testbed.results.summary import common_summary
from testbed.simulator.engine import MAX_STEPS, Simulation
from testbed.simulator.gaps import token_gaps_s
from testbed.simulator.hops import hop_table
from testbed.simulator.rows import add_unqueued


def n_hop_rows(simulation: Simulation) -> int:
    """Return how many rows the table of hops has, or would have; with more than ``MAX_STEPS`` it is not made."""
    if simulation.served.n_steps is not None:
        return simulation.served.n_steps
    done = (r for r in simulation.served.outcomes if r.time_s is not None and r.route is not None)
    return sum(len(r.route.hops) * r.plan.n_output_tokens for r in done if r.route is not None)


def whole_rows(simulation: Simulation) -> Sequence[RequestRow]:
    """Return the simulation's rows with their ``unqueued`` metrics, which are computed only here."""
    if simulation.served.rows is None:
        add_unqueued(
            simulation.case.experiment,
            simulation.served.outcomes,
            simulation.rows,
            is_reference=simulation.mode == REFERENCE,
        )
    return simulation.rows


def summarize_simulation(
    simulation: Simulation, objectives: Objectives, without_setup: Simulation | None = None
) -> RunSummary:
    """Return the summary of a feasible simulation; adds the ``unqueued`` metrics to its rows.

    ``without_setup``: the same case without the calibration's session setup, if it has one. A run of the system itself
    has its summary already, with the objectives of its experiment.
    """
    experiment, served = simulation.case.experiment, simulation.served
    if served.summary is not None:
        return served.summary
    rows = whole_rows(simulation)
    summary = common_summary(SIMULATION, experiment, simulation.plan, rows, objectives)
    summary.code, summary.mode = code_version(), simulation.mode
    summary.clock_why = f"engine {simulation.engine}: {simulation.why}"
    summary.metrics["token_gap_s"] = summary.model["token_gap_s"] = stats(token_gaps_s(simulation))
    summary.decision = Decision(placement_s=simulation.placement_s, routing_s=stats(served.routing_s))
    summary.moves = list(served.moves)
    if simulation.links is not None:
        summary.links = list(simulation.links)
    if served.moves or served.faults:  # the blocks that servers held are not those of the plan
        summary.unused_blocks = None
    add_faults(summary, served.faults, len(experiment.faults.planned))
    add_recoveries(summary, [event for event in served.faults if isinstance(event, Replayed)])
    summary.moves += [
        event.row(simulation.plan.servers) for event in served.faults if isinstance(event, Moved)
    ]
    summary.n_hop_rows = n_hop_rows(simulation)
    for name, value in simulated_costs(simulation).items():
        setattr(summary, name, value)
    summary.hops_left_out = summary.n_hop_rows > MAX_STEPS
    if without_setup is not None:
        summary.without_session_setup = _simulated_without_setup(without_setup.rows)
    return summary


def simulated_costs(simulation: Simulation) -> dict[str, float | None]:
    """Return what the simulation's tokens cost, by name; empty if the scenario gives no prices or powers."""
    experiment = simulation.case.experiment
    names = costs_given(experiment)
    if (summary := simulation.served.summary) is not None:
        return {name: summary.get(name) for name in names}
    is_known = ENERGY in names and n_hop_rows(simulation) <= MAX_STEPS
    return costs_of(experiment, simulation.rows, hop_table(simulation) if is_known else None)


def _simulated_without_setup(rows: Sequence[RequestRow]) -> WithoutSetup:
    return WithoutSetup(**{name: stats(values_of(rows, name)) for name in ("ttft_s", "e2e_s", "per_token_s")})

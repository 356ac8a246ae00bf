"""Makes a row per request from the outcomes of the engines fast and reference."""

from __future__ import annotations

from collections.abc import Sequence

from policies.problem import Problem
from testbed.experiments.experiment import Experiment
from testbed.fast.outcome import Rounds, SimulatedRequest
from testbed.records.requests import RequestRow, Times, chain_text
from testbed.results.model import model_setup_s
from testbed.results.requests import unqueued, with_names


def outcome_rows(problem: Problem, outcomes: Sequence[SimulatedRequest]) -> list[RequestRow]:
    """Return the rows of ``outcomes``, with the names of the problem's clients and servers; ``add_unqueued`` adds the metrics of requests that are alone.

    The model's metrics are equal to the simulated ones. ``decision_s`` and ``asked_s`` are None: they are real time,
    but the tables of one seed must be the same bytes.
    """
    servers = [server.name for server in problem.servers]
    rows = []
    for r in outcomes:
        plan, hops = r.plan, () if r.route is None else r.route.hops
        times = Times()
        if r.route is not None:
            times = Times.of(r.waiting_s, r.setup_s or 0.0, r.ttft_s, r.time_s, plan.n_output_tokens)
        rounds = None if problem.decoding is None else r.rounds or Rounds()
        rows.append(
            RequestRow(
                request=plan.index,
                client=problem.clients[plan.client],
                status=r.status,
                reason=with_names(r.reason, servers),
                arrival_at_s=plan.arrival_at_s,
                arrived_at_s=plan.arrival_at_s,
                ended_at_s=plan.arrival_at_s + r.ended_s,
                n_input_tokens=plan.n_input_tokens,
                n_output_tokens=plan.n_output_tokens,
                max_new_tokens=plan.known.n_output_tokens,
                n_tokens_done=r.n_done if r.time_s is None else plan.n_output_tokens,
                n_rejections=r.n_rejections,
                n_cached_tokens=r.n_cached_tokens,
                n_recoveries=r.n_replays,
                n_preemptions=r.n_preemptions,
                preempted_tokens=r.preempted_tokens,
                preempted_s=r.preempted_s,
                schedule_lag_s=0.0,
                n_rounds=None if rounds is None else len(rounds.made),
                n_drafted=None if rounds is None else rounds.n_drafted,
                n_accepted=None if rounds is None else rounds.seen.n_accepted,
                wait_expected_s=r.wait_expected_s,
                wsrr_cost_s=r.cost_s,
                chain=chain_text(hops),
                times=times,
                model=times,
                conversation=None if plan.turn is None else plan.turn.conversation,
                turn=None if plan.turn is None else plan.turn.number,
            )
        )
    return rows


def add_unqueued(
    experiment: Experiment,
    outcomes: Sequence[SimulatedRequest],
    rows: Sequence[RequestRow],
    *,
    is_reference: bool,
) -> None:
    """Add the paper's closed form of each request alone to the ``rows`` of ``outcomes``."""
    for r, row in zip(outcomes, rows, strict=True):
        if r.route is not None and r.ttft_s is not None and r.setup_s is not None:
            request, hops, is_whole = r.plan.served, r.route.hops, r.time_s is not None
            setup_s = model_setup_s(experiment, row.client, hops, is_reference=is_reference)
            row.unqueued = unqueued(experiment, request, hops, setup_s, has_completed=is_whole)

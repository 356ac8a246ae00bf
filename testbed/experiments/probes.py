"""Experiments that differ only in what no policy can know: to find those that know it, and for rehearsals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from policies.workload import RequestPlan
from testbed.experiments.experiment import Experiment, FaultsPart, LinkPlans

_NO_SEED = -1
"""The seed of no run."""


def with_outputs_of_others(experiment: Experiment) -> Experiment:
    """Return an experiment whose requests have each other's output lengths, where these are hidden.

    Its tables are those of ``experiment``: nothing of it may be saved.
    """
    requests = list(experiment.workload.requests)
    hidden = [i for i, one in enumerate(requests) if one.max_new_tokens is not None and one.turn is None]
    for i, other in zip(hidden, [*hidden[1:], *hidden[:1]], strict=True):
        n_output_tokens = experiment.workload.requests[other].n_output_tokens
        requests[i] = replace(requests[i], n_output_tokens=n_output_tokens)
    return replace(experiment, workload=replace(experiment.workload, requests=tuple(requests)))


def without_the_unknown(experiment: Experiment) -> Experiment:
    """Return an experiment without what no policy can know before it happens, and without its requests.

    These are its faults, its changes of links, and what its seed draws: the order in which servers join, which drafts are
    right, how clients spread their attempts, and links' jitter and losses. Nothing of it may be saved.
    """
    workload, faults, problem, blocks = (
        experiment.workload,
        experiment.faults,
        experiment.problem,
        experiment.compute.blocks,
    )
    decoding = problem.decoding
    return replace(
        experiment,
        seed=_NO_SEED,
        problem=replace(
            problem, join_order=(), decoding=None if decoding is None else replace(decoding, seed=_NO_SEED)
        ),
        compute=replace(
            experiment.compute, blocks=None if blocks is None else replace(blocks, seed=_NO_SEED)
        ),
        network=replace(experiment.network, changes=(), plans=LinkPlans()),
        policy=replace(experiment.policy, online=None),
        workload=replace(
            workload, requests=(), source="", sample=None, backoff=replace(workload.backoff, seed=_NO_SEED)
        ),
        faults=FaultsPart(recovery=replace(faults.recovery, seed=_NO_SEED), absent=faults.absent),
        machines=(),
        programs=(),
        tables=None,
    )


def with_requests(experiment: Experiment, requests: Sequence[RequestPlan]) -> Experiment:
    """Return an experiment that serves other requests. Nothing of it may be saved."""
    return replace(experiment, workload=replace(experiment.workload, requests=tuple(requests)))

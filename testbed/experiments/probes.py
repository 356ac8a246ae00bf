"""Experiments that differ only in what no policy can know, to find those that know it."""

from __future__ import annotations

from dataclasses import replace

from testbed.experiments.experiment import Experiment


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

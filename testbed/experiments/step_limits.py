"""How long steps may take: the time limits of clients and servers, from the slowest link and server."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from policies.problem import ServerSpec
from policies.rules import RecoveryRules
from policies.workload import longest_tokens
from testbed.experiments.experiment import Experiment

_IDLE_S = 300.0


def longest_request(experiment: Experiment) -> int:
    """Return the tokens, prompt and output, of the longest request that may come."""
    return max(longest_tokens(experiment.workload.requests), experiment.workload.endpoint_tokens, 1)


def token_s(experiment: Experiment) -> float:
    """Return seconds per token of the longest possible step, on the slowest link (both ways) and server."""
    n_tokens = longest_request(experiment)
    step_s = max(_longest_step_s(experiment, server, n_tokens) for server in experiment.problem.servers)
    return (_there_and_back_s(experiment, n_tokens) + step_s) / n_tokens


def _there_and_back_s(experiment: Experiment, n_tokens: int) -> float:
    """Return how long the hidden states of ``n_tokens`` take the slowest link, to a server and back."""
    link = min(experiment.network.links.values(), key=lambda link: link.rate_bps)
    n_bytes = n_tokens * experiment.problem.model.token_bytes
    return 2 * link.transmission_s(n_bytes, experiment.network.mtu)


def _longest_step_s(experiment: Experiment, server: ServerSpec, n_tokens: int) -> float:
    """Return the most that ``server`` takes for a prompt of ``n_tokens``, with all blocks.

    Each chunk of a prompt reads the weights again, and has another session's decode computed with it. The last one,
    which attends to all others, takes longest.
    """
    blocks, chunk = range(experiment.problem.model.n_blocks), experiment.compute.chunk_tokens
    if chunk is None or chunk >= n_tokens:
        return server.step_s(0, n_tokens, blocks)
    return ceil(n_tokens / chunk) * server.batch_s(blocks, [n_tokens], range(n_tokens - chunk, n_tokens))


def idle_s(experiment: Experiment) -> float:
    """Return how long a server keeps a session that sends no step, in scenario seconds.

    It includes the time that all other servers of a chain may need for the longest step, and that this step may wait for the
    prompts of all other requests on the slowest link.
    """
    others_s = len(experiment.problem.servers) * token_s(experiment) * longest_request(experiment)
    ahead_s = _there_and_back_s(experiment, sum(plan.n_input_tokens for plan in experiment.workload.requests))
    prefix = experiment.compute.prefix
    held_s = prefix.hold_s if prefix is not None and prefix.kind == "session" else 0.0
    return _IDLE_S + experiment.calibration.session_setup_s + others_s + ahead_s + held_s


def recovery_of(experiment: Experiment) -> RecoveryRules:
    """Return what clients do about failures, with the time that the slowest hop needs for a token."""
    return replace(experiment.faults.recovery, token_s=token_s(experiment))

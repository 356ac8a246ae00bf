"""The timing stub of each server of an experiment: how long its steps take, and what the calibration adds."""

from __future__ import annotations

from nodes.compute import StubProfile
from testbed.experiments.experiment import Experiment


def transmission_s(experiment: Experiment, client: str, server: str, n_tokens: int) -> float:
    """Return the scenario seconds to transmit ``n_tokens`` hidden states over a hop's links, both ways.

    With forwarding they are sent in one direction only, by a server that is not known here: the client's link
    is used in place of that server's.
    """
    n_bytes = n_tokens * experiment.problem.model.token_bytes
    ways = ((client, server),) if experiment.problem.forwarding else ((client, server), (server, client))
    return sum(
        experiment.network.links[pair].transmission_s(n_bytes, experiment.network.mtu) for pair in ways
    )


def kept_tokens(experiment: Experiment) -> int | None:
    """Return the tokens of a page that servers keep for later sessions; ``None``: they keep none."""
    prefix = experiment.compute.prefix
    return prefix.page_tokens if prefix is not None and prefix.kind == "shared" else None


def stub_profile(experiment: Experiment, server: int) -> StubProfile:
    """Return the stub's times of one server, with the overheads that exceed the links' transmission."""
    spec = experiment.problem.servers[server]
    calibration = experiment.calibration
    token: dict[str, float] = {}
    inputs: dict[str, tuple[float, float]] = {}
    if calibration.has_overheads:
        for client in experiment.problem.clients:
            one = transmission_s(experiment, client, spec.name, 1)
            # Transmission grows by whole segments: the mean slope over 100 tokens is exact to 0.01 %.
            slope = transmission_s(experiment, client, spec.name, 100) / 100
            token[client] = max(0.0, calibration.token_overhead_s - one)
            inputs[client] = (
                calibration.input_overhead_base_s,
                calibration.input_overhead_slope_s - slope,
            )
    return StubProfile(
        token_bytes=experiment.problem.model.token_bytes,
        times=spec,
        token_overhead_s=token,
        input_overhead_s=inputs,
        batching=experiment.compute.batching,
        chunk_tokens=experiment.compute.chunk_tokens,
        kept_tokens=kept_tokens(experiment),
    )

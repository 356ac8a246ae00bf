"""What messages of a chain take where they wait for nothing: their links' delays, and what the calibration adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from policies.problem import Hop, RequestSpec, hop_times_s, return_times_s
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import stub_profile


class HopDelays(NamedTuple):
    """One hop's times on the links there and back, and the calibration's overhead, in seconds."""

    up_s: float
    down_s: float
    added_s: float


class ChainDelays(NamedTuple):
    """The hops' delays for the prompt, and for every further token."""

    prompt: Sequence[HopDelays]
    later: Sequence[HopDelays]


def delays_of(experiment: Experiment, request: RequestSpec, hops: Sequence[Hop]) -> ChainDelays:
    """Returns the delays of a chain by the experiment's problem.

    Hub-spoke: sending takes a part of t_cj in each direction, by the links' rates. Forwarding: a hop's
    delays are those from the server before it, and of the last hop also those back to the client. No message arrives before it was sent.
    """
    problem, calibration = experiment.problem, experiment.calibration
    added_s = calibration.input_overhead_s(request.n_input_tokens), calibration.token_overhead_s
    found: tuple[list[HopDelays], list[HopDelays]] = [], []
    client = problem.clients[request.client]

    def share_up(server: int) -> float:
        name = problem.servers[server].name
        up_bps, down_bps = (
            experiment.network.links[client, name].rate_bps,
            experiment.network.links[name, client].rate_bps,
        )
        return down_bps / (up_bps + down_bps)

    previous: int | None = None
    for hop in hops:
        base_s = problem.servers[hop.server].step_base_s
        for of, hop_s, more_s in zip(
            found, hop_times_s(problem, request, previous, hop.server), added_s, strict=True
        ):
            network_s = hop_s - base_s - more_s
            if problem.forwarding:
                # What the overhead has of the client's link is not spent where the message does not pass that.
                way_s = problem.up_s(request.client, hop.server)
                if previous is not None:
                    way_s = problem.across_s(previous, hop.server)
                less_s = min(more_s, max(0.0, way_s - network_s))
                of.append(HopDelays(network_s + less_s, 0.0, more_s - less_s))
            else:
                sent_s = network_s - problem.raw_rtt_s[request.client][hop.server]
                up_s = problem.up_s(request.client, hop.server) + share_up(hop.server) * sent_s
                of.append(HopDelays(up_s, network_s - up_s, more_s))
        previous = hop.server
    if previous is not None:
        for of, back_s in zip(found, return_times_s(problem, request, previous), strict=True):
            of[-1] = of[-1]._replace(down_s=of[-1].down_s + back_s)
    return ChainDelays(*found)


def overheads_of(experiment: Experiment, request: RequestSpec, hops: Sequence[Hop]) -> ChainDelays:
    """Returns the delays of a chain whose messages go over simulated links: what the calibration adds to these."""
    client = experiment.problem.clients[request.client]
    profiles = [stub_profile(experiment, hop.server) for hop in hops]
    sizes = (0, request.n_input_tokens), (1, 1)
    return ChainDelays(
        *([HopDelays(0.0, 0.0, p.overhead_s(client, *size)) for p in profiles] for size in sizes)
    )

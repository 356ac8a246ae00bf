"""The congestion windows with which the connections of a run begin: those of connections that have carried prompts."""

from __future__ import annotations

from functools import lru_cache

from netem.flows import RECEIVE_WINDOW_BYTES, Flow, Tcp
from netem.forwarder_links import Pipe
from nodes import wire
from policies.links import Link
from policies.workload import longest_prompt
from testbed.experiments.experiment import Experiment
from testbed.fast.events import EventQueue

_LONG_S = 1e6
"""Longer than a connection is warmed."""


def longest_prompt_bytes(experiment: Experiment) -> int:
    """Returns the bytes of the longest prompt's hidden states; of the design's, if no request is known."""
    n_tokens = longest_prompt(experiment.workload.requests) or experiment.problem.n_input_tokens
    return n_tokens * experiment.problem.model.token_bytes


def first_window_bytes(experiment: Experiment) -> int:
    """Returns the congestion window of a connection at time zero: it has carried the longest prompt if it is warm."""
    network = experiment.network
    tcp = Tcp.of(network.tcp, network.mtu)
    return (
        _warmed_bytes(tcp, longest_prompt_bytes(experiment)) if network.tcp.warm else tcp.first_flight_bytes
    )


@lru_cache(64)
def _warmed_bytes(tcp: Tcp, n_bytes: int) -> int:
    """Returns the congestion window of a connection that was warmed with ``n_bytes`` (``nodes.connection.warm``)."""
    queue = EventQueue()
    pipes = [Pipe("warm", -1, Link(0.01, 1e9), repairs=True) for _ in range(2)]
    flow = Flow(queue, queue, pipes[0], pipes[1], tcp, lambda n_bytes, item: None)
    left_bytes = min(n_bytes, 2 * RECEIVE_WINDOW_BYTES)
    while left_bytes > 0:
        flow.put(min(left_bytes, wire.PART_BYTES))
        left_bytes -= wire.PART_BYTES
    queue.at(_LONG_S, queue.stop)
    queue.run()
    flow.room_bytes()
    return flow.window_bytes

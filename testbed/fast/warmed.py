"""The congestion windows with which the connections of a run begin: those of connections that have carried prompts."""

from __future__ import annotations

from functools import lru_cache

from netem.flows import Flow, Tcp
from netem.forwarder_links import Pipe
from nodes import wire
from nodes.connection import WARM_BYTES
from policies.links import Link
from policies.workload import longest_prompt
from testbed.experiments.experiment import Experiment
from testbed.fast.events import EventQueue

_LONG_S = 1e6
"""Longer than a connection is warmed."""
_PING = object()
"""The item of a message that is answered with as many bytes."""


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
    n_left, ping_bytes = -(-min(n_bytes, WARM_BYTES) // wire.PART_BYTES), min(n_bytes, wire.PART_BYTES)

    def ping(*_: object) -> None:
        nonlocal n_left
        if n_left:
            n_left -= 1
            there.put(ping_bytes, _PING)

    there = Flow(
        *(queue, queue, pipes[0], pipes[1], tcp),
        lambda n_bytes, item: back.put(ping_bytes, _PING) if item is _PING else None,
    )
    back = Flow(
        *(queue, queue, pipes[1], pipes[0], tcp), lambda n_bytes, item: ping() if item is _PING else None
    )
    for _ in range(WARM_BYTES // 2 // wire.PART_BYTES):
        ping()
    queue.at(_LONG_S, queue.stop)
    queue.run()
    there.room_bytes()
    return there.window_bytes

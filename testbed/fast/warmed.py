"""The state with which the connections of a run begin: that of connections that have carried prompts."""

from __future__ import annotations

import math
from functools import lru_cache

from netem.flows import Tcp
from netem.spec import draws_name
from nodes import framesizes, wire
from nodes.framesizes import WARM_AT_ONCE_BYTES, WARM_BYTES
from policies.links import Link
from policies.workload import longest_prompt
from testbed.experiments.experiment import Experiment
from testbed.fast.events import EventQueue
from testbed.fast.lazy import LazyPipe
from testbed.fast.lines import Line, LineState

_LONG_S = 1e9
"""Longer than a connection is warmed."""


def longest_prompt_bytes(experiment: Experiment) -> int:
    """Returns the bytes of the longest prompt's hidden states; of the design's, if no request is known."""
    n_tokens = longest_prompt(experiment.workload.requests) or experiment.problem.n_input_tokens
    return n_tokens * experiment.problem.model.token_bytes


def first_states(experiment: Experiment, pair: tuple[str, str]) -> tuple[LineState, LineState]:
    """Returns the states, at time zero, of the lines of a connection from ``pair[0]`` to ``pair[1]``: there, and back.

    If connections are warm, they have carried the longest prompt. What links lost of it has halved their windows.
    """
    network = experiment.network
    tcp = Tcp.of(network.tcp, network.mtu)
    if not network.tcp.warm:
        return LineState(tcp.first_flight_bytes), LineState(tcp.first_flight_bytes)
    ways = []
    for way in (pair, pair[::-1]):
        link = network.links[way]
        loss_ratio = link.loss_ratio if link.loss_ratio < 1 else 0.0
        # Without a name where nothing is drawn, so that pairs with equal links are warmed once.
        draws = f"warming {draws_name(experiment.seed, way)}" if loss_ratio else ""
        ways.append((draws, Link(link.delay_s, link.rate_bps, loss_ratio=loss_ratio)))
    return _warmed(tcp, longest_prompt_bytes(experiment), *ways)


def pings_until_counts_recur() -> int:
    """Returns after how many pings of whole parts, and their answers, both processes have counted as many written bytes again."""
    sizes = framesizes.ping(wire.PART_BYTES).last_bytes, framesizes.out(wire.PART_BYTES).last_bytes
    return math.lcm(*(framesizes.WRITTEN_BYTES // size + 1 for size in sizes))


@lru_cache(1024)
def _warmed(
    tcp: Tcp, n_bytes: int, there: tuple[str, Link], back: tuple[str, Link]
) -> tuple[LineState, LineState]:
    """Returns the states of a connection over two links that was warmed with ``n_bytes`` (``nodes.connection.warm``).

    Each link has the name of its draws before it.
    """
    queue = EventQueue()
    pipes = LazyPipe(queue, *there), LazyPipe(queue, *back)
    answers = Line(queue, pipes[::-1], back[1], tcp, None, None)
    asks = Line(queue, pipes, there[1], tcp, answers, None)
    for line in (asks, answers):
        line.begin(LineState(tcp.first_flight_bytes))
    n_left, payload_bytes = -(-min(n_bytes, WARM_BYTES) // wire.PART_BYTES), min(n_bytes, wire.PART_BYTES)
    ping, answer = framesizes.ping(payload_bytes), framesizes.out(payload_bytes)

    def ask() -> None:
        nonlocal n_left
        if n_left:
            n_left -= 1
            asks.send(ping, answers.send, answer, ask)

    for _ in range(WARM_AT_ONCE_BYTES // wire.PART_BYTES):
        ask()
    queue.at(_LONG_S, queue.stop)
    queue.run()
    return asks.state, answers.state

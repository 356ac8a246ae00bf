"""What makes the connections of a run ones that have carried prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from netem.networks import Network
from netem.spec import Windows
from netem.tcp import windows_of_nodes
from nodes import wire
from nodes.framesizes import WARM_AT_ONCE_BYTES, WARM_BYTES
from policies.links import Pair
from testbed.experiments.experiment import Experiment
from testbed.fast.warmed import first_states, longest_prompt_bytes, pings_until_counts_recur

_AT_ONCE_BYTES = 1024**2
"""Less than half of every window that is given to a connection, so that sending as much does not widen it."""


@dataclass(frozen=True)
class Warming:
    """What is sent over each connection and back before time zero, and what connections begin with."""

    n_bytes: int = 0
    at_once_bytes: int = WARM_AT_ONCE_BYTES
    """What is on its way at once."""
    windows: Windows = field(default_factory=dict)
    """The congestion windows with which the connections of these pairs begin; the others begin with the network's own."""


def warming_by_sending(experiment: Experiment, network: Network) -> Warming:
    """Returns what is sent over connections that begin with the network's own windows: as much as the longest prompt."""
    if not experiment.network.tcp.warm or network.delays_in_client:
        return Warming()
    return Warming(min(longest_prompt_bytes(experiment), WARM_BYTES))


def warming_by_windows(experiment: Experiment, network: Network, pairs: Iterable[Pair]) -> Warming | None:
    """Returns how connections between ``pairs`` get the state that ``warming_by_sending`` leaves, with less being sent.

    They begin with the windows that they end up with. What is still sent fills the receivers' windows, and leaves as many
    bytes counted since a process last looked whether it may write on. ``None`` where that is not less, where the network
    has no such windows to give, or where slow start begins anew after idle time. So it is where links lose packets and the
    network halves windows then, of which more follows than windows. Only for virtual time.
    """
    if experiment.network.loses and network.halves_windows:
        return None
    n_bytes, n_filling = warming_by_sending(experiment, network).n_bytes, network.filling_bytes
    if n_filling is None or experiment.network.tcp.slow_start_after_idle or n_filling >= n_bytes:
        return None
    states = {pair: first_states(experiment, pair) for pair in pairs}
    windows = {pair: (there.window_bytes, back.window_bytes) for pair, (there, back) in states.items()}
    if network.has_namespaces and windows_of_nodes(windows) is None:
        return None

    # So many pings that as many bytes are counted as after those of the whole prompt.
    fewest, most = (-(-n // wire.PART_BYTES) for n in (n_filling, n_bytes))
    n_pings = fewest + (most - fewest) % pings_until_counts_recur()
    return Warming(n_pings * wire.PART_BYTES, _AT_ONCE_BYTES, windows) if n_pings < most else None

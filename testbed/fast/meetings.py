"""Whether messages of a run can wait for each other on links: where they cannot, the closed form is exact."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from netem.flows import Tcp
from netem.tcp import RECEIVE_WINDOW_BYTES
from nodes import framesizes
from policies.problem import Hop
from testbed.experiments.experiment import Experiment
from testbed.fast.warmed import first_states, longest_prompt_bytes


class SessionsMeet(Exception):
    """Two sessions use the same connection, so that their messages can wait for each other."""


def why_links_have_no_closed_form(experiment: Experiment) -> str:
    """Returns the reason why even a session alone does not take the closed form's times; "" if it does."""
    network = experiment.network
    if network.changes:
        return "links change"
    if network.shared_paths:
        return "paths share links"
    if any(
        (link.jitter_s or link.loss_ratio) and experiment.uses(pair) for pair, link in network.links.items()
    ):
        return "links have jitter or loss"
    if experiment.problem.forwarding and not network.tcp.warm:
        return "tokens can follow before the acknowledgements of others, and windows of cold connections are small"
    tcp = Tcp.of(network.tcp, network.mtu)
    n_bytes = _full_bytes(tcp, longest_prompt_bytes(experiment))
    if experiment.problem.forwarding:  # a token may follow before the acknowledgement of the prompt has come
        n_bytes += _full_bytes(tcp, experiment.problem.model.token_bytes)
    if not network.tcp.warm:  # a burst is at most half of the window, and each has an acknowledgement
        n_bytes *= 2
    if not _fits_first_windows(experiment, tcp, n_bytes):
        return "a prompt is more than a connection sends at once"
    return ""


def _full_bytes(tcp: Tcp, n_payload: int) -> int:
    """Returns what hidden states take of TCP's window, which counts full segments. Servers' frames have most of them."""
    size = framesizes.out(n_payload)
    part = _segments(tcp, size.part_head_bytes) + _segments(tcp, size.part_bytes - size.part_head_bytes)
    last = _segments(tcp, size.last_head_bytes) + _segments(tcp, size.last_bytes - size.last_head_bytes)
    return (size.n_parts * part + last) * tcp.mss


def _segments(tcp: Tcp, n_bytes: int) -> int:
    return -(-n_bytes // tcp.mss)


def _fits_first_windows(experiment: Experiment, tcp: Tcp, n_bytes: int) -> bool:
    """Returns whether TCP's window lets ``n_bytes`` in full segments through at once, on all connections of a run."""
    if n_bytes <= tcp.first_flight_bytes:  # warming makes no window smaller
        return True
    is_made_again = bool(experiment.faults.planned or experiment.faults.absent)  # and is cold then
    if n_bytes > RECEIVE_WINDOW_BYTES or experiment.network.tcp.slow_start_after_idle or is_made_again:
        return False
    pairs = (pair for pair in experiment.network.links if experiment.uses(pair))
    return all(n_bytes <= state.window_bytes for pair in pairs for state in first_states(experiment, pair))


def what_meets(experiment: Experiment) -> str:
    """Returns why sessions affect each other on servers, so that their times have no closed form; "" if they do not."""
    if experiment.compute.prefix is not None:
        return "what is computed depends on the caches that are kept"
    if experiment.problem.decoding is not None:
        return "tokens are drafted"
    if experiment.compute.paging is not None:
        return "caches grow"
    return "sessions share steps" if experiment.compute.batching == "continuous" else ""


class Meetings:
    """The connections that sessions use, from the opening to when the last answer to its closing has arrived."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._using: set[tuple[str, str]] = set()
        """Pairs whose links a session uses."""
        self._free_at_s: dict[tuple[str, str], float] = {}
        self._pairs: dict[int, list[tuple[str, str]]] = {}
        self._servers = [server.name for server in experiment.problem.servers]

    def begin(self, session: int, client: int, hops: Sequence[Hop], now_s: float) -> None:
        """Notes that a session is opened now. Raises ``SessionsMeet``."""
        name, servers = self._experiment.problem.clients[client], [self._servers[hop.server] for hop in hops]
        pairs = [(name, server) for server in servers]
        if self._experiment.problem.forwarding:
            pairs += [(min(pair), max(pair)) for pair in pairwise(servers)]
        for pair in pairs:
            if pair in self._using or self._free_at_s.get(pair, 0.0) > now_s:
                raise SessionsMeet(f"sessions can meet on links, as on that from {pair[0]} to {pair[1]}")
            self._using.add(pair)
        self._pairs[session] = pairs

    def end(self, session: int, now_s: float) -> None:
        """Notes that a session's last closings are sent now, or have been answered. It may have no chain."""
        links, mtu = self._experiment.network.links, self._experiment.network.mtu
        for pair in self._pairs.pop(session, ()):
            ways = links[pair], links[pair[1], pair[0]]
            # The closing and its answer, with the acknowledgements of both.
            self._free_at_s[pair] = now_s + sum(
                link.delay_s + 2 * link.transmission_s(framesizes.CLOSE.last_bytes, mtu) for link in ways
            )
            self._using.remove(pair)

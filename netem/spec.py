"""The description of an emulated network: nodes, and one link per ordered pair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network

from policies.links import Link

Endpoint = tuple[str, int]
"""Address and port of one machine's part of a network over several machines."""
Course = tuple[Sequence[float], Sequence[float]]
"""Planned changes of a link: instants in seconds from an origin, ascending, and the rate in bit/s from each on (0: the
link is cut)."""
NO_COURSE: Course = ((), ())
Windows = Mapping[tuple[str, str], tuple[int, int]]
"""By the nodes (which connects, to which): bytes of TCP's congestion windows there and back."""
SUBNET = IPv4Network("198.18.0.0/15")
"""RFC 2544 reserves it for benchmarks: no real network uses it. Here it exists only inside the namespaces."""
SPARE_ADDRESSES = 4
"""A subnet needs this many addresses besides those of the nodes: backends leave out some of the first two
and of the last two."""


class NetworkError(Exception):
    """The network cannot be built or has failed. The message is one sentence for the user."""


class NetworkUnavailable(NetworkError):
    """This machine lacks something that a backend needs. The message says what, and how to get it."""


@dataclass(frozen=True)
class TcpSpec:
    """TCP's settings inside the namespaces.

    ``warm``: connections behave like long-used ones from the first byte on.
    """

    warm: bool = True
    slow_start_after_idle: bool = False
    congestion_control: str = "reno"


@dataclass(frozen=True)
class NetworkSpec:
    """All nodes in order, and the links between those ordered pairs that exchange packets, in real seconds.

    A pair without a link has no connectivity. ``run`` is the run's name.

    Pairs compete for capacity only where links are shared. ``shared`` maps a shared link's name to its
    rate in bits per second. ``paths`` maps an ordered pair to the names of the shared links along its
    path, in order (one name per direction, such as ``a>b``). A packet of such a pair passes the pair's
    own link first. Then it queues on each shared link (first come, first served, stored and forwarded).
    The pair's delay is the propagation delay of the whole path.

    ``courses`` are the changes that calls of ``Backend.update`` will make of pairs, where they are planned. A network
    that computes instants of arrival beforehand transmits what is queued by them.

    With several machines (``machines``) the sender's machine enforces the rates. So all senders of a shared
    link must be on one machine, and time must be real.

    Raises ``NetworkError`` for a path over a link that is not in ``shared``, for a subnet too small for all
    nodes, and for machines that break these rules or leave out a node.
    """

    run: str
    nodes: tuple[str, ...]
    links: Mapping[tuple[str, str], Link]
    tcp: TcpSpec = field(default_factory=TcpSpec)
    mtu: int = 1500
    is_virtual: bool = False
    """Whether time is virtual. Then TCP's own timers, which know only real time, must never fire."""
    shared: Mapping[str, float] = field(default_factory=dict)
    paths: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    subnet: IPv4Network = SUBNET
    """The nodes' addresses are taken from this subnet."""
    machines: Mapping[str, str] = field(default_factory=dict)
    """The name of each node's machine, by node; empty if all nodes are on this machine."""
    courses: Mapping[tuple[str, str], Course] = field(default_factory=dict)
    seed: int = 0
    """Of links' jitter and losses, where this package draws them (``draws_name``)."""

    @property
    def spans_machines(self) -> bool:
        """Whether the nodes are on more than one machine."""
        return len(set(self.machines.values())) > 1

    def __post_init__(self) -> None:
        self._check_machines()
        if len(self.nodes) > self.subnet.num_addresses - SPARE_ADDRESSES:
            raise NetworkError(f"the subnet {self.subnet} has no room for {len(self.nodes)} nodes")
        for pair, path in self.paths.items():
            for name in path:
                if name not in self.shared:
                    raise NetworkError(
                        f"the path from {pair[0]} to {pair[1]} names {name!r}, which is not a shared link"
                    )

    def _check_machines(self) -> None:
        if not self.machines:
            return
        for node in self.nodes:
            if node not in self.machines:
                raise NetworkError(f"the node {node} has no machine: name one for every node, or for none")
        if not self.spans_machines:
            return
        if self.is_virtual:
            raise NetworkError(
                "virtual time works on one machine only: run in real time, or put all nodes on the same "
                "machine"
            )
        first: dict[str, str] = {}
        for pair, path in self.paths.items():
            source = pair[0]
            for name in path if pair in self.links else ():
                other = first.setdefault(name, source)
                if self.machines[other] != self.machines[source]:
                    raise NetworkError(
                        f"the shared link {name!r} carries packets of {other} on machine "
                        f"{self.machines[other]} and of {source} on machine {self.machines[source]}, but one "
                        "machine must enforce its rate: put them on the same machine, or let pairs share no "
                        "links (share_links = false, and no [[sites]])"
                    )


def draws_name(seed: int, pair: tuple[str, str]) -> str:
    """Returns what seeds the draws of a pair's link: the same in every run with this ``seed``."""
    return f"{seed}: {pair[0]} to {pair[1]}"

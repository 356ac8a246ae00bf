"""What an emulated network must look like: nodes, and one link profile per ordered pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network

HEADER_BYTES = 52
"""IPv4 (20) + TCP (20) + the timestamp option (12), per segment."""
MIN_RETRANSMISSION_S = 0.2
SUBNET = IPv4Network("198.18.0.0/15")
"""Set aside for benchmarks by RFC 2544: in no real network, and here only inside the namespaces."""
SPARE_ADDRESSES = 4
"""Of a subnet, that no node can have: the first two, and the last two."""


class NetworkError(Exception):
    """The network cannot be built or has failed. One sentence for the user."""


class NetworkUnavailable(NetworkError):
    """This machine lacks what a backend needs; the message says what and how to get it."""


@dataclass(frozen=True)
class LinkProfile:
    """One direction between two nodes. Real seconds and bits per second (time scale applied).

    Every packet's delay is ``delay_s`` plus a value drawn uniformly from +- ``jitter_s`` (at most
    ``delay_s``), but no packet overtakes another. ``loss_ratio`` of the packets is lost at random; 1 cuts the link.
    """

    delay_s: float
    rate_bps: float
    jitter_s: float = 0.0
    loss_ratio: float = 0.0

    @property
    def retransmission_s(self) -> float:
        """When a lost packet is sent again: after two round trips of a link like this, 0.2 s at least.

        Only where no TCP decides it: on ``loopback``, and in virtual time.
        """
        return max(MIN_RETRANSMISSION_S, 4 * self.delay_s)

    def transmission_s(self, n_bytes: int, mtu: int = 1500) -> float:
        """Time to put a message of ``n_bytes`` on the link, headers of every segment included."""
        segments = -(-n_bytes // (mtu - HEADER_BYTES))
        return (n_bytes + segments * HEADER_BYTES) * 8 / self.rate_bps


@dataclass(frozen=True)
class TcpSpec:
    """TCP inside the namespaces. ``warm``: connections behave like long-used ones from the first byte."""

    warm: bool = True
    slow_start_after_idle: bool = False
    congestion_control: str = "reno"


@dataclass(frozen=True)
class NetworkSpec:
    """All nodes in order, and the links between those ordered pairs that exchange packets.

    A pair without a link has no connectivity. ``run`` is the run's name: it marks what is made.

    Pairs compete for capacity only where links are shared: ``shared`` maps a shared link's name to its
    rate in bits per second, and ``paths`` gives, for an ordered pair, the names of the shared links along
    its way, in order (one name per direction, such as ``a>b``). A packet of such a pair passes the pair's
    own link first, then waits its turn on each of these (first come, first served, stored and forwarded);
    the pair's delay is the propagation of the whole way.

    Over several machines (``machines``) rates are kept where the sender is, so all senders of a shared link
    must be on one of them; time is real.

    Raises ``NetworkError`` for a path over a link that is not shared, for a subnet without room for all
    nodes, and for machines that break these rules or leave out a node.
    """

    run: str
    nodes: tuple[str, ...]
    links: Mapping[tuple[str, str], LinkProfile]
    tcp: TcpSpec = field(default_factory=TcpSpec)
    mtu: int = 1500
    is_virtual: bool = False
    """Time is virtual: TCP's own timers, which know only real time, must not do anything."""
    shared: Mapping[str, float] = field(default_factory=dict)
    paths: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    subnet: IPv4Network = SUBNET
    """Where the nodes' addresses come from."""
    machines: Mapping[str, str] = field(default_factory=dict)
    """Which machine each node is on; empty: all on this one."""

    @property
    def spans_machines(self) -> bool:
        """Whether packets go from one machine to another."""
        return len(set(self.machines.values())) > 1

    def __post_init__(self) -> None:
        self._check_machines()
        if len(self.nodes) > self.subnet.num_addresses - SPARE_ADDRESSES:
            raise NetworkError(f"the subnet {self.subnet} has no room for {len(self.nodes)} nodes")
        for pair, path in self.paths.items():
            for name in path:
                if name not in self.shared:
                    raise NetworkError(
                        f"the path from {pair[0]} to {pair[1]} names {name!r}, which is no shared link"
                    )

    def _check_machines(self) -> None:
        if not self.machines:
            return
        for node in self.nodes:
            if node not in self.machines:
                raise NetworkError(f"the node {node} is on no machine: name one for every node, or for none")
        if not self.spans_machines:
            return
        if self.is_virtual:
            raise NetworkError(
                "virtual time is kept on one machine: run in real time, or put all nodes on the same machine"
            )
        first: dict[str, str] = {}
        for pair, path in self.paths.items():
            source = pair[0]
            for name in path if pair in self.links else ():
                other = first.setdefault(name, source)
                if self.machines[other] != self.machines[source]:
                    raise NetworkError(
                        f"the shared link {name!r} is passed by {other} on machine {self.machines[other]} and by "
                        f"{source} on machine {self.machines[source]}, but a link's rate is kept where its senders "
                        "are: put them on the same machine, or let pairs share no links (share_links = false)"
                    )

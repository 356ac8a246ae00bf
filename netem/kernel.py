"""The ``netem`` backend: the kernel's own emulation, with veth pairs into a routing namespace.

Every node has a namespace of its own with one device, whose peer is in a switch namespace. The
switch routes between the peers, and each peer has its receiver's queueing tree (``netem.qdiscs``).
All namespaces are unnamed and held by descriptor. They and all their contents vanish with the last
process that holds them, so a killed run leaves nothing.

The kernel never has to look up a neighbour: its neighbour table is shared by all namespaces and overflows
at 60 nodes. Instead, both ends of every pair have known hardware addresses, entered as permanent neighbours.
A node sends everything to one gateway address that exists only as such an entry.

TCP's super-packets of up to 64 kB cross the network whole, each with one delay. On a link with random loss
packets must be lost one by one, so a node with such a link cuts its super-packets into segments first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem import probe, qdiscs, rtnetlink, tcp
from netem.backend import Backend
from netem.networks import NETWORKS
from netem.spec import NetworkError, NetworkSpec, NetworkUnavailable
from netem.syscalls import inside, new_network_namespace, setns
from policies.links import Link

DEVICE = "eth0"
"""Name of a node's device, the same in every namespace."""

_NUD_PERMANENT = 0x80
_RTNH_F_ONLINK = 4
_SUPER_PACKET_SEGMENTS = 65_535  # the kernel's own value for a new device
_MODULES = (
    "install the rest of the distribution's kernel modules (Debian: linux-image-amd64 in place of a reduced "
    "kernel; Ubuntu: apt install linux-modules-extra-$(uname -r)) and modprobe"
)


class NetemBackend(Backend):
    """HTB classes with netem leaves on veth pairs; needs the kernel module ``sch_netem``."""

    network = NETWORKS["netem"]

    def __init__(self, spec: NetworkSpec) -> None:
        super().__init__(spec)
        self._minor = {node: qdiscs.FIRST_NODE_MINOR + i for i, node in enumerate(spec.nodes)}
        self._namespaces: dict[str, int] = {}
        self._switch: int | None = None
        self._links = dict(spec.links)
        self._ports: dict[str, int] = {}
        """The interface index of the switch's device towards each node."""
        self._cutting: set[str] = set()
        """The nodes that cut super-packets into segments."""

    @classmethod
    def missing(cls) -> str | None:
        return probe.probe_namespaces() or probe.try_in_child(_try_the_parts)

    def open(self) -> None:
        most = qdiscs.LAST_NODE_MINOR - qdiscs.FIRST_NODE_MINOR + 1
        if len(self._minor) > most:
            raise NetworkError(f"the netem network holds at most {most} nodes")
        try:
            self._build()
        except BaseException as error:
            self.close()
            if isinstance(error, NetlinkError | OSError):
                kind = NetworkUnavailable if _code(error) in (errno.EPERM, errno.ENOENT) else NetworkError
                raise kind(f"cannot build the netem network: {error}") from error
            raise

    def enter(self, node: str) -> None:
        setns(self._namespaces[node])

    def namespaces(self) -> Mapping[str, int]:
        return self._namespaces

    def address(self, node: str) -> str:
        return str(self.spec.subnet[self._minor[node]])

    def update(self, links: Mapping[tuple[str, str], Link]) -> None:
        for sender, receiver in links:
            if (sender, receiver) not in self._links:
                raise NetworkError(f"the network has no link from {sender} to {receiver} that could change")
        requests = [
            qdiscs.changed_link(self._ports[receiver], self._minor[sender], link, self.spec.mtu)
            for (sender, receiver), link in links.items()
        ]
        assert self._switch is not None, "update() before open()"
        try:
            self._links.update(links)
            self._cut_where_packets_are_lost()
            with inside(self._switch):
                rtnetlink.send(requests)
        except (NetlinkError, OSError) as error:
            raise NetworkError(f"cannot change the netem network: {error}") from error

    def close(self) -> None:
        held = list(self._namespaces.values())
        if self._switch is not None:
            held.append(self._switch)
        self._namespaces.clear()
        self._ports.clear()
        self._cutting.clear()
        self._switch = None
        for fd in held:
            os.close(fd)

    def _build(self) -> None:
        self._switch = new_network_namespace()
        incoming = self._links_by_receiver()
        with inside(self._switch), IPRoute() as switch:
            _become_router()
            for node in self.spec.nodes:
                self._namespaces[node] = new_network_namespace()
                self._add_pair(switch, node)
                with inside(self._namespaces[node]):
                    self._configure_node(node)
                self._ports[node] = self._configure_port(switch, node)
                rtnetlink.send(
                    qdiscs.receiver_tree(self._ports[node], incoming[node], self.spec.mtu, self.spec.subnet)
                )
        self._cut_where_packets_are_lost()

    def _links_by_receiver(self) -> dict[str, dict[int, Link]]:
        incoming: dict[str, dict[int, Link]] = {node: {} for node in self.spec.nodes}
        for (sender, receiver), link in self._links.items():
            incoming[receiver][self._minor[sender]] = link
        return incoming

    def _cut_where_packets_are_lost(self) -> None:
        """Makes the nodes with a lossy link cut super-packets, in open connections, too; the others do not."""
        lossy = {sender for (sender, _), link in self._links.items() if 0 < link.loss_ratio < 1}
        for node in sorted(lossy ^ self._cutting):
            with inside(self._namespaces[node]), IPRoute() as ip:
                segments = 1 if node in lossy else _SUPER_PACKET_SEGMENTS
                ip.link("set", index=_index(ip, DEVICE), gso_max_segs=segments)
        self._cutting = lossy

    def _port(self, node: str) -> str:
        return f"port{self._minor[node]}"

    def _hardware(self, node: str, end: int) -> str:
        """Returns the hardware address of one end of a pair: ``end`` is 1 at the node, 2 at the switch."""
        high, low = divmod(self._minor[node], 256)
        return f"02:00:00:{end:02x}:{high:02x}:{low:02x}"

    def _add_pair(self, switch: IPRoute, node: str) -> None:
        peer = {
            "ifname": DEVICE,
            "address": self._hardware(node, 1),
            "mtu": self.spec.mtu,
            "net_ns_fd": self._namespaces[node],
        }
        switch.link(
            "add",
            ifname=self._port(node),
            kind="veth",
            address=self._hardware(node, 2),
            mtu=self.spec.mtu,
            peer=peer,
        )

    def _configure_node(self, node: str) -> None:
        tcp.configure_namespace(self.spec)
        with IPRoute() as ip:
            ip.link("set", index=_index(ip, "lo"), state="up")
            index = _index(ip, DEVICE)
            ip.addr("add", index=index, address=self.address(node), prefixlen=32)
            ip.link("set", index=index, state="up")
            gateway = str(self.spec.subnet[-2])  # no device has it: it exists only as this neighbour entry
            _pin_neighbour(ip, index, gateway, self._hardware(node, 2))
            ip.route(
                "add",
                dst=str(self.spec.subnet),
                gateway=gateway,
                oif=index,
                flags=_RTNH_F_ONLINK,
                **tcp.route_options(self.spec),
            )

    def _configure_port(self, switch: IPRoute, node: str) -> int:
        index = _index(switch, self._port(node))
        switch.link("set", index=index, state="up")
        _pin_neighbour(switch, index, self.address(node), self._hardware(node, 1))
        switch.route("add", dst=f"{self.address(node)}/32", oif=index)
        return index


def _become_router() -> None:
    sysctl = Path("/proc/sys/net/ipv4")
    (sysctl / "ip_forward").write_text("1", encoding="ascii")
    for interface in ("all", "default"):
        (sysctl / "conf" / interface / "rp_filter").write_text("0", encoding="ascii")
    tcp.silence_ipv6()


def _index(ip: IPRoute, device: str) -> int:
    index: int = ip.link_lookup(ifname=device)[0]
    return index


def _pin_neighbour(ip: IPRoute, index: int, address: str, hardware: str) -> None:
    ip.neigh("add", dst=address, lladdr=hardware, ifindex=index, state=_NUD_PERMANENT)


def _code(error: Any) -> int | None:
    """Returns the errno of an ``OSError`` or of a pyroute2 ``NetlinkError``."""
    code: int | None = error.code if isinstance(error, NetlinkError) else error.errno
    return code


def _try_the_parts() -> str | None:
    """Builds one port in a new namespace; returns a sentence about what the kernel refuses, or ``None``."""
    probe.become_network_admin()
    with IPRoute() as ip:
        try:
            ip.link("add", ifname="probe0", kind="veth", peer={"ifname": "probe1"})
        except NetlinkError as error:
            return f"the kernel cannot make veth devices ({error}): {_MODULES} veth"
        index = _index(ip, "probe0")
    link = Link(delay_s=0.001, rate_bps=1e6)
    for request in qdiscs.receiver_tree(index, {qdiscs.FIRST_NODE_MINOR: link}, mtu=1500):
        try:
            rtnetlink.send([request])
        except OSError as error:
            module = ("cls_" if request.message == rtnetlink.NEW_FILTER else "sch_") + request.kind
            if error.errno in (errno.ENOENT, errno.EOPNOTSUPP):
                return f"{module} is not in this kernel: {_MODULES} {module}"
            return f"{module} cannot be used ({error.strerror})"
    return None

"""Plays hostile packets against the user-space forwarder: anything that a process inside a node can send.

Socket pairs stand for the nodes' network devices. At the same time a well-behaved pair of nodes exchanges
packets, which must arrive unchanged.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from netem.forwarder import Forwarder
from netem.forwarder_changes import ChangeChannel
from netem.forwarder_stats import StatsPage
from netem.spec import NetworkSpec
from policies.links import Link

Strategy = st.SearchStrategy[Any]
_NODES = {"a": "198.18.0.1", "b": "198.18.0.2", "c": "198.18.0.3"}
_FAST = Link(0.0, 1e12)
_LINKS = {
    ("a", "b"): Link(0.0, 1e12, 0.0, 0.3),
    ("a", "c"): Link(0.0, 1e12),
    ("b", "a"): Link(0.0, 1e12, 0.0, 1.0),
    ("b", "c"): _FAST,
    ("c", "b"): _FAST,
}
_PATHS = {("a", "c"): ("x", "y")}

VNET: Strategy = st.builds(
    lambda flags, kind, header, size, start, offset: struct.pack(
        "<BBHHHH", flags, kind, header, size, start, offset
    ),
    st.integers(0, 255),
    st.sampled_from([0, 1, 1, 3, 4, 5, 0x81, 255]),
    st.integers(0, 65_535),
    st.sampled_from([0, 1, 8, 48, 1448, 1448, 1448, 65_535]),
    st.integers(0, 65_535),
    st.integers(0, 65_535),
)


@st.composite
def packets(draw: Callable[[Strategy], Any]) -> bytes:
    """A packet to one of the nodes with random values in its headers, which may be cut short."""
    length = draw(st.sampled_from([0, 1, 20, 1000, 1448, 9000, 65_484]))
    first = draw(st.sampled_from([*[0x45] * 12, 0x46, 0x4F, 0x40, 0x41, 0x65, 0x05, 0xFF]))
    protocol = draw(st.sampled_from([*[6] * 12, 17, 1, 255]))
    target = socket.inet_aton(
        draw(st.sampled_from([*list(_NODES.values())[1:] * 5, "198.18.0.1", "255.255.255.255"]))
    )
    ip = struct.pack("!BBHHHBBH", first, 0, draw(st.integers(0, 65_535)), 7, 0x4000, 64, protocol, 0)
    ip += socket.inet_aton(_NODES["a"]) + target + bytes(max(0, (first & 15) * 4 - 20))
    words = draw(st.sampled_from([5, 5, 5, 8, 8, 8, 15, 0, 4]))
    tcp = struct.pack("!HHIIBBHHH", 1, 2, draw(st.integers(0, 2**32 - 1)), 0, words << 4, 0xFF, 0, 0, 0)
    packet: bytes = draw(VNET) + ip + tcp + bytes(max(0, words * 4 - 20)) + bytes(length)
    return packet[: draw(st.just(65_546) | st.integers(1, 90))][:65_546]


CASES: Strategy = st.lists(
    st.tuples(
        st.sampled_from(["a", "a", "b"]),
        packets() | packets() | packets() | st.binary(min_size=1, max_size=100),
    ),
    min_size=1,
    max_size=4,
)


def plain_packet(source: str, target: str, payload: bytes) -> bytes:
    """A well-formed packet without offloads."""
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(payload), 7, 0x4000, 64, 253, 0)
    return bytes(10) + ip + socket.inet_aton(_NODES[source]) + socket.inet_aton(_NODES[target]) + payload


class PacketTarget:
    """The forwarder under attack, in this process."""

    name = "packets"
    cases = CASES

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._ends = {
            node: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            for node in _NODES
        }
        spec = NetworkSpec("fuzz", tuple(_NODES), _LINKS, shared={"x": 1e12, "y": 1e12}, paths=_PATHS)
        self._devices = {node: ends[1].fileno() for node, ends in self._ends.items()}
        self._page = StatsPage()
        self._changes = ChangeChannel(spec.links)
        addresses = {node: socket.inet_aton(address) for node, address in _NODES.items()}
        self._forwarder = Forwarder(spec, self._devices, addresses, self._page, self._changes)
        self._number = 0

    def check(self, case: list[tuple[str, bytes]]) -> None:
        """Forwards a case's packets. Raises ``AssertionError`` if a promise is broken."""
        forwarder = self._forwarder
        for source, packet in case:
            self._ends[source][0].send(packet)
            self._take(source)
        for node in _NODES:  # a full receiver loses packets, as it should
            self._drain(node, b"")
        before = forwarder.held_bytes
        self._number += 1
        payload = self._number.to_bytes(4, "big")
        self._ends["c"][0].send(plain_packet("c", "b", payload))
        self._take("c")
        assert forwarder.held_bytes - before == 34, "a packet is not counted as held"
        assert self._drain("b", payload), "the packet of the well-behaved pair has not arrived"
        self.counts["packets"] += len(case)
        self.counts["dropped"] = forwarder.stats.dropped
        self.counts["segments lost"] = forwarder.stats.lost

    def _take(self, node: str) -> None:
        self._forwarder._take(self._devices[node], time.monotonic())

    def _drain(self, node: str, wanted: bytes) -> bool:
        """Deliver all packets that are due and read those that reach ``node``. Returns whether ``wanted``
        did.
        """
        deadline, found = time.monotonic() + 5, False
        while time.monotonic() < deadline:
            self._forwarder._deliver()
            try:
                while True:
                    found |= os.read(self._ends[node][0].fileno(), 70_000)[-4:] == wanted
            except BlockingIOError:
                pass
            if found or (not wanted and not self._forwarder.held_bytes):
                return found
        return found

    def n_left(self) -> int:
        """Returns the bytes of packets that the forwarder still holds."""
        return self._forwarder.held_bytes

    def close(self) -> None:
        for ends in self._ends.values():
            for end in ends:
                end.close()
        self._changes.close()
        self._page.close()

"""The queueing disciplines of one receiver's links, as requests to the kernel.

The switch's device towards a receiver has an HTB tree with one class per sender. Each class has a netem
leaf that emulates that sender's link: rate, then delay. So a packet waits on the receiver's side. There it
no longer counts against its sender's TCP small queue, because the switch released the sender's socket when
it routed the packet.

- One BPF filter of five instructions finds the class: its minor number is the place of the source address
  in the subnet. Its cost does not grow with the number of nodes. That of one filter per sender would.
- netem limits the rate, not HTB. HTB sends a whole GSO super-packet of 64 kB at once and charges it
  afterwards, so a token's 28 kB would arrive up to 2.3 ms early at 100 Mbit/s; netem delivers each
  packet at the end of its transmission. HTB's own rate is therefore above every link's.
- A rate keeps jitter from reordering: netem then sends no packet before the one in front of it, and the
  delay that it draws counts from the packet's arrival. Without a rate it sorts by the drawn delays.
- netem's limit counts packets, and a super-packet once. The limit allows for all packets under way if all
  were bare headers (the acknowledgements of a fast link in the other direction), and for a queue besides.
- A change of options does not change when packets that netem already holds leave. Later packets queue
  behind them, so a shorter delay shows only when the last of them has left. After a cut (all packets lost)
  they still arrive. netem keeps its old rate unless a new one is sent, so all options are always sent.
- Packets of senders without a link go to the class ``DROP_MINOR``, whose queue has no room: they are dropped.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import IPv4Network

from netem.rtnetlink import NEW_CLASS, NEW_FILTER, NEW_QDISC, TcRequest, attribute
from netem.spec import SUBNET, NetworkError
from policies.links import HEADER_BYTES, Link

DROP_MINOR = 1
FIRST_NODE_MINOR = 2
LAST_NODE_MINOR = 0xFFFD
QUEUE_PACKETS = 10_000
"""Packets that may queue beyond the bandwidth-delay product; each has at most 64 kB."""

_ROOT = 0xFFFF_FFFF
_MAJOR = 0x1_0000
_TICK_S = 64e-9
_U32_MAX = 0xFFFF_FFFF
_MAX_JITTER_S = (2**31 - 1) * 1e-9  # netem stores jitter as signed 32-bit nanoseconds
_ETHERNET_BYTES = 14
_PASS_BYTES_PER_S = 4_000_000_000
_PASS_BURST_BYTES = 1_000_000
_ETH_P_IP_BIG_ENDIAN = 0x0008
_IPV4_SOURCE_OFFSET = _ETHERNET_BYTES + 12


def receiver_tree(
    device: int, links: Mapping[int, Link], mtu: int, subnet: IPv4Network = SUBNET
) -> list[TcRequest]:
    """Returns all requests that set up the switch's ``device`` (an interface index) towards one receiver.

    ``links`` maps a sender's minor number (its address's place in ``subnet``) to its link to the receiver.
    ``mtu`` is in bytes. Raises ``NetworkError`` for a link that netem cannot express.
    """
    requests = [_htb(device), _htb_class(device, DROP_MINOR), _drop_leaf(device), _filter(device, subnet)]
    for minor, link in links.items():
        requests += [_htb_class(device, minor), _netem_leaf(device, minor, link, mtu)]
    return requests


def changed_link(device: int, minor: int, link: Link, mtu: int) -> TcRequest:
    """Returns the request that changes the link from sender ``minor``. Raises as ``receiver_tree`` does."""
    return replace(_netem_leaf(device, minor, link, mtu), change=True)


def netem_options(link: Link, mtu: int) -> bytes:
    """Returns ``struct tc_netem_qopt`` and the rate attribute for one direction of a link.

    Delay and jitter are in ticks of 64 ns, the loss in units of 2^-32. netem counts 14 bytes of Ethernet
    header per segment, which the emulated link does not have. To make up for it, the rate is raised by the
    factor (mtu + 14) / mtu. Raises ``NetworkError`` for values that netem cannot express.
    """
    ticks = round(link.delay_s / _TICK_S)
    if not 0 <= ticks <= _U32_MAX:
        raise NetworkError(
            f"netem's delays are from 0 to {_U32_MAX * _TICK_S:.0f} s; {link.delay_s:g} s is outside"
        )
    if not 0 <= link.jitter_s <= _MAX_JITTER_S:
        raise NetworkError(
            f"netem's jitters are from 0 to {_MAX_JITTER_S:.1f} s; {link.jitter_s:g} s is outside"
        )
    if not 0 <= link.loss_ratio <= 1:
        raise NetworkError(f"a loss ratio must be from 0 to 1, but is {link.loss_ratio:g}")
    if link.rate_bps < 8:
        raise NetworkError(f"netem needs a rate of at least 8 bit/s, not {link.rate_bps:g} bit/s")
    bytes_per_s = round(link.rate_bps / 8 * (mtu + _ETHERNET_BYTES) / mtu)
    limit = min(queue_limit_packets(link), _U32_MAX)
    loss, gap, duplicate = round(link.loss_ratio * _U32_MAX), 0, 0
    jitter_ticks = round(link.jitter_s / _TICK_S)
    options = struct.pack("=6I", ticks, limit, loss, gap, duplicate, jitter_ticks)
    if bytes_per_s > _U32_MAX:
        options += attribute(8, struct.pack("=Q", bytes_per_s))
    return options + attribute(6, struct.pack("=IiIi", min(bytes_per_s, _U32_MAX), 0, 0, 0))


def queue_limit_packets(link: Link) -> int:
    """Returns netem's limit: all smallest packets in flight at full rate and longest delay, plus a queue."""
    longest_s = link.delay_s + link.jitter_s
    return math.ceil(link.rate_bps * longest_s / (8 * HEADER_BYTES)) + QUEUE_PACKETS


def _htb(device: int) -> TcRequest:
    version, rate_to_quantum = 3, 10
    glob = struct.pack("=5I", version, rate_to_quantum, DROP_MINOR, 0, 0)
    return TcRequest(NEW_QDISC, device, _MAJOR, _ROOT, "htb", attribute(2, glob))


def _htb_class(device: int, minor: int) -> TcRequest:
    linklayer_ethernet = 1  # the kernel computes transmission times itself: no tables to send
    rate = struct.pack("=BBHhHI", 0, linklayer_ethernet, 0, 0, 0, _PASS_BYTES_PER_S)
    burst_ticks = round(_PASS_BURST_BYTES / _PASS_BYTES_PER_S / _TICK_S)
    quantum_bytes, level, priority = 65_536, 0, 0
    params = rate + rate + struct.pack("=5I", burst_ticks, burst_ticks, quantum_bytes, level, priority)
    return TcRequest(NEW_CLASS, device, _MAJOR | minor, _MAJOR, "htb", attribute(1, params))


def _netem_leaf(device: int, minor: int, link: Link, mtu: int) -> TcRequest:
    return TcRequest(NEW_QDISC, device, minor << 16, _MAJOR | minor, "netem", netem_options(link, mtu))


def _drop_leaf(device: int) -> TcRequest:
    no_room = struct.pack("=I", 0)
    return TcRequest(NEW_QDISC, device, 0xFFFE << 16, _MAJOR | DROP_MINOR, "pfifo", no_room)


def _filter(device: int, subnet: IPv4Network) -> TcRequest:
    program = b"".join(
        struct.pack("=HBBI", code, 0, 0, operand)
        for code, operand in (
            (0x20, _IPV4_SOURCE_OFFSET),  # A = 32-bit word of the packet
            (0x14, int(subnet.network_address)),  # A -= operand
            (0x54, 0xFFFF),  # A &= operand
            (0x44, _MAJOR),  # A |= operand
            (0x16, 0),  # return A
        )
    )
    length = struct.pack("=H", len(program) // 8)
    priority = 1
    info = priority << 16 | _ETH_P_IP_BIG_ENDIAN
    return TcRequest(NEW_FILTER, device, 0, _MAJOR, "bpf", attribute(4, length) + attribute(5, program), info)

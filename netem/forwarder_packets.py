"""Reads a packet's size on a wire and its segments, and removes lost segments from it.

A packet is as read from a TUN device: a virtio-net header, then IPv4. TCP sends super-packets of up
to 64 kB (segmentation offload), each of which a real wire would carry as several segments.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

from netem.tun import VNET_HEADER_BYTES

_IP = VNET_HEADER_BYTES
_MIN_IP_BYTES = _MIN_TCP_BYTES = 20
_MIN_SEGMENT_BYTES = 8
"""The kernel's TCP sends no smaller segments. If they had one byte, a packet could have 65,000 of them."""
_TCP = 6
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


def is_whole(packet: bytes) -> bool:
    """Whether a super-packet has the valid headers that are needed to cut it; True for plain packets.

    TCP's own packets always have them. A process inside a node may send anything (raw sockets).
    """
    segment_bytes = packet[4] | packet[5] << 8
    if not packet[1] or not segment_bytes:
        return True
    ip_bytes = (packet[_IP] & 15) * 4
    tcp = _IP + ip_bytes
    if (
        segment_bytes < _MIN_SEGMENT_BYTES
        or ip_bytes < _MIN_IP_BYTES
        or len(packet) < tcp + _MIN_TCP_BYTES
        or packet[_IP + 9] != _TCP
    ):
        return False
    tcp_bytes = (packet[tcp + 12] >> 4) * 4
    return tcp_bytes >= _MIN_TCP_BYTES and tcp + tcp_bytes < len(packet) <= _IP + 0xFFFF


def wire_bytes(packet: bytes) -> int:
    """Returns the bytes that ``packet`` has on a wire, all segments' headers included, its vnet header not."""
    size = len(packet) - VNET_HEADER_BYTES
    segment_bytes = packet[4] | packet[5] << 8
    if not packet[1] or not segment_bytes:
        return size
    header = _header_bytes(packet)
    return size + (-(-(size - header) // segment_bytes) - 1) * header


def segments(packet: bytes) -> tuple[int, int]:
    """Returns how many segments ``packet`` has on a wire, and the bytes of the first one, headers included."""
    size = len(packet) - VNET_HEADER_BYTES
    segment_bytes = packet[4] | packet[5] << 8
    if not packet[1] or not segment_bytes:
        return 1, size
    header = _header_bytes(packet)
    return -(-(size - header) // segment_bytes), min(size, header + segment_bytes)


def without(packet: bytes, lost: Sequence[int]) -> list[bytes]:
    """Returns a packet without its ``lost`` segments (ascending numbers): one packet per run that is left."""
    n_segments, _ = segments(packet)
    borders = [-1, *lost, n_segments]
    return [_run(packet, before + 1, after) for before, after in pairwise(borders) if after - before > 1]


def _header_bytes(packet: bytes) -> int:
    ip_bytes = (packet[_IP] & 15) * 4
    return ip_bytes + (packet[_IP + ip_bytes + 12] >> 4) * 4


def _run(packet: bytes, first: int, last: int) -> bytes:
    """Returns segments ``first`` up to ``last`` (not included) of a super-packet as a packet of its own."""
    segment_bytes = packet[4] | packet[5] << 8
    header_bytes = _header_bytes(packet)
    tcp = _IP + (packet[_IP] & 15) * 4
    body = _IP + header_bytes
    payload = packet[body + first * segment_bytes : body + last * segment_bytes]
    header = bytearray(packet[:body])
    if last - first == 1:  # no super-packet any more
        header[1] = 0
        header[4:6] = b"\0\0"
    if body + last * segment_bytes < len(packet):
        header[tcp + 13] &= ~(_FIN | _PSH)
    if first:
        header[tcp + 13] &= ~_CWR
    sequence, identity = (
        struct.unpack_from("!I", header, tcp + 4)[0],
        struct.unpack_from("!H", header, _IP + 4)[0],
    )
    struct.pack_into("!I", header, tcp + 4, (sequence + first * segment_bytes) & 0xFFFF_FFFF)
    struct.pack_into("!HH", header, _IP + 2, header_bytes + len(payload), (identity + first) & 0xFFFF)
    struct.pack_into("!H", header, _IP + 10, 0)
    struct.pack_into("!H", header, _IP + 10, ~_sum(header[_IP:tcp]) & 0xFFFF)
    # The sender leaves TCP's checksum to the device: the field only has the pseudo-header's sum, with the
    # length.
    pseudo = bytes(header[_IP + 12 : _IP + 20]) + struct.pack("!HH", 6, body - tcp + len(payload))
    struct.pack_into("!H", header, tcp + 16, _sum(pseudo))
    return bytes(header) + payload


def _sum(data: bytes | bytearray) -> int:
    """Returns the Internet checksum's ones'-complement sum, not inverted."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total

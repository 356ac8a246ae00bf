"""TCP packets as a TUN device with offloads gives them, for tests of the forwarder."""

from __future__ import annotations

import socket
import struct

_FIN_PSH_ACK = 0x19


def tcp_packet(
    payload: bytes, segment_bytes: int = 0, source: str = "198.18.0.1", target: str = "198.18.0.2"
) -> bytes:
    """``segment_bytes`` > 0: a super-packet of such segments. Timestamps make 32 bytes of TCP header."""
    virtio = struct.pack("<BBHHHH", 1, 1 if segment_bytes else 0, 52, segment_bytes, 20, 16)
    addresses = socket.inet_aton(source) + socket.inet_aton(target)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 52 + len(payload), 7, 0x4000, 64, 6, 0) + addresses
    tcp = struct.pack("!HHIIBBHHH", 1000, 2000, 0xFFFF_FF00, 5, 8 << 4, _FIN_PSH_ACK, 500, 0, 0) + b"\1" * 12
    return virtio + ip + tcp + payload

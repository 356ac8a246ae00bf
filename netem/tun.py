"""Opens TUN devices that pass TCP super-packets (segmentation offload) whole."""

from __future__ import annotations

import fcntl
import os
import struct

VNET_HEADER_BYTES = 10
"""Size of the virtio-net header before every packet (checksum and segmentation offload)."""

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_TUNSETVNETHDRSZ = 0x400454D8
_IFF_TUN_NO_PI_VNET_HDR = 0x0001 | 0x1000 | 0x4000
_OFFLOAD_CHECKSUM_AND_TCP = 1 | 2 | 4


def open_tun(name: str) -> int:
    """Makes a TUN device in the current namespace; returns its non-blocking descriptor. Raises ``OSError``."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN_NO_PI_VNET_HDR))
        fcntl.ioctl(fd, _TUNSETVNETHDRSZ, struct.pack("i", VNET_HEADER_BYTES))
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOAD_CHECKSUM_AND_TCP)
    except OSError:
        os.close(fd)
        raise
    return fd

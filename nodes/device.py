"""Notices when a node's own network goes: its device was deleted, or its address taken away.

Without this a node whose device is gone would wait for as long as TCP tries: a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Iterator

_IPV4_ADDRESSES = 0x10
"""The multicast group RTMGRP_IPV4_IFADDR."""
_DELETED_ADDRESS = 21
"""RTM_DELADDR."""
_LOCAL = 2
"""IFA_LOCAL."""
_HEADER = struct.Struct("=IHHII")
_ADDRESS_HEADER_BYTES = 8
_ATTRIBUTE = struct.Struct("=HH")


class AddressWatch:
    """Sets ``lost`` when the kernel takes ``address`` away in this process's network namespace."""

    def __init__(self, address: str, lost: asyncio.Event) -> None:
        self._address = address
        self._lost = lost
        self._gone = False
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE
        )
        self._socket.bind((0, _IPV4_ADDRESSES))
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def _read(self) -> None:
        if socket.inet_aton(self._address) in deleted_addresses(self._socket.recv(65536)):
            self._gone = True
            self._lost.set()

    def close(self) -> None:
        """Stop watching. Ends the process with a sentence in its log if the address has gone meanwhile."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._gone:
            print(f"its network device or its address {self._address} has been removed", file=sys.stderr)
            raise SystemExit(1)


def deleted_addresses(data: bytes) -> Iterator[bytes]:
    """The IPv4 addresses (4 bytes each) that netlink messages say were deleted."""
    while len(data) >= _HEADER.size:
        size, kind, *_ = _HEADER.unpack_from(data)
        if kind == _DELETED_ADDRESS:
            attributes = data[_HEADER.size + _ADDRESS_HEADER_BYTES : size]
            while len(attributes) >= _ATTRIBUTE.size:
                n_bytes, what = _ATTRIBUTE.unpack_from(attributes)
                if what == _LOCAL:
                    yield attributes[_ATTRIBUTE.size : n_bytes]
                attributes = attributes[max(n_bytes + 3 & ~3, _ATTRIBUTE.size) :]
        data = data[max(size + 3 & ~3, _HEADER.size) :]

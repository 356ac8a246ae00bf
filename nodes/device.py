"""Notices when a node loses its network: its device was deleted, or its address removed.

Without this, a node whose device is gone would wait for as long as TCP tries: a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import socket
import sys

_IPV4_ADDRESSES = 0x10
"""The multicast group RTMGRP_IPV4_IFADDR."""


class AddressWatch:
    """Sets ``lost`` when ``address`` is removed in this process's network namespace."""

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
        if self._address in deleted_addresses(self._socket.recv(65536)):
            self._gone = True
            self._lost.set()

    def close(self) -> None:
        """Stops watching. If the address has been removed, prints that on stderr and raises ``SystemExit``."""
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()
        if self._gone:
            print(f"its network device or its address {self._address} has been removed", file=sys.stderr)
            raise SystemExit(1)


def deleted_addresses(data: bytes) -> set[str]:
    """Returns the IPv4 addresses whose deletion the rtnetlink messages in ``data`` report."""
    from pyroute2.netlink.rtnl.marshal import MarshalRtnl  # 0.7 s, and only nodes of a kernel network need it

    messages = MarshalRtnl().parse(data)
    return {m.get_attr("IFA_LOCAL") for m in messages if m["event"] == "RTM_DELADDR"}

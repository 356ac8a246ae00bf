"""Sends traffic-control requests to the kernel, many in one system call.

pyroute2 makes the devices, addresses and routes. It lacks netem's rate and the BPF classifier, and it sends
one request at a time. That takes 0.6 ms each, and a full mesh of 150 nodes needs 45,000 requests.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NEW_QDISC, NEW_CLASS, NEW_FILTER = 36, 40, 44
"""Message types: RTM_NEWQDISC, RTM_NEWTCLASS and RTM_NEWTFILTER of linux/rtnetlink.h."""

_NETLINK_ROUTE = 0
_SOL_NETLINK, _NETLINK_CAP_ACK = 270, 10
_CHANGE = 0x01 | 0x04  # request, acknowledge
_ADD = _CHANGE | 0x200 | 0x400  # exclusive, create
_ERROR = 2
_TCA_KIND, _TCA_OPTIONS = 1, 2
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_TCMSG = struct.Struct("=B3xiIII")  # family, device, handle, parent, info
_BATCH = 64
"""Requests per system call: their acknowledgements must fit the socket's default buffer."""


@dataclass(frozen=True)
class TcRequest:
    """One qdisc, class or filter to create. Handles are ``major << 16 | minor``.

    ``change``: it exists already and gets new options; the packets in its queue stay there.
    """

    message: int
    device: int
    handle: int
    parent: int
    kind: str
    options: bytes
    info: int = 0
    change: bool = False

    def encode(self, sequence: int) -> bytes:
        body = _TCMSG.pack(socket.AF_UNSPEC, self.device, self.handle, self.parent, self.info)
        body += attribute(_TCA_KIND, self.kind.encode() + b"\0") + attribute(_TCA_OPTIONS, self.options)
        flags = _CHANGE if self.change else _ADD
        return _HEADER.pack(_HEADER.size + len(body), self.message, flags, sequence, 0) + body


def attribute(kind: int, payload: bytes) -> bytes:
    """Returns one encoded netlink attribute: length, type, payload, padding to four bytes."""
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def send(requests: Iterable[TcRequest]) -> None:
    """Sends the requests to the kernel, in order, in the network namespace that the caller is in.

    Raises ``OSError`` with the kernel's error of the first request that it refuses. Earlier requests, and
    later ones of the same batch, may have taken effect.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_ROUTE) as sock:
        sock.setsockopt(_SOL_NETLINK, _NETLINK_CAP_ACK, 1)
        sock.bind((0, 0))
        pending = list(requests)
        for first in range(0, len(pending), _BATCH):
            _send_batch(sock, pending[first : first + _BATCH])


def _send_batch(sock: socket.socket, batch: Sequence[TcRequest]) -> None:
    sock.send(b"".join(request.encode(number) for number, request in enumerate(batch)))
    refused: OSError | None = None
    answered = 0
    while answered < len(batch):
        data = sock.recv(1 << 16)
        while data:
            length, kind, _, sequence, _ = _HEADER.unpack_from(data)
            assert kind == _ERROR, f"netlink sent a message of type {kind} instead of an acknowledgement"
            code = -struct.unpack_from("=i", data, _HEADER.size)[0]
            if code and refused is None:
                request = batch[sequence]
                verb = "changing" if request.change else "adding"
                refused = OSError(code, f"{verb} {request.kind} {request.handle:#x}: {os.strerror(code)}")
            answered += 1
            data = data[(length + 3) & ~3 :]
    if refused is not None:
        raise refused

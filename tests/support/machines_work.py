"""What tests have done inside a node of ``tests.support.machines``, by name."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from tests.support.children import echo_s

Address = Callable[[str], str]


def echo(address: Address, port: int, target: str, n_bytes: int, n_times: int) -> list[float]:
    """Seconds until a message has come back, each time, over one connection that has been used before."""
    with socket.create_connection((address(target), port), 20.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        payload = os.urandom(n_bytes)
        return [echo_s(connection, payload) for _ in range(n_times + 1)][1:]


def reaches(address: Address, port: int, target: str, timeout_s: float) -> bool:
    """Whether a connection is made."""
    try:
        socket.create_connection((address(target), port), timeout_s).close()
    except OSError:
        return False
    return True

"""The kernel's messages about addresses that are removed."""

from __future__ import annotations

import socket
import struct

from nodes.device import deleted_addresses

DELETED, ADDED = 21, 20


def message(kind: int, *attributes: tuple[int, bytes]) -> bytes:
    body = bytes(8)
    for what, value in attributes:
        body += struct.pack("=HH", 4 + len(value), what) + value + bytes(-len(value) % 4)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def address(text: str) -> tuple[int, bytes]:
    return 2, socket.inet_aton(text)


def test_only_addresses_that_were_deleted_count() -> None:
    data = message(ADDED, address("198.18.0.1")) + message(DELETED, (3, b"eth0\0"), address("198.18.0.2"))
    assert deleted_addresses(data) == {"198.18.0.2"}


def test_several_messages_come_in_one_reading() -> None:
    data = message(DELETED, address("198.18.0.1")) + message(DELETED, address("198.18.0.2"))
    assert deleted_addresses(data) == {"198.18.0.1", "198.18.0.2"}


def test_a_message_cut_short_or_of_no_length_ends_the_reading() -> None:
    assert deleted_addresses(message(DELETED, address("198.18.0.1"))[:20]) == set()
    assert list(deleted_addresses(bytes(40))) == []

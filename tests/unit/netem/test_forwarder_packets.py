"""Sizes of packets on the wire, and super-packets that lose some of their segments."""

from __future__ import annotations

import struct

from hypothesis import given
from hypothesis import strategies as st

from netem.forwarder_packets import segments, wire_bytes, without
from tests.support.packets import tcp_packet

_HEADERS = 52


def _sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def test_a_plain_packet_takes_its_own_size_on_the_wire() -> None:
    packet = tcp_packet(b"x" * 100)
    assert wire_bytes(packet) == 152
    assert segments(packet) == (1, 152)


def test_a_super_packet_counts_a_header_for_every_segment() -> None:
    packet = tcp_packet(b"x" * 2900, segment_bytes=1448)
    assert segments(packet) == (3, 1500)
    assert wire_bytes(packet) == 2900 + 3 * _HEADERS


@given(
    size=st.integers(1, 20_000),
    mss=st.integers(536, 1448),
    drawn=st.sets(st.integers(0, 40)),
)
def test_what_is_left_of_a_super_packet_is_every_other_segment_at_its_own_sequence_number(
    size: int, mss: int, drawn: set[int]
) -> None:
    payload = bytes(i * 7 % 256 for i in range(size))
    packet = tcp_packet(payload, segment_bytes=mss)
    n_segments, _ = segments(packet)
    lost = sorted(number for number in drawn if number < n_segments)
    expected = {i * mss: payload[i * mss : (i + 1) * mss] for i in range(n_segments) if i not in lost}
    found: dict[int, bytes] = {}
    for part in without(packet, lost):
        sequence = struct.unpack_from("!I", part, 34)[0]
        offset = (sequence - 0xFFFF_FF00) % 2**32
        body = part[10 + _HEADERS :]
        for start in range(0, len(body), mss):
            found[offset + start] = body[start : start + mss]
    assert found == expected


@given(lost=st.integers(0, 9))
def test_every_part_is_a_packet_that_a_kernel_accepts(lost: int) -> None:
    packet = tcp_packet(b"y" * 14_000, segment_bytes=1400)
    for part in without(packet, [lost]):
        ip, tcp = part[10:30], part[30:62]
        assert struct.unpack_from("!H", ip, 2)[0] == len(part) - 10  # total length
        assert _sum(ip) == 0xFFFF  # header checksum
        pseudo = ip[12:20] + struct.pack("!HH", 6, len(part) - 30)
        assert struct.unpack_from("!H", tcp, 16)[0] == _sum(pseudo)  # left for the device to complete
        is_last = struct.unpack_from("!I", tcp, 4)[0] == (0xFFFF_FF00 + 14_000 - (len(part) - 62)) % 2**32
        assert bool(tcp[13] & 0x01) == is_last  # FIN only where the data ends
        assert bool(part[1]) == (len(part) - 62 > 1400)  # one segment alone is no super-packet


def test_a_packet_that_loses_all_its_segments_leaves_nothing() -> None:
    assert without(tcp_packet(b"z" * 2800, segment_bytes=1400), [0, 1]) == []

"""The netem backend's requests to the kernel, as numbers: no kernel is needed."""

import ipaddress
import struct
from dataclasses import replace

import pytest

from netem.qdiscs import (
    DROP_MINOR,
    QUEUE_PACKETS,
    changed_link,
    netem_options,
    queue_limit_packets,
    receiver_tree,
)
from netem.rtnetlink import NEW_CLASS, NEW_FILTER, NEW_QDISC
from netem.spec import NetworkError
from policies.links import Link

CLUSTER_LINK = Link(delay_s=0.05, rate_bps=100e6)
TICK_S = 64e-9


def rate_bytes_per_s(options: bytes) -> int:
    length, kind, rate = struct.unpack_from("=HHI", options, len(options) - 20)
    assert (length, kind) == (20, 6), "the last attribute is TCA_NETEM_RATE"
    return rate


def test_a_delay_is_given_to_netem_within_one_tick() -> None:
    for delay_s in (0.0, 1e-6, 0.0025, 0.05, 1.2345678):
        ticks = struct.unpack_from("=I", netem_options(Link(delay_s, 1e9), 1500))[0]
        assert abs(ticks * TICK_S - delay_s) <= TICK_S / 2 * (1 + 1e-6)


def test_a_full_packet_takes_its_time_at_the_links_rate_without_the_ethernet_header() -> None:
    for rate_bps in (1e6, 100e6, 1e9, 20e9):
        for mtu in (1500, 9000):
            rate = rate_bytes_per_s(netem_options(Link(0.01, rate_bps), mtu))
            assert (mtu + 14) / rate == pytest.approx(mtu * 8 / rate_bps, rel=1e-5)


def test_a_rate_beyond_32_bits_of_bytes_per_second_is_given_in_64_bits() -> None:
    options = netem_options(Link(0.01, 80e9), 1500)
    length, kind, rate = struct.unpack_from("=HHQ", options, 24)
    assert (length, kind) == (12, 8)
    assert rate == pytest.approx(10e9 * 1514 / 1500)
    assert rate_bytes_per_s(options) == 0xFFFF_FFFF


@pytest.mark.parametrize(
    "link",
    [
        CLUSTER_LINK,
        Link(0.05, 100e6, jitter_s=0.03),
        Link(1.0, 10e9, jitter_s=1.0),
        Link(0.0, 1e3),
    ],
)
def test_the_queue_holds_a_full_link_of_bare_headers_and_ten_thousand_packets_more(link: Link) -> None:
    in_flight = link.rate_bps * (link.delay_s + link.jitter_s) / 8 / 52
    assert in_flight + QUEUE_PACKETS <= queue_limit_packets(link) <= in_flight + QUEUE_PACKETS + 1
    limit = struct.unpack_from("=6I", netem_options(link, 1500))[1]
    assert limit == queue_limit_packets(link)


def test_nothing_is_lost_duplicated_or_jittered_on_a_plain_link() -> None:
    assert struct.unpack_from("=6I", netem_options(CLUSTER_LINK, 1500))[2:] == (0, 0, 0, 0)


def test_jitter_is_given_within_one_tick_and_always_with_a_rate_that_keeps_the_order() -> None:
    for jitter_s in (1e-6, 0.003, 2.1):
        options = netem_options(Link(2.1, 1e9, jitter_s), 1500)
        ticks = struct.unpack_from("=6I", options)[5]
        assert abs(ticks * TICK_S - jitter_s) <= TICK_S / 2 * (1 + 1e-6)
        assert rate_bytes_per_s(options) > 0


def test_a_loss_is_given_within_a_billionth_and_a_cut_loses_everything() -> None:
    for loss_ratio in (0.0, 1e-6, 0.2, 0.999):
        loss = struct.unpack_from("=6I", netem_options(Link(0.1, 1e9, 0.0, loss_ratio), 1500))[2]
        assert loss / 2**32 == pytest.approx(loss_ratio, abs=1e-9)
    cut = struct.unpack_from("=6I", netem_options(Link(0.1, 1e9, 0.0, 1.0), 1500))[2]
    assert cut == 2**32 - 1, "netem loses a packet when its 32 random bits are at most this"


def test_a_changed_link_names_the_leaf_that_was_added_and_gives_all_options_again() -> None:
    (added,) = [r for r in receiver_tree(3, {7: CLUSTER_LINK}, 1500) if r.kind == "netem"]
    slower = Link(0.2, 1e6, 0.05, 0.01)
    changed = changed_link(3, 7, slower, 1500)
    assert changed == replace(added, options=netem_options(slower, 1500), change=True)


@pytest.mark.parametrize(
    ("link", "wording"),
    [
        (Link(300.0, 1e6), "netem's delays are from 0 to 275 s; 300 s is outside"),
        (Link(-0.001, 1e6), "netem's delays are from 0 to 275 s; -0.001 s is outside"),
        (Link(3.0, 1e6, 2.5), "netem's jitters are from 0 to 2.1 s; 2.5 s is outside"),
        (Link(0.1, 1e6, 0.0, 1.5), "a loss ratio must be from 0 to 1, but is 1.5"),
        (Link(0.1, 0.0), "netem needs a rate of at least 8 bit/s, not 0 bit/s"),
    ],
)
def test_a_link_that_netem_cannot_express_is_refused_in_one_sentence(link: Link, wording: str) -> None:
    with pytest.raises(NetworkError) as refusal:
        netem_options(link, 1500)
    assert str(refusal.value) == wording


def test_a_receiver_has_one_filter_and_a_class_and_leaf_per_sender_however_many_there_are() -> None:
    for n_senders in (1, 149):
        tree = receiver_tree(3, {2 + i: CLUSTER_LINK for i in range(n_senders)}, 1500)
        made = [(request.message, request.kind) for request in tree]
        assert made.count((NEW_FILTER, "bpf")) == 1
        assert made.count((NEW_CLASS, "htb")) == n_senders + 1
        assert made.count((NEW_QDISC, "netem")) == n_senders
        assert len({(r.message, r.handle) for r in tree}) == len(tree)


def test_the_class_for_senders_without_a_link_has_a_queue_without_room() -> None:
    tree = receiver_tree(3, {}, 1500)
    (leaf,) = [request for request in tree if request.kind == "pfifo"]
    assert leaf.parent == 0x10000 | DROP_MINOR
    assert leaf.options == bytes(4)


@pytest.mark.parametrize("subnet", ["198.18.0.0/15", "10.77.0.0/16", "172.20.144.0/24"])
def test_the_filter_finds_the_class_of_a_sender_by_its_place_in_the_subnet(subnet: str) -> None:
    network = ipaddress.IPv4Network(subnet)
    (program,) = [r for r in receiver_tree(3, {}, 1500, network) if r.message == NEW_FILTER]
    codes = [(0x20, 26), (0x14, int(network.network_address)), (0x54, 0xFFFF), (0x44, 0x10000), (0x16, 0)]
    assert b"".join(struct.pack("=HBBI", code, 0, 0, operand) for code, operand in codes) in program.options
    assert (int(network[7]) - int(network.network_address)) & 0xFFFF == 7

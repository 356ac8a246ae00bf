"""What messages did on a link, from when they were sent and when they arrived."""

from __future__ import annotations

import math

import numpy as np
import pytest

from policies.links import Link
from testbed.fast.overtime import LinkOverTime, OnLink


def passed(link: LinkOverTime, *messages: tuple[float, float, float]) -> OnLink:
    """Of messages (sent at, arrived at, bits)."""
    sent_at_s, arrived_at_s, n_bits = np.array(messages).T
    return link.passed(np.arange(len(messages)), sent_at_s, arrived_at_s, n_bits)


def changing(*changes: tuple[float, Link], most_bps: float = math.inf) -> LinkOverTime:
    """From 8 Mbit/s and 10 ms on."""
    return LinkOverTime(Link(0.010, 8e6), changes, most_bps)


def test_a_message_waits_for_what_its_bytes_and_the_delay_do_not_explain() -> None:
    on_link = passed(changing(), (1.0, 1.510, 4e6), (2.0, 2.800, 4e6))
    assert on_link.busy_s == pytest.approx([0.5, 0.5])
    assert on_link.wait_s == pytest.approx([0.0, 0.29]) and on_link.left_at_s == pytest.approx([1.5, 2.79])


def test_a_shared_link_on_the_way_makes_messages_slower_but_does_not_make_them_wait() -> None:
    on_link = passed(changing(most_bps=4e6), (1.0, 2.010, 4e6))
    assert on_link.busy_s == pytest.approx([1.0]) and on_link.wait_s == pytest.approx([0.0])


def test_the_rate_is_the_one_in_force_while_the_message_was_on_the_link() -> None:
    link = changing((10.0, Link(0.010, 80e6)))
    on_link = passed(link, (9.5, 10.085, 10e6), (9.5, 11.010, 10e6))
    # Alone: half a second at 8 Mbit/s, then 6 Mbit at 80, and the delay.
    assert on_link.wait_s == pytest.approx([0.0, 0.925])
    assert on_link.busy_s == pytest.approx([0.575, 0.125]), "the second was on it after the change"


def test_a_cut_carries_nothing_and_nobody_waits_for_others_meanwhile() -> None:
    link = changing((10.0, Link(0.010, 8e6, loss_ratio=1.0)), (20.0, Link(0.010, 8e6)))
    on_link = passed(link, (9.75, 20.260, 4e6), (12.0, 20.760, 4e6))
    assert on_link.wait_s == pytest.approx([0.0, 0.25])
    assert on_link.busy_s == pytest.approx([0.5, 0.5]), "it is not busy while it is cut"


def test_a_link_that_is_cut_from_the_start_is_busy_for_nothing_before_it_is_up() -> None:
    link = LinkOverTime(Link(0.010, 8e6, loss_ratio=1.0), [(5.0, Link(0.010, 8e6))], math.inf)
    on_link = passed(link, (1.0, 5.510, 4e6))
    assert on_link.busy_s == pytest.approx([0.5]) and on_link.wait_s == pytest.approx([0.0])


def test_a_message_that_went_just_before_a_cut_without_an_end_has_not_waited() -> None:
    on_link = passed(changing((10.0, Link(0.010, 8e6, loss_ratio=1.0))), (9.9, 10.02, 1e6))
    assert on_link.wait_s == pytest.approx([0.0]) and 0 < on_link.busy_s[0] <= 0.12

"""Links in force under any events: against a reading of the rules that asks every event at every instant."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.links import Link
from testbed.experiments import events as events_module
from testbed.experiments.event_table import EventTable
from testbed.experiments.events import network_changes
from testbed.experiments.experiment import LinkPlans

SITES = {"c": "B", "s": "A", "t": "A", "u": "C"}
LINKS = {
    (a, b): Link(0.01 * (1 + abs(i - j)), 1e8, 0.001)
    for i, a in enumerate(SITES)
    for j, b in enumerate(SITES)
    if a != b
}
PLACES: list[dict[str, Any]] = [
    {"link": ["A", "B"]},
    {"link": ["c", "s"], "direction": "forward"},
    {"site": "A"},
    {"site": "u"},
    {"partition": ["C"]},
]


@st.composite
def tables(draw: st.DrawFn) -> EventTable:
    """One event; instants are on a coarse grid, so that many coincide."""
    table: dict[str, Any] = {"at": f"{draw(st.integers(0, 6))} s", **draw(st.sampled_from(PLACES))}
    if draw(st.booleans()):
        table["for"] = f"{draw(st.integers(1, 6))} s"
    if "partition" in table:
        return EventTable.model_validate(table)
    delays = ["rtt", "rtt_factor", *(["rtt_to"] if "for" in table else [])]
    for keys in (delays, ["rate", "rate_factor"], ["jitter"], ["loss"], ["down"]):
        if draw(st.booleans()):
            key = draw(st.sampled_from(keys))
            number = draw(st.integers(1, 9))
            table[key] = {
                "rtt": f"{number} ms", "rtt_to": f"{10 * number} ms", "jitter": f"{number} ms", "loss": number / 10,
                "rate": f"{number} Mbit/s", "rtt_factor": number / 4, "rate_factor": number / 4, "down": number < 5,
            }[key]  # fmt: skip
    if not table.keys() - {"at", "for", "link", "direction", "site"}:
        table["down"] = True
    return EventTable.model_validate(table)


def concerns(event: EventTable, pair: tuple[str, str]) -> bool:
    ends = [{node, SITES[node]} for node in pair]
    if event.link is not None:
        a, b = event.link
        forward = a in ends[0] and b in ends[1]
        return forward or (event.direction == "both" and a in ends[1] and b in ends[0])
    if event.site is not None:
        return event.site in ends[0] | ends[1]
    inside = [bool(end & set(event.partition or ())) for end in ends]
    return inside[0] != inside[1]


def course(events: list[EventTable], base: Link) -> list[tuple[float, Link]]:
    """The changes of one link, by asking every event at every instant."""
    instants = {event.at for event in events}
    for event in events:
        if event.for_ is not None:
            instants.add(event.at + event.for_)
            if event.rtt_to is not None:
                instants |= {event.at + step for step in range(1, math.ceil(event.for_))}
    begins: dict[int, float] = {}
    now, found = base, []
    for at_s in sorted(instants):
        link, is_down = base, False
        for number, event in enumerate(events):
            if at_s < event.at:
                continue
            if event.rtt_to is not None and event.for_ is not None:
                begin_s = begins.setdefault(number, link.delay_s)
                progress = min((at_s - event.at) / event.for_, 1.0)
                link = replace(link, delay_s=begin_s + progress * (event.rtt_to / 2 - begin_s))
            if event.for_ is not None and at_s >= event.at + event.for_:
                continue
            if event.rtt is not None:
                link = replace(link, delay_s=event.rtt / 2)
            if event.rtt_factor is not None:
                link = replace(link, delay_s=base.delay_s * event.rtt_factor)
            if event.rate is not None:
                link = replace(link, rate_bps=event.rate)
            if event.rate_factor is not None:
                link = replace(link, rate_bps=base.rate_bps * event.rate_factor)
            if event.jitter is not None:
                link = replace(link, jitter_s=event.jitter)
            if event.loss is not None:
                link = replace(link, loss_ratio=event.loss)
            is_down = True if event.partition is not None else is_down if event.down is None else event.down
        jitter_s = min(link.jitter_s, link.delay_s)
        link = replace(link, jitter_s=jitter_s, loss_ratio=1.0 if is_down else link.loss_ratio)
        if link != now:
            found.append((at_s, link))
        now = link
    return found


@given(st.lists(tables(), min_size=1, max_size=7))
def test_links_follow_the_events_as_a_plain_reading_of_the_rules_has_them(events: list[EventTable]) -> None:
    changes = network_changes(LinkPlans(tuple(events)), LINKS, SITES, {})
    assert [change.at_s for change in changes] == sorted({change.at_s for change in changes})
    order = list(LINKS)
    for change in changes:
        assert list(change.links) == sorted(change.links, key=order.index)
    for pair, base in LINKS.items():
        own = [event for event in events if concerns(event, pair)]
        assert [(c.at_s, c.links[pair]) for c in changes if pair in c.links] == course(own, base)


@pytest.mark.parametrize("ends", [True, False])
def test_the_work_grows_with_the_number_of_events_and_not_with_its_square(
    monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    n_events, n_nodes, counts = 400, 30, {"links": 0, "places": 0}
    sites = {"c": "B", **{f"s{i}": "A" for i in range(n_nodes)}}
    links = {(a, b): Link(0.01, 1e8) for a in sites for b in sites if a != b}

    class Counted(Link):
        def __init__(self, *values: float) -> None:
            counts["links"] += 1
            super().__init__(*values)

    def between(*arguments: Any) -> list[tuple[str, str]]:
        counts["places"] += 1
        return [("c", f"s{i}") for i in range(n_nodes)]

    monkeypatch.setattr(events_module, "Link", Counted)
    monkeypatch.setattr(events_module, "between", between)
    row = {"link": ["B", "A"], "direction": "forward", **({"for": "1 s"} if ends else {})}
    events = tuple(
        EventTable.model_validate({"at": f"{n} s", "rate": f"{1 + n % 7} Mbit/s", **row})
        for n in range(n_events)
    )
    changes = network_changes(LinkPlans(events), links, sites, {})
    assert len(changes) == n_events + ends and len(changes[0].links) == n_nodes
    assert counts["links"] <= 2 * n_events + 1  # not once per pair, nor once per event and instant
    assert counts["places"] == 1

"""Computes the links in force at each instant from ``[[network.event]]``.

Every property of a link (delay, rate, jitter, loss, whether it is down) is set by the last event in the file
that is active and changes it; without one the network's own value holds. Factors multiply the network's own
value. A drift (``rtt_to``) begins with the delay that the network and the events above it in the file give at
that instant, reaches ``rtt_to`` in even steps, and stays there.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from policies.links import Link
from testbed.experiments.event_table import EventTable
from testbed.experiments.experiment import NetworkChange
from testbed.experiments.network import cut_jitter
from testbed.experiments.problems import Key, KeyedError, unknown
from testbed.experiments.units import DURATION, RATE

DRIFT_STEP_S = 1.0
_MAX_DRIFT_STEPS = 600

Pair = tuple[str, str]

_log = logging.getLogger(__name__)


def network_changes(
    events: Sequence[EventTable], links: Mapping[Pair, Link], sites: Mapping[str, str]
) -> tuple[NetworkChange, ...]:
    """Return the changes of ``links`` in the order of time; ``links`` and ``sites`` are as in ``Experiment``.

    Every change holds the complete new link of each pair that changes. Raises ``KeyedError`` for a name
    that is neither a site nor a node.
    """
    found = [
        _Event(event, frozenset(_pairs(event, ("network", "event", number), links, sites)[0]))
        for number, event in enumerate(events)
    ]
    instants: dict[float, list[str]] = {}
    for one in found:
        for at_s, why in one.instants():
            instants.setdefault(at_s, []).append(why)
    concerned = [pair for pair in links if any(pair in one.pairs for one in found)]
    begins: dict[tuple[int, Pair], float] = {}
    now = {pair: links[pair] for pair in concerned}
    changes = []
    for at_s in sorted(instants):
        new = {pair: _in_force(found, pair, links[pair], at_s, begins) for pair in concerned}
        different = {pair: link for pair, link in new.items() if link != now[pair]}
        now = new
        if different:
            changes.append(NetworkChange(at_s, different, "; ".join(dict.fromkeys(instants[at_s]))))
    return tuple(changes)


@dataclass(frozen=True)
class _Event:
    table: EventTable
    pairs: frozenset[Pair]

    @property
    def end_at_s(self) -> float:
        return math.inf if self.table.for_ is None else self.table.at + self.table.for_

    def instants(self) -> Iterable[tuple[float, str]]:
        """Yield (instant in s, reason in words) whenever this event may change links."""
        table, what = self.table, said(self.table)
        yield table.at, what
        if table.rtt_to is not None and table.for_ is not None:
            step_s = max(DRIFT_STEP_S, table.for_ / _MAX_DRIFT_STEPS)
            for number in range(1, math.ceil(table.for_ / step_s)):
                yield table.at + number * step_s, what
        if table.for_ is not None:
            yield self.end_at_s, f"the end of: {what}"

    def is_on(self, at_s: float) -> bool:
        return self.table.at <= at_s < self.end_at_s


def _in_force(
    events: Sequence[_Event], pair: Pair, base: Link, at_s: float, begins: dict[tuple[int, Pair], float]
) -> Link:
    """Return the link of ``pair`` at an instant.

    ``begins`` stores the delay (s) with which each drift began.
    """
    link, is_down = base, False
    for number, event in enumerate(events):
        table = event.table
        if pair not in event.pairs or at_s < table.at:
            continue
        if table.rtt_to is not None and table.for_ is not None:
            begin_s = begins.setdefault((number, pair), link.delay_s)
            progress = min((at_s - table.at) / table.for_, 1.0)
            link = replace(link, delay_s=begin_s + progress * (table.rtt_to / 2 - begin_s))
        if not event.is_on(at_s):
            continue
        if table.rtt is not None:
            link = replace(link, delay_s=table.rtt / 2)
        elif table.rtt_factor is not None:
            link = replace(link, delay_s=base.delay_s * table.rtt_factor)
        if table.rate is not None:
            link = replace(link, rate_bps=table.rate)
        elif table.rate_factor is not None:
            link = replace(link, rate_bps=base.rate_bps * table.rate_factor)
        if table.jitter is not None:
            link = replace(link, jitter_s=table.jitter)
        if table.loss is not None:
            link = replace(link, loss_ratio=table.loss)
        if table.partition is not None:
            is_down = True
        elif table.down is not None:
            is_down = table.down
    loss_ratio = 1.0 if is_down else link.loss_ratio
    return replace(link, jitter_s=min(link.jitter_s, link.delay_s), loss_ratio=loss_ratio)


def check_events(events: Sequence[EventTable], links: Mapping[Pair, Link], sites: Mapping[str, str]) -> None:
    """Raise ``KeyedError`` for an event that changes none of ``links``; warn of a jitter that none can have."""
    for number, event in enumerate(events):
        key = ("network", "event", number)
        pairs, where = _pairs(event, key, links, sites)
        if not pairs:
            raise KeyedError(key, f"changes no link: no server uses a link {where}; name other places")
        if event.jitter is not None and event.rtt_to is None:
            alone = [_Event(event, frozenset(pairs))]
            longest_s = max(_in_force(alone, pair, links[pair], event.at, {}).delay_s for pair in pairs)
            if event.jitter > longest_s:
                _log.warning("%s", cut_jitter(f"{'.'.join(map(str, key))}.jitter", event.jitter, longest_s))


def between(
    a: Collection[str], b: Collection[str], links: Iterable[Pair], both_ways: bool = True
) -> list[Pair]:
    """Return the ``links`` from any of ``a`` to any of ``b``; with ``both_ways`` also those back."""
    return [(x, y) for x, y in links if (x in a and y in b) or (both_ways and x in b and y in a)]


def _pairs(
    event: EventTable, key: Key, links: Mapping[Pair, Link], sites: Mapping[str, str]
) -> tuple[list[Pair], str]:
    """Return the ordered pairs of nodes whose links an event changes, and in words where they are."""
    if event.link is not None:
        a, b = (_members(name, (*key, "link", i), sites) for i, name in enumerate(event.link))
        pairs = between(a, b, links, event.direction == "both")
        where = f"between {event.link[0]} and {event.link[1]}"
    elif event.site is not None:
        members = _members(event.site, (*key, "site"), sites)
        pairs = [(x, y) for x, y in links if x in members or y in members]
        where = f"at {event.site}"
    else:
        names = event.partition or []
        inside = set[str]().union(
            *(_members(name, (*key, "partition", i), sites) for i, name in enumerate(names))
        )
        pairs = [(x, y) for x, y in links if (x in inside) != (y in inside)]
        where = f"between {' or '.join(names)} and the rest"
    return pairs, where


def _members(name: str, key: Key, sites: Mapping[str, str]) -> frozenset[str]:
    if members := members_of(name, sites):
        return members
    raise KeyedError(key, unknown_place(name, sites))


def members_of(name: str, sites: Mapping[str, str]) -> frozenset[str]:
    """Return the nodes at the site ``name``, or else the node of that name; empty if there is neither."""
    at_site = frozenset(node for node, site in sites.items() if site == name)
    return at_site or frozenset({name} & sites.keys())


def unknown_place(name: str, sites: Mapping[str, str]) -> str:
    """Return the error sentence for a name that is neither a site nor a node."""
    return unknown("site or node", name, [*dict.fromkeys(sites.values()), *sites])


def said(event: EventTable) -> str:
    """Return an event in a few words, such as "link A to B: loss 20 %"."""
    if event.link is not None:
        where = f"link {event.link[0]} {'to' if event.direction == 'forward' else 'and'} {event.link[1]}"
    elif event.site is not None:
        where = f"site {event.site}"
    else:
        return f"{', '.join(event.partition or [])} cut from the rest"
    effects = []
    if event.down is not None:
        effects.append("down" if event.down else "up")
    if event.loss is not None:
        effects.append(f"loss {100 * event.loss:g} %")
    for value_s, what in ((event.jitter, "jitter"), (event.rtt, "RTT"), (event.rtt_to, "RTT drifts to")):
        if value_s is not None:
            effects.append(f"{what} {DURATION.format(value_s)}")
    if event.rate is not None:
        effects.append(f"rate {RATE.format(event.rate)}")
    for factor, what in ((event.rtt_factor, "RTT"), (event.rate_factor, "rate")):
        if factor is not None:
            effects.append(f"{what} x {factor:g}")
    return f"{where}: {', '.join(effects)}"

"""Computes the links in force at each instant from ``[[network.event]]`` and ``[[network.trace]]``.

A trace replaces the network's own values of its link over time. Every property of a link (delay, rate, jitter,
loss, whether it is down) is then set by the last event in the file that is active and changes it. Factors multiply
what network and trace have. A drift (``rtt_to``) begins with the delay that these and the events above it in the
file give at that instant, reaches ``rtt_to`` in even steps, and stays there.

The time grows with the number of events, not with its square: a link is followed through the instants of its own
events only, with those that are active in lists in order, and links that begin alike and have the same events are
followed once.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from nodes.clock import on_tick
from policies.links import Link, Pair
from testbed.experiments.event_table import EventTable, TraceTable
from testbed.experiments.experiment import LinkPlans, NetworkChange
from testbed.experiments.limits import MAX_LINK_CHANGES
from testbed.experiments.network import cut_jitter
from testbed.experiments.problems import Key, KeyedError, unknown
from testbed.experiments.units import DURATION, RATE

DRIFT_STEP_S = 1.0
_MAX_DRIFT_STEPS = 600

Change = tuple[float, Link]
"""An instant in seconds, and the link from then on."""

_log = logging.getLogger(__name__)


def network_changes(
    plans: LinkPlans,
    links: Mapping[Pair, Link],
    sites: Mapping[str, str],
    most_bps: Mapping[Pair, float],
) -> tuple[NetworkChange, ...]:
    """Return the changes of ``links``, which have the rates that the network states for them, in the order of time.

    ``sites`` are as in ``Experiment``. Every change holds the complete new link of each pair that changes.
    ``most_bps`` has the narrowest shared link on the way of pairs that have one: no change makes them faster.
    Raises ``KeyedError`` for a name that is neither a site nor a node.
    """
    if not plans.events and not plans.traces:
        return ()
    where = _Where(links, sites)
    events: dict[_Place, list[tuple[int, EventTable]]] = {}
    for number, event in enumerate(plans.events):
        events.setdefault(where.of(event, ("network", "event", number)), []).append((number, event))
    steps: list[list[tuple[float, _Step]]] = []
    trace_of: dict[Pair, int] = {}
    for number, trace in enumerate(plans.traces):
        pairs = where.of(trace, ("network", "trace", number)).pairs
        steps.append(_steps(trace, number, plans, len(pairs)))
        trace_of |= dict.fromkeys(pairs, number)
    alike: dict[tuple[Link, float, int | None, tuple[_Place, ...]], list[Pair]] = {}
    for pair, found in where.by_pair().items():
        trace_number = trace_of.get(pair)
        key = links[pair], most_bps.get(pair, math.inf), trace_number, tuple(p for p in found if p in events)
        alike.setdefault(key, []).append(pair)
    whys = _whys(plans, steps)
    changed: dict[float, list[tuple[list[Pair], Link]]] = {}
    for (base, narrowest_bps, trace_number, places), pairs in alike.items():
        own = sorted((one for place in places for one in events[place]), key=itemgetter(0))
        follower = _Follower(base, narrowest_bps, own)
        for at_s, link in follower.changes(() if trace_number is None else steps[trace_number]):
            changed.setdefault(at_s, []).append((pairs, link))
    order = {pair: number for number, pair in enumerate(links)}
    return tuple(
        NetworkChange(at_s, _joined(changed[at_s], order), "; ".join(whys[at_s])) for at_s in sorted(changed)
    )


def _joined(changed: Sequence[tuple[list[Pair], Link]], order: Mapping[Pair, int]) -> dict[Pair, Link]:
    """Return the new links by pair, in the order of the pairs."""
    if len(changed) == 1:
        return dict.fromkeys(*changed[0])
    new = {pair: link for pairs, link in changed for pair in pairs}
    return {pair: new[pair] for pair in sorted(new, key=order.__getitem__)}


class _Step(NamedTuple):
    """What a trace sets; ``None``: as the network has it."""

    rate_bps: float | None = None
    delay_s: float | None = None
    loss_ratio: float | None = None


def _steps(trace: TraceTable, number: int, plans: LinkPlans, n_pairs: int) -> list[tuple[float, _Step]]:
    """Return what a trace of ``n_pairs`` pairs of nodes sets from each of its instants on, with its repetitions.

    Raises ``KeyedError`` if these are too many.
    """
    times_s = trace.times or []
    none = [None] * len(times_s)
    once = [
        _Step(rate or None, None if rtt is None else rtt / 2, 1.0 if rate == 0 else loss)
        for rate, rtt, loss in zip(trace.rates or none, trace.rtts or none, trace.losses or none, strict=True)
    ]
    length_s = math.inf if trace.length is None else trace.length
    until_s, ends_at_s, n_rounds = trace.until, trace.at + length_s, 1
    if trace.repeat:
        if until_s is None:
            until_s = max(plans.traces_end_at_s, ends_at_s)
        ends_at_s = until_s
        if len(once) > 1:  # else it is the same all the time
            n_rounds = math.ceil((until_s - trace.at) / length_s)
    elif until_s is not None:
        ends_at_s = min(ends_at_s, until_s)
    n_changes = n_rounds * len(once) * n_pairs
    if n_changes > MAX_LINK_CHANGES:
        raise KeyedError(
            ("network", "trace", number),
            f"changes the links of {n_pairs:,} pairs of nodes {n_changes:,} times; at most {MAX_LINK_CHANGES:,} are "
            "allowed, so give a longer interval or an earlier until",
        )
    begins_s = (trace.at + turn * length_s if turn else trace.at for turn in range(n_rounds))
    instants = (
        (round(begin_s + at_s, 9), step)
        for begin_s in begins_s
        for at_s, step in zip(times_s, once, strict=True)
    )
    found = [(at_s, step) for at_s, step in instants if at_s < ends_at_s]
    return [*found, (ends_at_s, _Step())] if math.isfinite(ends_at_s) else found


def _whys(plans: LinkPlans, steps: Sequence[Sequence[tuple[float, _Step]]]) -> dict[float, dict[str, None]]:
    """Return in words what begins or ends at each instant, in the order of the file."""
    whys: dict[float, dict[str, None]] = {}
    for number, trace in enumerate(plans.traces):
        what = f"{_link_in_words(trace.link, trace.direction)}: trace"
        for at_s, step in steps[number]:
            whys.setdefault(at_s, {})[f"the end of: {what}" if step == _Step() else what] = None
    for event in plans.events:
        what = said(event)
        whys.setdefault(event.at, {})[what] = None
        for at_s in _drift_instants(event):
            whys.setdefault(at_s, {})[what] = None
        if event.ends_at is not None:
            whys.setdefault(event.ends_at, {})[f"the end of: {what}"] = None
    return whys


def _drift_instants(event: EventTable) -> Iterator[float]:
    """Yield the instants in s between the begin and the end of a drift at which it changes the delay."""
    if event.rtt_to is not None and event.for_ is not None:
        step_s = max(DRIFT_STEP_S, event.for_ / _MAX_DRIFT_STEPS)
        for number in range(1, math.ceil(event.for_ / step_s)):
            yield on_tick(event.at + number * step_s)


class _Follower:
    """Follows one link through the instants of its events.

    ``base`` is the link that the network states, ``narrowest_bps`` its largest rate, ``events`` those that concern it, with
    their numbers in the file, ascending. For each property, the numbers of the active events that set it are kept
    in order, so that the last one is in force.
    """

    def __init__(self, base: Link, narrowest_bps: float, events: Sequence[tuple[int, EventTable]]) -> None:
        self._base = self._own = base
        self._narrowest_bps = narrowest_bps
        self._events = dict(events)
        self._delays: list[int] = []
        self._rates: list[int] = []
        self._jitters: list[int] = []
        self._losses: list[int] = []
        self._downs: list[int] = []
        self._sets: dict[int, list[list[int]]] = {}
        """The lists that each active event is in."""
        self._begin_s: dict[int, float] = {}
        """The delay with which each drift began."""

    def changes(self, steps: Iterable[tuple[float, _Step]]) -> Iterator[Change]:
        """Yield each instant at which the link changes; ``steps`` are those of its trace."""
        instants: list[tuple[float, int | _Step | None, bool]] = [(at_s, step, True) for at_s, step in steps]
        for number, event in self._events.items():
            instants.append((event.at, number, True))
            instants += [(at_s, None, True) for at_s in _drift_instants(event)]
            if event.ends_at is not None:
                instants.append((event.ends_at, number, False))
        instants.sort(key=itemgetter(0))
        now = self._link(0.0)
        for at_s, group in groupby(instants, key=itemgetter(0)):
            begun = []
            for _, what, begins in group:
                if isinstance(what, _Step):
                    self._use(what)
                elif what is not None:
                    self._switch(what, begins)
                    if begins and self._events[what].rtt_to is not None:
                        begun.append(what)
            for number in begun:
                self._begin_s[number] = self._delay_s(bisect_left(self._delays, number), at_s)
                insort(self._delays, number)
            link = self._link(at_s)
            if link != now:
                now = link
                yield at_s, link

    def _use(self, step: _Step) -> None:
        own = self._base
        self._own = Link(
            own.delay_s if step.delay_s is None else step.delay_s,
            own.rate_bps if step.rate_bps is None else step.rate_bps,
            own.jitter_s,
            own.loss_ratio if step.loss_ratio is None else step.loss_ratio,
        )

    def _switch(self, number: int, begins: bool) -> None:
        """Add an event to the lists of what it sets, or remove it. A drift stays in force once it has begun."""
        if not begins:
            for numbers in self._sets.pop(number):
                del numbers[bisect_left(numbers, number)]
            return
        event, sets = self._events[number], []
        if event.rtt is not None or event.rtt_factor is not None:
            sets.append(self._delays)
        if event.rate is not None or event.rate_factor is not None:
            sets.append(self._rates)
        if event.jitter is not None:
            sets.append(self._jitters)
        if event.loss is not None:
            sets.append(self._losses)
        if event.down is not None or event.partition is not None:
            sets.append(self._downs)
        for numbers in sets:
            insort(numbers, number)
        self._sets[number] = sets

    def _delay_s(self, n_first: int, at_s: float) -> float:
        """Return the delay in s that the network, the trace and the first ``n_first`` of the delays' events give."""
        if not n_first:
            return self._own.delay_s
        number = self._delays[n_first - 1]
        event = self._events[number]
        if event.rtt is not None:
            return event.rtt / 2
        if event.rtt_factor is not None:
            return self._own.delay_s * event.rtt_factor
        assert event.rtt_to is not None and event.for_ is not None, "only these set a delay"
        begin_s = self._begin_s[number]
        return begin_s + min((at_s - event.at) / event.for_, 1.0) * (event.rtt_to / 2 - begin_s)

    def _link(self, at_s: float) -> Link:
        own, events = self._own, self._events
        delay_s = self._delay_s(len(self._delays), at_s)
        rate_bps, jitter_s, loss_ratio = own.rate_bps, own.jitter_s, own.loss_ratio
        if self._rates:
            event = events[self._rates[-1]]
            rate_bps = event.rate if event.rate is not None else own.rate_bps * (event.rate_factor or 1.0)
        if self._jitters:
            jitter_s = events[self._jitters[-1]].jitter or 0.0
        if self._losses:
            loss_ratio = events[self._losses[-1]].loss or 0.0
        is_down = bool(self._downs) and events[self._downs[-1]].down is not False
        if is_down or own.loss_ratio >= 1:  # an event's loss does not end what a trace has cut
            loss_ratio = 1.0
        return Link(delay_s, min(rate_bps, self._narrowest_bps), min(jitter_s, delay_s), loss_ratio)


def check_changes(plans: LinkPlans, links: Mapping[Pair, Link], sites: Mapping[str, str]) -> None:
    """Raise ``KeyedError`` for an event or a trace that changes none of ``links``, and for a second trace of a link.

    Warns of a jitter that no link can have.
    """
    where = _Where(links, sites)
    traced: dict[Pair, int] = {}
    for number, trace in enumerate(plans.traces):
        key: Key = ("network", "trace", number)
        for pair in where.changing(trace, key).pairs:
            if pair in traced:
                raise KeyedError(
                    key,
                    f"is a second trace for the link {pair[0]} to {pair[1]} beside network.trace.{traced[pair]}; "
                    "keep one of the two",
                )
            traced[pair] = number
    for number, event in enumerate(plans.events):
        key = ("network", "event", number)
        place = where.changing(event, key)
        if event.jitter is not None and event.rtt_to is None:
            longest_s = (
                event.rtt / 2 if event.rtt is not None else place.longest_s * (event.rtt_factor or 1.0)
            )
            if event.jitter > longest_s:
                _log.warning("%s", cut_jitter(f"{'.'.join(map(str, key))}.jitter", event.jitter, longest_s))


@dataclass(frozen=True, eq=False)
class _Place:
    """The ordered pairs of nodes whose links an event or a trace changes, and in words where they are."""

    pairs: Sequence[Pair]
    where: str
    longest_s: float
    """The longest delay of these links in the network."""


class _Where:
    """Looks up the links that events and traces change; each combination of names once."""

    def __init__(self, links: Mapping[Pair, Link], sites: Mapping[str, str]) -> None:
        self._links = links
        self._sites = sites
        self._found: dict[tuple[str, tuple[str, ...]], _Place] = {}

    def of(self, table: EventTable | TraceTable, key: Key) -> _Place:
        """Return the place of ``table``. Raises ``KeyedError`` below ``key`` for an unknown name."""
        named: str
        if isinstance(table, TraceTable) or table.link is not None:
            named, names = table.direction, tuple(table.link or ())
        elif table.site is not None:
            named, names = "site", (table.site,)
        else:
            named, names = "partition", tuple(table.partition or ())
        if (found := self._found.get((named, names))) is None:
            pairs, where = self._pairs(named, names, key)
            longest_s = max((self._links[pair].delay_s for pair in pairs), default=0.0)
            found = self._found[named, names] = _Place(pairs, where, longest_s)
        return found

    def changing(self, table: EventTable | TraceTable, key: Key) -> _Place:
        """Return the place of ``table``, as ``of``. Raises ``KeyedError`` if there is no link, too."""
        place = self.of(table, key)
        if not place.pairs:
            raise KeyedError(key, f"changes no link: no server uses a link {place.where}; name other places")
        return place

    def by_pair(self) -> dict[Pair, list[_Place]]:
        """Return the places that were looked up by the pairs in them, in the order of the links."""
        found: dict[Pair, list[_Place]] = {}
        for place in self._found.values():
            for pair in place.pairs:
                found.setdefault(pair, []).append(place)
        return {pair: found[pair] for pair in self._links if pair in found}

    def _pairs(self, named: str, names: tuple[str, ...], key: Key) -> tuple[list[Pair], str]:
        """Return the pairs, and in words where they are; ``named``: "site", "partition" or a link's direction."""
        if named == "site":
            members = _members(names[0], (*key, "site"), self._sites)
            return [(x, y) for x, y in self._links if x in members or y in members], f"at {names[0]}"
        at = "partition" if named == "partition" else "link"
        found = [_members(name, (*key, at, i), self._sites) for i, name in enumerate(names)]
        if named == "partition":
            inside = frozenset[str]().union(*found)
            pairs = [(x, y) for x, y in self._links if (x in inside) != (y in inside)]
            return pairs, f"between {' or '.join(names)} and the rest"
        a, b = found
        return between(a, b, self._links, named == "both"), f"between {names[0]} and {names[1]}"


def between(
    a: Collection[str], b: Collection[str], links: Iterable[Pair], both_ways: bool = True
) -> list[Pair]:
    """Return the ``links`` from any of ``a`` to any of ``b``; with ``both_ways`` also those back."""
    return [(x, y) for x, y in links if (x in a and y in b) or (both_ways and x in b and y in a)]


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


def _link_in_words(ends: Sequence[str], direction: str) -> str:
    return f"link {ends[0]} {'to' if direction == 'forward' else 'and'} {ends[1]}"


def said(event: EventTable) -> str:
    """Return an event in a few words, such as "link A to B: loss 20 %"."""
    if event.link is not None:
        where = _link_in_words(event.link, event.direction)
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

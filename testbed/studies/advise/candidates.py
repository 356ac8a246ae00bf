"""What could be added: servers (``a100@Cluster1=3.5``) and wider links of sites (``uplink@home=100 Mbit/s=2``);
and the scenario with that, or with servers removed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

from testbed.errors import UserError
from testbed.experiments import Change
from testbed.experiments.experiment import Experiment
from testbed.experiments.problems import unknown
from testbed.experiments.units import RATE

Counts = tuple[int, ...]
"""How many of each candidate are added, in the order of the candidates."""
_FORM = "LIKE@PLACE=COST, for example a100@Cluster1=3.5"
_LINK_FORM = "LINK@PLACE=RATE=COST, for example uplink@home=100 Mbit/s=2, or without =COST, which is then 1"
_PRICES = "cost_per_hour", "power_idle", "power_busy"
"""Keys that all servers have, or none."""
WAYS = {"uplink": "up", "downlink": "down"}
"""Words for a site's own links, and their keys in ``[[sites]]``."""


class Candidate(NamedTuple):
    """A kind of server that can be added at one place, and its cost.

    ``like``: a server of the scenario, whose hardware and memory the new one gets, or the name of a hardware,
    with the memory of its profile. ``place``: a site, or a node of the scenario, which stands for its site.
    """

    like: str
    place: str
    cost: Fraction

    @property
    def name(self) -> str:
        return f"{self.like}@{self.place}"


class WiderLink(NamedTuple):
    """A wider link of a site, and its cost. ``link``: a word of ``WAYS``; ``rate_bps``: its rate then.

    ``place``: a site, or a node of the scenario, which stands for its site.
    """

    link: str
    place: str
    rate_bps: float
    cost: Fraction

    @property
    def name(self) -> str:
        return f"{self.link}@{self.place}={RATE.format(self.rate_bps)}"


Addition = Candidate | WiderLink


def parse_candidates(text: str) -> tuple[Addition, ...]:
    """Parses ``LIKE@PLACE=COST`` and ``LINK@PLACE=RATE=COST``, several of them separated by commas.

    Raises ``UserError`` if the form is another.
    """
    found: list[Addition] = []
    for part in text.split(","):
        is_link = re.split("[@=]", part, maxsplit=1)[0].strip() in WAYS
        candidate = _link(part.strip()) if is_link else _server(part.strip())
        if any(other.name == candidate.name for other in found):
            raise UserError(f"--candidates: {candidate.name} is given twice; leave one out")
        found.append(candidate)
    return tuple(found)


def _server(text: str) -> Candidate:
    what, equals, cost = text.rpartition("=")
    like, at, place = what.strip().partition("@")
    if not (equals and at and like and place):
        raise UserError(f"--candidates: {text or 'nothing'!r} must be {_FORM}")
    return Candidate(like, place, parse_cost(cost, f"--candidates: the cost of {like}@{place}"))


def _link(text: str) -> WiderLink:
    what, _, how = text.partition("=")
    link, _, place = (word.strip() for word in what.partition("@"))
    rate, priced, cost = how.partition("=")
    if not (place and rate.strip()):
        raise UserError(f"--candidates: {text!r} must be {_LINK_FORM}")
    try:
        rate_bps = RATE.parse(rate.strip())
    except ValueError as error:
        raise UserError(f"--candidates: {link}@{place}: {error}; write {_LINK_FORM}") from None
    price = parse_cost(cost, f"--candidates: the cost of {link}@{place}") if priced else Fraction(1)
    return WiderLink(link, place, rate_bps, price)


def parse_cost(text: str, what: str) -> Fraction:
    """Parses a number above 0 exactly, as a fraction. Raises ``UserError``, with a message that begins with
    ``what``.
    """
    try:
        is_cost = 0 < float(text) < math.inf
    except ValueError:
        is_cost = False
    if not is_cost:
        raise UserError(f"{what} must be a number above 0, not {text.strip() or 'nothing'}")
    return Fraction(text.strip())


@dataclass(frozen=True)
class Fleet:
    """The servers, clients and sites' links of a scenario for one seed: an entry per server, at a fixed site.

    A server that is added or lost therefore does not move the others, even if the seed draws their sites.
    """

    servers: tuple[Mapping[str, Any], ...]
    clients: tuple[Mapping[str, Any], ...]
    sites: Mapping[str, str]
    """The site of each node."""
    own_links: tuple[Mapping[str, Any], ...] = ()
    """The rows of ``[[sites]]``."""
    named: frozenset[str] = frozenset()
    """Names in faults, events and traces: what these do to a server, they do not do to others like it."""

    @classmethod
    def of(cls, experiment: Experiment) -> Fleet:
        """Returns the fleet of a resolved scenario."""
        groups = [group for group in experiment.document["servers"] for _ in range(group["count"])]
        servers = [
            {**group, "count": 1, "name": spec.name}
            for group, spec in zip(groups, experiment.problem.servers, strict=True)
        ]
        own_links = tuple(experiment.document.get("sites", ()))
        network = experiment.document["network"]
        named = frozenset(
            _texts([experiment.document.get("fault"), network.get("event"), network.get("trace")])
        )
        clients = tuple(experiment.document["clients"])
        return cls(tuple(servers), clients, dict(experiment.sites), own_links, named)

    def site_of(self, place: str) -> str:
        """Returns the site that ``place`` means: itself, or that of the node of this name."""
        return place if place in self.sites.values() else self.sites.get(place, place)

    def rate_bps(self, wider: WiderLink) -> float:
        """Returns the link's rate now. Raises ``UserError`` if there is no such link."""
        site, way = self.site_of(wider.place), WAYS[wider.link]
        if site not in self.sites.values():
            sites = sorted(set(self.sites.values()))
            raise UserError(f"--candidates: {wider.name}: {unknown('site', wider.place, sites)}")
        limited = {row["name"]: RATE.parse(row[way]) for row in self.own_links if way in row}
        if site not in limited:
            valid = f"valid: {', '.join(limited)}" if limited else f"give it one in [[sites]], with {way}"
            raise UserError(
                f"--candidates: {wider.name}: {site} has no {wider.link} of its own to widen; {valid}"
            )
        return limited[site]

    def like(self, candidate: Candidate) -> dict[str, Any]:
        """Returns the scenario's entry for a server that is added, with the name still missing or another
        server's.
        """
        own = next((server for server in self.servers if server["name"] == candidate.like), None)
        what = self._priced(candidate) if own is None else own
        return {**what, "site": self.site_of(candidate.place), "present": True}

    def _priced(self, candidate: Candidate) -> dict[str, Any]:
        """Returns a server of a hardware by name, with price and powers of the scenario's servers of that hardware.

        Raises ``UserError`` if all servers have such keys and none is of that hardware.
        """
        needed = [key for key in _PRICES if key in self.servers[0]]
        alike = next((server for server in self.servers if server["hardware"] == candidate.like), None)
        if needed and alike is None:
            raise UserError(
                f"--candidates: {candidate.name}: the servers have {needed[0]}, and no server is a {candidate.like}; add a "
                "server of the scenario by its name"
            )
        return {"hardware": candidate.like, **{key: alike[key] for key in needed if alike and key in alike}}

    def once(self, additions: Sequence[Addition]) -> list[Hashable]:
        """Returns for each addition the link of which only one can be chosen; None: any number of it can be."""
        return [
            (self.site_of(each.place), each.link) if isinstance(each, WiderLink) else None
            for each in additions
        ]

    def changes(
        self, additions: Sequence[Addition], counts: Counts, lost: int | None = None
    ) -> tuple[Change, ...]:
        """Returns changes to the scenario that add and remove servers, and widen links.

        ``counts``: how many of each addition are chosen. ``lost``: index of a server that is removed.
        """
        servers = [server for number, server in enumerate(self.servers) if number != lost]
        taken = set(self.sites)
        wider: dict[str, dict[str, str]] = {}
        for candidate, n in zip(additions, counts, strict=True):
            if isinstance(candidate, WiderLink):
                if n:
                    links = wider.setdefault(self.site_of(candidate.place), {})
                    links[WAYS[candidate.link]] = RATE.format(candidate.rate_bps)
                continue
            entry = self.like(candidate)
            for _ in range(n):
                names = (f"{entry['hardware']}-{number}" for number in count())
                name = next(name for name in names if name not in taken)
                taken.add(name)
                servers.append({**entry, "name": name})
        changes = (
            Change("servers", [dict(server) for server in servers]),
            Change("clients", [dict(client) for client in self.clients]),
        )
        if not self.own_links:
            return changes
        gone = None if lost is None else self.servers[lost]["name"]
        used = {site for node, site in self.sites.items() if node != gone}
        used |= {server["site"] for server in servers}
        rows = [{**row, **wider.get(row["name"], {})} for row in self.own_links if row["name"] in used]
        return (*changes, Change("sites", rows if len(used) > 1 else []))

    @property
    def losses(self) -> list[tuple[int, int]]:
        """The losses to judge: for each group of equal servers at one site, the last one's index and the
        group's size.

        Servers are equal if all their keys but the name are, and no fault or change of links names one. Empty if the
        scenario has only one server: it would have none left.
        """
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, server in enumerate(self.servers):
            if server["present"]:
                keys = (key for key in sorted(server) if key != "name" or server["name"] in self.named)
                alike.setdefault(tuple((key, server[key]) for key in keys), []).append(number)
        one_alone = sum(map(len, alike.values())) < 2
        return [] if one_alone else [(numbers[-1], len(numbers)) for numbers in alike.values()]


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts in a value of a scenario."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each)

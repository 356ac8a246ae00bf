"""Servers that could be added (``a100@Cluster1=3.5``), and the scenario with servers added or removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

from testbed.errors import UserError
from testbed.experiments import Change
from testbed.experiments.experiment import Experiment

Counts = tuple[int, ...]
"""How many of each candidate are added, in the order of the candidates."""
_FORM = "LIKE@PLACE=COST, for example a100@Cluster1=3.5"


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


def parse_candidates(text: str) -> tuple[Candidate, ...]:
    """Parses ``LIKE@PLACE=COST``, several of them separated by commas. Raises ``UserError`` if the form is
    another.
    """
    found: list[Candidate] = []
    for part in text.split(","):
        what, equals, cost = part.strip().rpartition("=")
        like, at, place = what.strip().partition("@")
        if not (equals and at and like and place):
            raise UserError(f"--candidates: {part.strip() or 'nothing'!r} must be {_FORM}")
        candidate = Candidate(like, place, parse_cost(cost, f"--candidates: the cost of {like}@{place}"))
        if any(other.name == candidate.name for other in found):
            raise UserError(f"--candidates: {candidate.name} is given twice; leave one out")
        found.append(candidate)
    return tuple(found)


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
    """The servers and clients of a scenario for one seed: one entry per server, each at a fixed site.

    A server that is added or lost therefore does not move the others, even if the seed draws their sites.
    """

    servers: tuple[Mapping[str, Any], ...]
    clients: tuple[Mapping[str, Any], ...]
    sites: Mapping[str, str]

    @classmethod
    def of(cls, experiment: Experiment) -> Fleet:
        """Returns the fleet of a resolved scenario."""
        groups = [group for group in experiment.document["servers"] for _ in range(group["count"])]
        servers = [
            {**group, "count": 1, "name": spec.name}
            for group, spec in zip(groups, experiment.problem.servers, strict=True)
        ]
        return cls(tuple(servers), tuple(experiment.document["clients"]), dict(experiment.sites))

    def like(self, candidate: Candidate) -> dict[str, Any]:
        """Returns the scenario's entry for a server that is added, with the name still missing or another
        server's.
        """
        own = next((server for server in self.servers if server["name"] == candidate.like), None)
        what = {"hardware": candidate.like} if own is None else own
        site = candidate.place
        if site not in self.sites.values():
            site = self.sites.get(site, site)
        return {**what, "site": site, "present": True}

    def changes(
        self, candidates: Sequence[Candidate], counts: Counts, lost: int | None = None
    ) -> tuple[Change, ...]:
        """Returns changes to the scenario that add and remove servers.

        ``counts``: how many of each candidate are added. ``lost``: index of a server that is removed.
        """
        servers = [server for number, server in enumerate(self.servers) if number != lost]
        taken = set(self.sites)
        for candidate, n in zip(candidates, counts, strict=True):
            entry = self.like(candidate)
            for _ in range(n):
                names = (f"{entry['hardware']}-{number}" for number in count())
                name = next(name for name in names if name not in taken)
                taken.add(name)
                servers.append({**entry, "name": name})
        return (
            Change("servers", [dict(server) for server in servers]),
            Change("clients", [dict(client) for client in self.clients]),
        )

    @property
    def losses(self) -> list[tuple[int, int]]:
        """The losses to judge: for each group of equal servers at one site, the last one's index and the
        group's size.

        Servers are equal if hardware and memory are. Empty if the scenario has only one server: it would have
        none left.
        """
        alike: dict[tuple[Any, ...], list[int]] = {}
        for number, server in enumerate(self.servers):
            if server["present"]:
                what = server["hardware"], server.get("memory"), server["site"]
                alike.setdefault(what, []).append(number)
        one_alone = sum(map(len, alike.values())) < 2
        return [] if one_alone else [(numbers[-1], len(numbers)) for numbers in alike.values()]

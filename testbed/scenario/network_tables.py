"""``[network]`` in its three kinds: a row per pair of sites, matrices, a topology; see ``docs/networks.md``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from netem.spec import SUBNET
from testbed.scenario.event_table import EventTable
from testbed.scenario.fields import BitsPerSecond, Name, Positive, Ratio, Seconds, Table, quantity, rule
from testbed.scenario.problems import unknown
from testbed.scenario.units import DURATION, RATE, Dimension

Loss = Annotated[Ratio, Field(lt=1)]


def _place(value: list[float]) -> list[float]:
    if not (abs(value[0]) <= 180 and abs(value[1]) <= 90):
        raise rule("must be a longitude from -180 to 180 and a latitude from -90 to 90")
    return value


Place = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_place)]
"""Longitude and latitude in degrees, east and north positive."""


class NetworkTable(Table):
    """What every kind of network has. ``jitter`` and ``loss`` are those of links that state none.

    ``places``: where sites are, for maps alone. A link's jitter is at most its one-way delay: a larger one counts as that.
    ``subnet`` has the nodes' addresses.
    """

    backend: Literal["auto", "netem", "fabric", "memory", "loopback", "hosts"] = "auto"
    mtu: Annotated[int, Field(ge=576, le=65535)] = 1500
    subnet: str = str(SUBNET)
    keep_cpus_awake: bool = True
    jitter: Seconds = 0.0
    loss: Loss = 0.0
    event: list[EventTable] | None = None
    places: dict[Name, Place] | None = None


class PairRow(Table):
    """Both directions between two sites (``sites``, ``rtt``), or one (``from``, ``to``, ``delay``)."""

    sites: Annotated[list[Name], Field(min_length=2, max_length=2)] | None = None
    rtt: Seconds | None = None
    from_: Annotated[Name | None, Field(alias="from")] = None
    to: Name | None = None
    delay: Seconds | None = None
    rate: BitsPerSecond
    jitter: Seconds | None = None
    loss: Loss | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        both = [self.sites, self.rtt]
        one = [self.from_, self.to, self.delay]
        symmetric = None not in both and one == [None] * 3
        directed = None not in one and both == [None] * 2
        if not symmetric and not directed:
            raise rule("needs either sites, rtt and rate, or from, to, delay (one way) and rate")
        delay_s = self.rtt / 2 if self.rtt is not None else self.delay
        if self.jitter is not None and delay_s is not None and self.jitter > delay_s:
            raise rule(f"must not exceed the one-way delay, {DURATION.format(delay_s)}", "jitter")
        return self


class ClustersTable(NetworkTable):
    """``[network]`` with a row per pair of sites."""

    kind: Literal["clusters"]
    pairs: Annotated[list[PairRow], Field(min_length=1)]


def _rate_kind(value: Any) -> str:
    return "matrix" if isinstance(value, list) else "text"


class PathRow(Table):
    """The shared links that packets of a pair of sites pass, in order."""

    from_: Annotated[Name, Field(alias="from")]
    to: Name
    links: Annotated[list[str], Field(min_length=1)]


def why_not_square(matrix: Any, n: int) -> str | None:
    """What a list of lists must be to have a row and a column for each of ``n`` sites; ``None`` if it is that."""
    is_list = isinstance(matrix, list) and len(matrix) == n
    if is_list and all(isinstance(row, list) and len(row) == n for row in matrix):
        return None
    return f"must be a {n} x {n} matrix, a row and a column per site"


class MatrixTable(NetworkTable):
    """``[network]`` with full matrices over ``sites``, here or in ``file``.

    The one-way delay from site i to site j is ``rtt[i][j] / 2``, so an asymmetric matrix gives
    different delays in the two directions. ``rate`` is one rate or a matrix in ``rate_unit``.
    Pairs whose ``paths`` name the same link of ``shared`` compete for its rate.
    """

    kind: Literal["matrix"]
    file: Annotated[str, Field(min_length=1)] | None = None
    sites: Annotated[list[Name], Field(min_length=1)] | None = None
    rtt: list[list[Annotated[float, Field(ge=0)]]] | None = None
    rtt_unit: str | None = None
    rate: (
        Annotated[
            Annotated[str, Tag("text")] | Annotated[list[list[Positive]], Tag("matrix")],
            Discriminator(_rate_kind),
        ]
        | None
    ) = None
    rate_unit: str | None = None
    shared: dict[str, BitsPerSecond] | None = None
    paths: list[PathRow] | None = None

    @field_validator("rate", mode="before")
    @classmethod
    def _rate(cls, value: Any) -> Any:
        if not isinstance(value, list | str):
            raise rule(f'must be text such as "{RATE.example}" or a matrix of numbers with rate_unit')
        if isinstance(value, str) and quantity(RATE)(value) == 0:
            raise rule(f'must be more than 0, not "{value}"')
        return value

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.file is not None:
            for key in ("sites", "rtt"):
                if getattr(self, key) is not None:
                    raise rule("is only for matrices that are written here; file has its own", key)
            return self
        for key in ("sites", "rtt", "rtt_unit", "rate"):
            if getattr(self, key) is None:
                instead = "" if key == "rate" else ", or give the file of a matrix"
                raise rule(f"is missing{instead}", key)
        assert self.sites is not None and self.rtt is not None and self.rate is not None
        self._check_square(self.sites, self.rtt, self.rate)
        self._check_paths(self.sites)
        return self

    def _check_square(self, sites: list[str], rtt: list[list[float]], rate: str | list[list[float]]) -> None:
        n = len(sites)
        if len(set(sites)) != n:
            raise rule("a site is listed twice", "sites")
        matrices: list[tuple[str, str, list[list[float]], Dimension, str | None]] = [
            ("rtt", "rtt_unit", rtt, DURATION, self.rtt_unit)
        ]
        if isinstance(rate, str):
            if self.rate_unit is not None:
                raise rule("is only for a rate matrix; rate has its own unit", "rate_unit")
        else:
            matrices.append(("rate", "rate_unit", rate, RATE, self.rate_unit))
        for key, unit_key, matrix, dimension, unit in matrices:
            why_not = why_not_square(matrix, n)
            if why_not is not None:
                raise rule(why_not, key)
            if unit is None:
                raise rule(f"is missing; give one of {', '.join(dimension.units)}", unit_key)
            if unit not in dimension.units:
                raise rule(unknown("unit", unit, dimension.units), unit_key)
            for value in (min(map(min, matrix)), max(map(max, matrix))):
                try:
                    dimension.of(value, unit)
                except ValueError as error:
                    raise rule(str(error), key) from None

    def _check_paths(self, sites: list[str]) -> None:
        if (self.shared is None) != (self.paths is None):
            raise rule(
                "is missing; shared links need both shared and paths", "paths" if self.shared else "shared"
            )
        seen: set[tuple[str, str]] = set()
        for row in self.paths or ():
            for site in (row.from_, row.to):
                if site not in sites:
                    raise rule(unknown("site", site, sites), "paths")
            for link in row.links:
                if link not in (self.shared or {}):
                    raise rule(unknown("shared link", link, self.shared or {}), "paths")
            if (row.from_, row.to) in seen:
                raise rule(f"has two rows from {row.from_} to {row.to}; keep one of them", "paths")
            seen.add((row.from_, row.to))


class TopologyNetworkTable(NetworkTable):
    """``[network]`` along the delay-shortest paths of a topology, whose node names are the sites.

    ``delays``: "given" takes the topology's, "fibre" great-circle distance x ``detour`` / 200 km/ms.
    ``share_links``: pairs whose paths have a link in common compete for its rate.
    """

    kind: Literal["topology"]
    topology: Annotated[str, Field(min_length=1)]
    delays: Literal["given", "fibre"] = "given"
    detour: Annotated[float, Field(ge=1, le=100)] | None = None
    share_links: bool = False

    @model_validator(mode="after")
    def _detour_of_fibre(self) -> Self:
        if self.detour is not None and self.delays != "fibre":
            raise rule('is only for delays = "fibre"', "detour")
        return self

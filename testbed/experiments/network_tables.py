"""The keys of ``[network]``: rows per pair of sites, matrices, or a topology (docs/networks.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from netem.networks import AUTO, NETWORKS
from netem.spec import SUBNET
from policies.problem import Wire
from testbed.experiments.event_table import EventTable, TraceTable
from testbed.experiments.fields import BitsPerSecond, Name, Positive, Ratio, Seconds, Table, quantity, rule
from testbed.experiments.problems import unknown
from testbed.experiments.units import DURATION, RATE, Dimension

Loss = Annotated[Ratio, Field(lt=1)]
if TYPE_CHECKING:
    NetworkName = str
else:  # mypy knows no names that are made at run time
    NetworkName = Literal[AUTO, *NETWORKS]


def _place(value: list[float]) -> list[float]:
    if not (abs(value[0]) <= 180 and abs(value[1]) <= 90):
        raise rule("must be a longitude from -180 to 180 and a latitude from -90 to 90")
    return value


Place = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_place)]
"""Longitude and latitude in degrees, east and north positive."""


class NetworkTable(Table):
    """``[network]``: the keys that all kinds of network have.

    - ``backend``: what carries the links; "auto" chooses.
    - ``mtu``: largest IP packet in bytes. ``subnet``: the IPv4 network of the nodes' addresses.
    - ``wire``: hidden states are sent as 16-bit floating point, or as 8-bit whole numbers with a scale per token; without it, as
      they are computed.
    - ``keep_cpus_awake``: no CPU of the machine sleeps during a run in real time.
    - ``jitter`` and ``loss`` (a share of packets): of links that have none of their own. A jitter larger than
      a link's one-way delay counts as that delay.
    - ``event``: changes of links while requests are served. ``trace``: links that follow a recording.
    - ``places``: [longitude, latitude] of sites in degrees, used for maps only.
    """

    backend: NetworkName = AUTO
    mtu: Annotated[int, Field(ge=576, le=65535)] = 1500
    subnet: str = str(SUBNET)
    wire: Wire | None = None
    keep_cpus_awake: bool = True
    jitter: Seconds = 0.0
    loss: Loss = 0.0
    event: list[EventTable] | None = None
    trace: list[TraceTable] | None = None
    places: dict[Name, Place] | None = None


class PairRow(Table):
    """A row of ``network.pairs``: the links between two ``sites``, or one ``from`` a site ``to`` another.

    With ``sites`` each direction has half of ``rtt`` as its delay. With ``from`` and ``to``, ``delay`` is one
    way.
    """

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
            raise rule("must have either sites, rtt and rate, or from, to, delay (one way) and rate")
        delay_s = self.rtt / 2 if self.rtt is not None else self.delay
        if self.jitter is not None and delay_s is not None and self.jitter > delay_s:
            raise rule(f"must be at most the one-way delay, {DURATION.format(delay_s)}", "jitter")
        return self


class ClustersTable(NetworkTable):
    """``[network]`` of kind "clusters": a row per pair of sites, and per site for links inside it."""

    kind: Literal["clusters"]
    pairs: Annotated[list[PairRow], Field(min_length=1)]


def _rate_kind(value: Any) -> str:
    return "matrix" if isinstance(value, list) else "text"


class PathRow(Table):
    """A row of ``network.paths``: names of the shared ``links`` on the path between two sites, in order."""

    from_: Annotated[Name, Field(alias="from")]
    to: Name
    links: Annotated[list[str], Field(min_length=1)]


def why_not_square(matrix: Any, n: int) -> str | None:
    """Return why ``matrix`` is not an n x n list of lists; ``None`` if it is one."""
    is_list = isinstance(matrix, list) and len(matrix) == n
    if is_list and all(isinstance(row, list) and len(row) == n for row in matrix):
        return None
    return f"must be a {n} x {n} matrix, a row and a column per site"


class MatrixTable(NetworkTable):
    """``[network]`` of kind "matrix": full matrices over ``sites``, here or in ``file`` (CSV or JSON).

    The one-way delay from site i to site j is ``rtt[i][j] / 2`` in ``rtt_unit``, so an asymmetric matrix
    means different delays in the two directions. ``rate`` is text with a unit, for all pairs, or a matrix in
    ``rate_unit``. ``shared`` are rates of shared links by name: pairs whose ``paths`` contain the same shared
    link compete for its rate.
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
                    raise rule("is also in network.file; leave out one of the two", key)
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
            raise rule("lists a site twice; each site must occur once", "sites")
        matrices: list[tuple[str, str, list[list[float]], Dimension, str | None]] = [
            ("rtt", "rtt_unit", rtt, DURATION, self.rtt_unit)
        ]
        if isinstance(rate, str):
            if self.rate_unit is not None:
                raise rule("is only for a matrix of rates; leave it out", "rate_unit")
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


class SiteTable(Table):
    """``[[sites]]``: a site's own links, which all its pairs with other sites share.

    ``up`` carries what its nodes send to other sites, ``down`` what they receive from them; without a value,
    that direction is not limited. Links inside the site do not use them. ``carbon_g_per_kwh`` is the carbon
    dioxide of the site's electricity, in grams. ``region`` is a name that sites share, for policies that want it.
    """

    name: Name
    up: BitsPerSecond | None = None
    down: BitsPerSecond | None = None
    carbon_g_per_kwh: Annotated[float, Field(ge=0, le=1e6)] | None = None
    region: Name | None = None

    @property
    def has_links(self) -> bool:
        """Whether the site has links of its own."""
        return self.up is not None or self.down is not None

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if not self.has_links and self.carbon_g_per_kwh is None and self.region is None:
            raise rule("says nothing of its site; give up, down, region or carbon_g_per_kwh")
        return self


class TopologyNetworkTable(NetworkTable):
    """``[network]`` of kind "topology": sites are a topology's nodes, and paths have the least delay.

    ``topology`` is a shipped topology's name or a file. ``delays = "given"`` uses the delays of the
    topology's links; "fibre" computes them as great-circle distance x ``detour`` (default 1.5) / 200 km/ms.
    ``default_rate`` (default 1 Gbit/s) is that of links without a rate in the topology's file. ``delay_unit`` is that of
    the delays in a file of other tools, which does not state it (default: microseconds in REPETITA's files). With
    ``share_links``, pairs whose paths have a link in common compete for its rate.
    """

    kind: Literal["topology"]
    topology: Annotated[str, Field(min_length=1)]
    delays: Literal["given", "fibre"] = "given"
    detour: Annotated[float, Field(ge=1, le=100)] | None = None
    default_rate: BitsPerSecond | None = None
    delay_unit: Literal["s", "ms", "us"] | None = None
    share_links: bool = False

    @model_validator(mode="after")
    def _detour_of_fibre(self) -> Self:
        if self.detour is not None and self.delays != "fibre":
            raise rule('is only for delays = "fibre"; set that, or leave detour out', "detour")
        return self

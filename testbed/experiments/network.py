"""Computes links between nodes from those between sites, and from these the times that policies see."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network

from netem.spec import SPARE_ADDRESSES
from netem.tcp import RECEIVE_WINDOW_BYTES
from netem.topology import TopologyNode, too_fast
from policies.link_rates import LinkRates, Shared
from policies.links import HEADER_BYTES, UNSENT_BYTES, Link
from policies.problem import Linear, Matrix, ModelSpec, OneWayDelays, Transmissions
from testbed.experiments.experiment import Calibration
from testbed.experiments.network_tables import ClustersTable, MatrixTable, NetworkTable
from testbed.experiments.problems import Key, KeyedError, unknown
from testbed.experiments.shared_links import SharedLinks
from testbed.experiments.units import DURATION, RATE

SitePair = tuple[str, str]
_IMPLAUSIBLE_S = 2.0
"""A geostationary satellite takes 0.3 s one way."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A node at its site. ``key`` is the scenario's key that names the site."""

    name: str
    site: str
    key: Key


def _link(
    table: NetworkTable, delay_s: float, rate_bps: float, jitter_s: float | None, loss_ratio: float | None
) -> Link:
    """Return a link. A jitter or loss of ``None`` is that of the network; jitter is at most the delay."""
    jitter_s = table.jitter if jitter_s is None else jitter_s
    return Link(delay_s, rate_bps, min(jitter_s, delay_s), table.loss if loss_ratio is None else loss_ratio)


def _directions(table: ClustersTable) -> Iterator[tuple[int, SitePair, Link]]:
    for index, row in enumerate(table.pairs):
        if row.sites is not None and row.rtt is not None:
            a, b = row.sites
            link = _link(table, row.rtt / 2, row.rate, row.jitter, row.loss)
            yield index, (a, b), link
            if a != b:
                yield index, (b, a), link
        elif row.from_ is not None and row.to is not None and row.delay is not None:
            yield index, (row.from_, row.to), _link(table, row.delay, row.rate, row.jitter, row.loss)


def _from_rows(table: ClustersTable) -> dict[SitePair, Link]:
    links: dict[SitePair, Link] = {}
    row_of: dict[SitePair, int] = {}
    for index, pair, link in _directions(table):
        if pair in links:
            first = row_of[pair]
            how = "contradicts" if links[pair] != link else "repeats"
            raise KeyedError(
                ("network", "pairs", index),
                f"{how} network.pairs.{first} for {pair[0]} to {pair[1]}; keep one of the two rows",
            )
        links[pair] = link
        row_of[pair] = index
    return links


def _from_matrix(table: MatrixTable) -> dict[SitePair, Link]:
    links = {}
    assert table.sites is not None and table.rtt is not None and table.rate is not None
    assert table.rtt_unit is not None, "the table has checked itself"
    one_rate_bps = RATE.parse(table.rate) if isinstance(table.rate, str) else None
    for i, a in enumerate(table.sites):
        for j, b in enumerate(table.sites):
            delay_s = DURATION.of(table.rtt[i][j], table.rtt_unit) / 2
            if one_rate_bps is None:
                assert not isinstance(table.rate, str) and table.rate_unit is not None
                rate_bps = RATE.of(table.rate[i][j], table.rate_unit)
            else:
                rate_bps = one_rate_bps
            links[a, b] = _link(table, delay_s, rate_bps, None, None)
    return links


def subnet_of(text: str, n_nodes: int) -> IPv4Network:
    """Return the IPv4 network ``network.subnet``.

    Raises ``KeyedError`` if it is no IPv4 network, is reserved, or is too small for ``n_nodes``.
    """
    key = ("network", "subnet")
    try:
        subnet = IPv4Network(text)
    except ValueError as error:
        raise KeyedError(key, f'must be an IPv4 network such as "10.77.0.0/16" ({error})') from None
    if subnet.is_loopback or subnet.is_multicast or subnet.is_link_local or subnet.is_unspecified:
        raise KeyedError(
            key, f'"{text}" is reserved for other purposes; use a private network such as "10.77.0.0/16"'
        )
    room = max(0, subnet.num_addresses - SPARE_ADDRESSES)
    if n_nodes > room:
        raise KeyedError(
            key,
            f'"{text}" has addresses for {room:,} nodes, but there are {n_nodes:,}; use a larger network '
            'such as "10.77.0.0/16"',
        )
    return subnet


def site_links(table: ClustersTable | MatrixTable) -> dict[SitePair, Link]:
    """Return one link per ordered pair of sites. Raises ``KeyedError`` if two rows are for the same pair."""
    links = _from_rows(table) if isinstance(table, ClustersTable) else _from_matrix(table)
    longest_s = max(link.delay_s for link in links.values())
    if longest_s > _IMPLAUSIBLE_S:
        (a, b) = next(pair for pair, link in links.items() if link.delay_s == longest_s)
        _log.warning(
            "network: messages from %s to %s take %s one way, more than any path on Earth; check the unit of the RTTs",
            *(a, b, DURATION.format(longest_s)),
        )
    if table.jitter > longest_s:
        _log.warning("%s", cut_jitter("network.jitter", table.jitter, longest_s))
    return links


def cut_jitter(key: str, jitter_s: float, longest_s: float) -> str:
    """Return the warning about a jitter that no link can have; ``longest_s`` is the longest one-way delay."""
    return (
        f"{key} {DURATION.format(jitter_s)} is larger than the one-way delay of every link (at most "
        f"{DURATION.format(longest_s)}): no link's jitter is larger than its delay"
    )


def _sites(by_site: Mapping[SitePair, Link]) -> list[str]:
    return sorted({site for pair in by_site for site in pair})


def check_places(table: NetworkTable, by_site: Mapping[SitePair, Link], warns: bool) -> None:
    """Raise ``KeyedError`` if ``places`` names a site that the network does not have.

    With ``warns``, warns of delays that are too short for the distance.
    """
    known = _sites(by_site)
    places = table.places or {}
    for site in places:
        if site not in known:
            raise KeyedError(("network", "places"), unknown("site", site, known))
    if warns and places:
        at = {site: TopologyNode(site, place[0], place[1]) for site, place in places.items()}
        pairs = ((a, b) for a, b in by_site if a < b and a in at and b in at)
        wrong = too_fast((at[a], at[b], by_site[a, b].delay_s) for a, b in pairs)
        if wrong is not None:
            _log.warning("network: %s, and that of network.places", wrong)


def node_links(
    by_site: Mapping[SitePair, Link],
    clients: Sequence[Node],
    servers: Sequence[Node],
    others: Sequence[Node] = (),
) -> dict[tuple[str, str], Link]:
    """Return the links in use, by (from, to) node names.

    These are both directions between clients and servers, between servers, and between ``others`` (the user's
    programs) and all nodes. Raises ``KeyedError`` for a site without any row, and for a pair of sites without
    one.
    """
    known = _sites(by_site)
    for node in (*clients, *servers, *others):
        if node.site not in known:
            raise KeyedError(node.key, f"{unknown('site', node.site, known)}; or add rows for it to network")
    links = {}
    ends = [(server, (*clients, *servers)) for server in servers]
    ends += [(node, (*clients, *servers, *others)) for node in others]
    for one, all_others in ends:
        for other in all_others:
            if other.name == one.name:
                continue
            for a, b in ((other, one), (one, other)):
                if (a.site, b.site) not in by_site:
                    raise KeyedError(
                        ("network", "pairs"),
                        f"no row for {a.site} to {b.site}, but {a.name} and {b.name} need one; add it",
                    )
                links[a.name, b.name] = by_site[a.site, b.site]
    return links


@dataclass(frozen=True)
class Times:
    """The matrices of ``Problem`` in seconds: rows are clients (or servers), columns servers."""

    raw_rtt_s: Matrix
    token_rtt_s: Matrix
    further_token_s: Matrix
    input_rtt_base_s: Matrix
    input_rtt_slope_s: Matrix
    server_rtt_s: Matrix
    transmissions: Transmissions | None
    one_way: OneWayDelays | None


def policy_times(
    links: Mapping[tuple[str, str], Link],
    clients: Sequence[str],
    servers: Sequence[str],
    model: ModelSpec,
    calibration: Calibration,
    mtu: int,
    step_base_s: Sequence[float],
    forwarding: bool,
) -> Times:
    """Return the times that policies see of the network, in seconds.

    Without calibration, t_cj is the RTT plus the transmission of one token's hidden state each way. t^I_cj(l)
    grows by the same bytes per token, headers included, so that t^I_cj(1) = t_cj; only the headers of a
    prompt's last, partly filled segment are left out. A calibration's overheads contain the transfer: then
    t_cj is the RTT plus the overhead. Both contain ``step_base_s`` (one value per server). ``transmissions``
    are computed only with ``forwarding``.
    """

    counts_sent = not calibration.has_overheads
    n_bits = 8 * model.token_bytes * mtu / (mtu - HEADER_BYTES)

    def rtt(a: str, b: str) -> float:
        return 0.0 if a == b else links[a, b].delay_s + links[b, a].delay_s

    def way(a: str, b: str) -> float:
        return 0.0 if a == b else links[a, b].delay_s

    def sent_one(a: str, b: str) -> float:
        return Link(0.0, links[a, b].rate_bps).transmission_s(model.token_bytes, mtu)

    def sent_more(a: str, b: str) -> float:
        return n_bits / links[a, b].rate_bps

    def sent_first(a: str, b: str) -> float:
        return sent_one(a, b) - sent_more(a, b)

    def token(a: str, b: str) -> float:
        if not counts_sent:
            return rtt(a, b) + calibration.token_overhead_s
        return rtt(a, b) + (sent_one(a, b) + sent_one(b, a)) + calibration.token_overhead_s

    def slope(a: str, b: str) -> float:
        if not counts_sent:
            return calibration.input_overhead_slope_s
        return sent_more(a, b) + sent_more(b, a) + calibration.input_overhead_slope_s

    def further(a: str, b: str) -> float:
        back_s = sent_more(b, a) if counts_sent or not forwarding else 0.0
        return sent_more(a, b) + back_s

    def base(a: str, b: str) -> float:
        if not counts_sent:
            return rtt(a, b) + calibration.input_overhead_base_s
        without = token(a, b) - calibration.token_overhead_s + calibration.input_overhead_slope_s
        return without - slope(a, b) + calibration.input_overhead_base_s

    def matrix(of: Callable[[str, str], float], rows: Sequence[str]) -> Matrix:
        return tuple(tuple(of(row, server) for server in servers) for row in rows)

    def with_base(times_s: Matrix) -> Matrix:
        return tuple(tuple(t + b for t, b in zip(row, step_base_s, strict=True)) for row in times_s)

    def sent(rows: Sequence[str], *, back: bool = False) -> Linear:
        def of(link_s: Callable[[str, str], float]) -> Matrix:
            return matrix(lambda a, b: 0.0 if a == b else link_s(b, a) if back else link_s(a, b), rows)

        return Linear(of(sent_first), of(sent_more))

    return Times(
        raw_rtt_s=matrix(rtt, clients),
        token_rtt_s=with_base(matrix(token, clients)),
        further_token_s=matrix(further, clients),
        input_rtt_base_s=with_base(matrix(base, clients)),
        input_rtt_slope_s=matrix(slope, clients),
        server_rtt_s=matrix(rtt, servers),
        transmissions=Transmissions(sent(clients), sent(clients, back=True), sent(servers), counts_sent)
        if forwarding
        else None,
        one_way=None
        if all(links[a, b].delay_s == links[b, a].delay_s for a, b in links)
        else OneWayDelays(
            matrix(way, clients),
            matrix(lambda client, server: way(server, client), clients),
            matrix(way, servers),
        ),
    )


def link_rates(
    links: Mapping[tuple[str, str], Link],
    shared: SharedLinks,
    clients: Sequence[str],
    servers: Sequence[str],
    token_bytes: int,
    mtu: int,
    forwarding: bool,
) -> LinkRates:
    """Return the rates that policies see of the network; those between servers only with ``forwarding``."""
    rates_bps = list(shared.rates_bps.values())
    number = {name: k for k, name in enumerate(shared.rates_bps)}

    def rates(rows: Sequence[str], *, back: bool = False) -> Matrix:
        def rate_bps(a: str, b: str) -> float:
            return math.inf if a == b else links[(b, a) if back else (a, b)].rate_bps

        return tuple(tuple(rate_bps(row, server) for server in servers) for row in rows)

    def on_way(rows: Sequence[str], *, back: bool = False) -> Shared:
        if not rates_bps:
            return ()
        return tuple(
            tuple(
                tuple(number[name] for name in shared.paths.get((server, row) if back else (row, server), ()))
                for server in servers
            )
            for row in rows
        )

    passing = servers if forwarding else ()
    return LinkRates(
        rates(clients),
        rates(clients, back=True),
        rates(passing),
        token_bytes * mtu / (mtu - HEADER_BYTES),
        RECEIVE_WINDOW_BYTES + UNSENT_BYTES,
        tuple(rates_bps),
        on_way(clients),
        on_way(clients, back=True),
        on_way(passing),
    )

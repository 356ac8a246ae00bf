"""The time of every hop of one request, for commands that show it beside the text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from nodes.records import HopRecord, Token
from testbed.experiments.units import counted
from testbed.terminal import columns


@dataclass(frozen=True)
class HopTimes:
    """Times (scenario seconds) on one hop: those of the first token, and the means over all others (0 without any)."""

    server: int
    first_block: int
    last_block: int
    network_s: float
    compute_s: float
    first_network_s: float
    first_compute_s: float


def hop_times(tokens: Sequence[Token]) -> list[HopTimes]:
    """Return the times of the hops that a request's ``tokens`` took, in the order in which they were used."""
    found: dict[tuple[int, int, int], tuple[list[HopRecord], list[HopRecord]]] = {}
    for token in tokens:
        for hop in token.hops:
            prompts, others = found.setdefault((hop.server, hop.first, hop.last), ([], []))
            (others if token.token else prompts).append(hop)
    return [
        HopTimes(
            *key,
            _mean(others, _network_s),
            _mean(others, _compute_s),
            _mean(prompts, _network_s),
            _mean(prompts, _compute_s),
        )
        for key, (prompts, others) in found.items()
    ]


def times_text(tokens: Sequence[Token], names: Sequence[str]) -> str:
    """Return a line per hop with its times per token, and one for the client. ``names``: those of all servers."""
    spans_s = [after.at_s - before.at_s for before, after in itertools.pairwise(tokens)]
    first_s, token_s = tokens[0].at_s - tokens[0].ready_at_s, fmean(spans_s) if spans_s else 0.0
    rest = f", each of the others {1e3 * token_s:.0f} ms" if spans_s else ""
    hops = hop_times(tokens)
    client_s = token_s - sum(hop.network_s + hop.compute_s for hop in hops)
    first_client_s = first_s - sum(hop.first_network_s + hop.first_compute_s for hop in hops)
    rows = [["hop", "blocks", "network", "compute", "of the first token:", "network", "compute"]]
    for hop in hops:
        times_s = hop.network_s, hop.compute_s
        first_times_s = hop.first_network_s, hop.first_compute_s
        blocks = f"{hop.first_block}-{hop.last_block - 1}"
        rows.append([names[hop.server], blocks, *map(_ms, times_s), "", *map(_ms, first_times_s)])
    rows.append(["client", "", "", _ms(client_s), "", "", _ms(first_client_s)])
    about = f"{counted(len(tokens), 'tokens')}: the first after {1e3 * first_s:.0f} ms{rest}"
    return "\n".join([about, *columns(rows)])


def _network_s(hop: HopRecord) -> float:
    return hop.received_at_s - hop.sent_at_s - _compute_s(hop)


def _compute_s(hop: HopRecord) -> float:
    return hop.departed_at_s - hop.arrived_at_s


def _mean(hops: Sequence[HopRecord], of: Callable[[HopRecord], float]) -> float:
    return fmean(map(of, hops)) if hops else 0.0


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"

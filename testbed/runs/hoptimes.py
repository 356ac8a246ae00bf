"""The time of every hop of one request, for commands that show it beside the text."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from nodes.records import HopRecord, Token
from testbed.experiments.units import counted
from testbed.terminal import columns

Key = tuple[int, int, int]
"""A hop: server, first block, and the block after its last."""


@dataclass(frozen=True)
class HopTimes:
    """Times (scenario seconds) on one hop: those of the first token, and the means per other token that came while it was
    used (0 without any). A round that several tokens share counts once.
    """

    server: int
    first_block: int
    last_block: int
    network_s: float
    compute_s: float
    first_network_s: float
    first_compute_s: float


def hop_times(tokens: Sequence[Token]) -> list[HopTimes]:
    """Return the times of the hops that a request's ``tokens`` took, in the order in which they were used."""
    found: dict[Key, tuple[list[HopRecord], list[HopRecord]]] = {}
    n_others: Counter[Key] = Counter()
    used: set[Key] = set()
    for token in tokens:
        used = {_key(hop) for hop in token.hops} or used  # of a round's tokens only the first has hops
        n_others.update(used if token.token else ())
        for hop in token.hops:
            found.setdefault(_key(hop), ([], []))[1 if token.token else 0].append(hop)
    return [
        HopTimes(
            *key,
            sum(map(_network_s, others)) / max(1, n_others[key]),
            sum(map(_compute_s, others)) / max(1, n_others[key]),
            sum(map(_network_s, prompts)),
            sum(map(_compute_s, prompts)),
        )
        for key, (prompts, others) in found.items()
    ]


def last_chain(tokens: Sequence[Token]) -> list[Key]:
    """Return (server, first block, end) of every hop that was used last for its blocks, in the blocks' order."""
    chain: dict[Key, None] = {}
    for hop in itertools.chain.from_iterable(token.hops for token in tokens):
        chain = {key: None for key in chain if key[2] <= hop.first or hop.last <= key[1]}
        chain[_key(hop)] = None
    return sorted(chain, key=lambda key: key[1])


def times_text(tokens: Sequence[Token], names: Sequence[str], arrived_at_s: float) -> str:
    """Return a line per hop with its times per token, and one for what else there was: the client, and waits of a recovery.

    ``names``: those of all servers. ``arrived_at_s``: when the request came, before a chain was open.
    """
    first, others = tokens[0], tokens[1:]
    first_s, opening_s = first.at_s - arrived_at_s, first.ready_at_s - arrived_at_s
    token_s = (tokens[-1].at_s - first.at_s) / max(1, len(others))
    rest = f", each of the others {1e3 * token_s:.0f} ms" if others else ""
    client_s = token_s - _away_s(others) / max(1, len(others))
    rows = [["hop", "blocks", "network", "compute", "of the first token:", "network", "compute"]]
    for hop in hop_times(tokens):
        times_s = hop.network_s, hop.compute_s
        first_times_s = hop.first_network_s, hop.first_compute_s
        blocks = blocks_text(hop.first_block, hop.last_block)
        rows.append([names[hop.server], blocks, *map(_ms, times_s), "", *map(_ms, first_times_s)])
    rows.append(["client", "", "", _ms(client_s), "", "", _ms(first_s - opening_s - _away_s([first]))])
    rows.append(["opening", "", "", "", "", "", _ms(opening_s)])
    about = f"{counted(len(tokens), 'tokens')}: the first after {1e3 * first_s:.0f} ms{rest}"
    return "\n".join([about, *columns(rows)])


def _network_s(hop: HopRecord) -> float:
    return hop.received_at_s - hop.sent_at_s - _compute_s(hop)


def _compute_s(hop: HopRecord) -> float:
    return hop.departed_at_s - hop.arrived_at_s


def _away_s(tokens: Sequence[Token]) -> float:
    """Return how long messages of ``tokens`` were away; rounds that were away together count once."""
    away_s, until_s = 0.0, -math.inf
    for hop in sorted((hop for token in tokens for hop in token.hops), key=lambda hop: hop.sent_at_s):
        away_s += max(0.0, hop.received_at_s - max(until_s, hop.sent_at_s))
        until_s = max(until_s, hop.received_at_s)
    return away_s


def blocks_text(first: int, end: int) -> str:
    """Return the blocks from ``first`` to before ``end`` as they are printed: the last one is named, too."""
    return f"{first}-{end - 1}"


def _key(hop: HopRecord) -> Key:
    return hop.server, hop.first, hop.last


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"

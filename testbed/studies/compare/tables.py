"""The result of ``testbed compare`` as one JSON object; ``docs/compare.md`` defines its keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testbed.studies.compare.align import Alignment, alignment_data
from testbed.studies.compare.contrast import contrast, difference
from testbed.studies.compare.load import METRICS, PARTS, Array, Hops, Run, Whole
from testbed.studies.compare.settings import differences

KINDS = ("prefill", "decode")
ALL = "all"
"""Stands in place of a server's name for all servers together."""

Rows = NDArray[np.intp]


def comparison(a: Run, b: Run, alignment: Alignment) -> dict[str, Any]:
    """Returns the comparison of two runs as an object for JSON. Times are scenario seconds, differences B -
    A.
    """
    rows = request_rows(a, b, alignment)
    metrics = {name: _metric(rows, name) for name in METRICS}
    hops = tokens = None
    headline: dict[str, Any] = {"per_token_s": _mean(metrics["per_token_s"])}
    if a.hops is not None and b.hops is not None:
        of_a, of_b = a.hops.of(alignment.compared), b.hops.of(alignment.compared)
        tokens = _token_contrasts(of_a, of_b)
        hops = list(_hop_contrasts(of_a, of_b))
        compute = [row for row in hops if row["server"] == ALL]
        headline["hop_compute_s"] = {row["kind"]: _mean(row["hop_compute_s"]) for row in compute}
    return {
        "a": a.about,
        "b": b.about,
        "headline": headline,
        "aligned": alignment_data(a, b, alignment),
        "metrics": metrics,
        "tokens": tokens,
        "hops": hops,
        "scenario_differences": differences(a, b),
        "requests": rows,
    }


def request_rows(a: Run, b: Run, alignment: Alignment) -> list[dict[str, Any]]:
    """Returns one flat row per compared request.

    It has lengths and chains, and for each metric M ``M_a_s``, ``M_b_s``, ``M_difference_s`` and ``M_ratio``
    (B / A).
    """
    rows = []
    for i in alignment.compared:
        in_a, in_b = a.requests[i], b.requests[i]
        row: dict[str, Any] = {
            "request": i,
            "client": in_a.client,
            "n_input_tokens": in_a.n_input_tokens,
            "n_output_tokens": in_a.n_tokens_done,
            "chain_a": in_a.chain,
            "chain_b": in_b.chain,
        }
        for name in METRICS:
            stem, of_a, of_b = name.removesuffix("_s"), in_a.times[name], in_b.times[name]
            known = of_a is not None and of_b is not None
            row[f"{stem}_a_s"], row[f"{stem}_b_s"] = of_a, of_b
            row[f"{stem}_difference_s"] = of_b - of_a if known else None
            row[f"{stem}_ratio"] = of_b / of_a if known and of_a else None
        rows.append(row)
    return rows


def token_times(hops: Hops) -> tuple[Whole, Array]:
    """Returns the keys of all tokens, ascending, and their times: the sum of all parts of all their hops
    (seconds).
    """
    keys, inverse = np.unique(_key(hops.request, hops.token), return_inverse=True)
    whole_s = np.sum([hops.parts[name] for name in PARTS], axis=0)
    times_s: Array = np.bincount(inverse, weights=whole_s, minlength=len(keys)).astype(np.float64)
    return keys, times_s


def is_decode(keys: Whole) -> NDArray[np.bool_]:
    """Returns which keys of ``token_times`` belong to tokens after the first, as an array of bool."""
    return np.asarray(keys % _SPAN > 0)


_SPAN = 1 << 24
"""Larger than the number of tokens of a request, and than the number of hops of a token."""


def _key(major: Whole, minor: Whole) -> Whole:
    return major * _SPAN + minor


def _metric(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    stem = name.removesuffix("_s")
    pairs = [
        (row[f"{stem}_a_s"], row[f"{stem}_b_s"]) for row in rows if row[f"{stem}_difference_s"] is not None
    ]
    a, b = np.array(pairs, dtype=np.float64).reshape(len(pairs), 2).T
    return contrast(a, b, (a, b))


def _token_contrasts(a: Hops, b: Hops) -> dict[str, Any]:
    (keys_a, times_a), (keys_b, times_b) = token_times(a), token_times(b)
    found = {}
    for kind in KINDS:
        in_a, in_b = is_decode(keys_a) == (kind == "decode"), is_decode(keys_b) == (kind == "decode")
        _, at_a, at_b = np.intersect1d(keys_a[in_a], keys_b[in_b], assume_unique=True, return_indices=True)
        of_a, of_b = times_a[in_a], times_b[in_b]
        found[kind] = contrast(of_a, of_b, (of_a[at_a], of_b[at_b]))
    return found


def _hop_contrasts(a: Hops, b: Hops) -> Iterator[dict[str, Any]]:
    """Yields one row per server and kind, first those of all servers. Servers of both runs are matched by
    their name.
    """
    names = list(dict.fromkeys((*a.names, *b.names)))
    servers_a, servers_b = _renumbered(a, names), _renumbered(b, names)
    order_a, order_b = _pairs(a, servers_a, b, servers_b)
    for number, name in ((-1, ALL), *enumerate(names)):
        for kind in KINDS:
            in_a, in_b = (
                ((servers == number) | (number < 0)) & ((hops.token > 0) == (kind == "decode"))
                for hops, servers in ((a, servers_a), (b, servers_b))
            )
            if not in_a.any() and not in_b.any():
                continue
            chosen = in_a[order_a]
            yield {
                "server": name,
                "kind": kind,
                "n_blocks": {"a": _mean_or_none(a.n_blocks[in_a]), "b": _mean_or_none(b.n_blocks[in_b])},
                **{
                    part: contrast(
                        a.parts[part][in_a],
                        b.parts[part][in_b],
                        (a.parts[part][order_a[chosen]], b.parts[part][order_b[chosen]]),
                    )
                    for part in PARTS
                },
            }


def _renumbered(hops: Hops, names: list[str]) -> Whole:
    numbers = np.array([names.index(name) for name in hops.names], dtype=np.int64)
    return numbers[hops.server] if len(hops.server) else hops.server


def _pairs(a: Hops, servers_a: Whole, b: Hops, servers_b: Whole) -> tuple[Rows, Rows]:
    """Returns the rows of both runs that are the same hop: of the same token, hop number, server and number
    of blocks.
    """
    tokens = np.unique(np.concatenate([_key(h.request, h.token) for h in (a, b)]))
    key_a, key_b = (
        _key(np.searchsorted(tokens, _key(h.request, h.token)).astype(np.int64), h.hop) for h in (a, b)
    )
    _, of_a, of_b = np.intersect1d(key_a, key_b, return_indices=True)
    same = (servers_a[of_a] == servers_b[of_b]) & (a.n_blocks[of_a] == b.n_blocks[of_b])
    return of_a[same], of_b[same]


def _mean(row: dict[str, Any]) -> dict[str, Any]:
    return difference(row["a"]["mean"], row["b"]["mean"])


def _mean_or_none(values: Whole) -> float | None:
    return float(values.mean()) if len(values) else None

"""The errors of a run in real time against its twin, and of a run in virtual time against the closed model.

The twin has the same requests, policies and seed, and uses no instant of the run: delays of the machine
cannot change it. The closed model (``model``) computes each hop from the measured instant at which its
message was sent.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from testbed.records.requests import RequestRow
from testbed.records.summary import ErrorFigures, Stats
from testbed.results.hop_table import HopTable
from testbed.results.logs import RunRecords
from testbed.results.requests import stats, times_stats

Array = NDArray[np.float64]

ERROR_METRICS = ("queue_s", "ttft_s", "tpot_s", "per_token_s", "e2e_s")
"""Metrics of requests that errors are computed of; those of tokens are ``token_gap_s``, of hops ``hop_s``."""
REQUESTS, DISTRIBUTIONS = "requests", "distributions"


@dataclass(frozen=True)
class Tables:
    """A run as tables: the logged records, a row per hop, and a row per request."""

    records: RunRecords
    hops: HopTable
    rows: list[RequestRow]

    def only(self, requests: Collection[int]) -> Tables:
        """Return the tables of these requests alone, by index."""
        return Tables(
            replace(self.records, requests=[r for r in self.records.requests if r.index in requests]),
            self.hops.only(requests),
            [row for row in self.rows if row.request in requests],
        )

    @cached_property
    def ranks(self) -> NDArray[np.int64]:
        """The rank of each request among planned arrivals, by index. It pairs requests with the twin's.

        Indices would not: a request from outside that arrived before one of the workload has a greater index
        than that in the run, but not in the twin.
        """
        planned = sorted(self.records.requests, key=lambda record: (record.intended_at_s, record.index))
        ranks = np.zeros(1 + max((record.index for record in planned), default=0), dtype=np.int64)
        ranks[[record.index for record in planned]] = np.arange(len(planned))
        return ranks


def error(measured: Any, truth: Any) -> ErrorFigures:
    """Return how far measured times are from their truth, both in seconds; all None if there are no pairs.

    Absolute ratios are |measured - truth| / truth, ``mean_ratio`` is of (measured - truth) / truth. If some
    truths are 0, as queues often are, all differences are divided by the mean truth instead. If that is 0,
    too, ratios are 0 where nothing differs, else None.
    """
    measured_s, truth_s = np.asarray(measured, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    if not len(truth_s):
        return ErrorFigures()
    off_s = measured_s - truth_s
    by_s = truth_s if (truth_s > 0).all() else np.full_like(truth_s, truth_s.mean())
    mean_abs_s = float(np.abs(off_s).mean())
    if not (by_s > 0).all():
        ratio = 0.0 if mean_abs_s == 0 else None
        return ErrorFigures(
            mean_abs_ratio=ratio,
            p99_abs_ratio=ratio,
            max_abs_ratio=ratio,
            mean_ratio=ratio,
            mean_abs_s=mean_abs_s,
        )
    ratios = off_s / by_s
    absolute = np.abs(ratios)
    return ErrorFigures(
        mean_abs_ratio=float(absolute.mean()),
        p99_abs_ratio=float(np.percentile(absolute, 99)),
        max_abs_ratio=float(absolute.max()),
        mean_ratio=float(ratios.mean()),
        mean_abs_s=mean_abs_s,
    )


def model_errors(rows: Sequence[RequestRow]) -> dict[str, ErrorFigures]:
    """Return the errors of completed requests against the closed model, by metric.

    Requests that recovered from a failure are left out, because the closed model has no failures.
    """
    undisturbed = [row for row in rows if row.is_completed and not row.n_recoveries]
    found = {}
    for name in ERROR_METRICS:
        pairs = [
            (row.times[name], row.model[name])
            for row in undisturbed
            if row.times[name] is not None and row.model[name] is not None
        ]
        found[name] = error([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    return found


def twin_errors(run: Tables, twin: Tables) -> tuple[dict[str, ErrorFigures], str]:
    """Return the errors of requests, tokens and hops against the twin, by metric, and how they were paired.

    If both runs admitted the same requests to the same chains in the same order, each is compared with itself
    (``requests``). Otherwise a request shared servers with other requests than in the twin, and its own
    difference means little: then the sorted times are compared (``distributions``).
    """
    pairing = REQUESTS if _admissions(run) == _admissions(twin) else DISTRIBUTIONS
    found = {}
    for name in ERROR_METRICS:
        found[name] = _error_of(_column(run, name), _column(twin, name), pairing)
    found["token_gap_s"] = _error_of(_gaps(run), _gaps(twin), pairing)
    found["hop_s"] = _error_of(_hops(run), _hops(twin), pairing)
    return found, pairing


def twin_metrics(twin: Tables) -> dict[str, Stats]:
    """Return the statistics of the twin's own times, by metric."""
    plain = ~twin.hops.is_replay
    found = times_stats(twin.rows)
    found["token_gap_s"] = stats(_gaps(twin).values)
    for name in ("network_s", "compute_s"):
        found[f"hop_{name}"] = stats(getattr(twin.hops, name)[plain])
    return found


def _admissions(run: Tables) -> list[tuple[int, str, int]]:
    """Return (rank, chain, number of recoveries) of admitted requests in the order of admission."""
    rows = {row.request: row for row in run.rows}
    admitted = [record for record in run.records.requests if record.opening_at_s is not None]
    admitted.sort(key=lambda record: (record.opening_at_s, record.index))
    return [(int(run.ranks[r.index]), rows[r.index].chain, r.n_recoveries) for r in admitted]


class _Keyed(NamedTuple):
    """Times in seconds, and a number for the request, token or hop that each belongs to."""

    keys: NDArray[np.int64]
    values: Array


def _column(run: Tables, name: str) -> _Keyed:
    rows = [row for row in run.rows if row.is_completed and row.times[name] is not None]
    requests = np.array([row.request for row in rows], dtype=np.int64)
    return _Keyed(run.ranks[requests], np.array([row.times[name] for row in rows]))


def _gaps(run: Tables) -> _Keyed:
    found = [
        (_key(int(run.ranks[record.index]), token.token), token.at_s - token.ready_at_s)
        for record in run.records.requests
        for token in record.decode_steps
    ]
    return _Keyed(
        np.array([key for key, _ in found], dtype=np.int64), np.array([value for _, value in found])
    )


def _hops(run: Tables) -> _Keyed:
    hops = run.hops
    plain = ~hops.is_replay
    keys = _key(run.ranks[hops.request], hops.token) + hops.hop
    return _Keyed(keys[plain], hops.measured_s[plain])


def _key(request: Any, token: Any) -> Any:
    """Return a number for a token of a request, for ranks below 2^23 and tokens below 2^24.

    Adding a hop's number, below 2^16, makes the number of the hop.
    """
    return (request << 40) + (token << 16)


def _error_of(measured: _Keyed, truth: _Keyed, pairing: str) -> ErrorFigures:
    """Return the error of times that are paired by key (``requests``) or by rank (``distributions``)."""
    if pairing == REQUESTS:
        _, here, there = np.intersect1d(measured.keys, truth.keys, assume_unique=True, return_indices=True)
        return error(measured.values[here], truth.values[there])
    ours, theirs = np.sort(measured.values), np.sort(truth.values)
    if not len(ours) or not len(theirs):
        return error([], [])
    if len(ours) != len(theirs):  # some failed in one of the two: compare equal quantiles
        n_shares = min(len(ours), len(theirs))
        shares = (np.arange(n_shares) + 0.5) / n_shares
        ours, theirs = (np.quantile(values, shares, method="inverted_cdf") for values in (ours, theirs))
    return error(ours, theirs)

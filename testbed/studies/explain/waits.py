"""How a run's messages and steps met: which of them waited for others, and which took longer by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from testbed.experiments.experiment import Experiment
from testbed.fast.overtime import OnLink
from testbed.records.events import LinksChanged, read_events
from testbed.results.changes import as_carried_out
from testbed.results.hop_table import HopTable
from testbed.results.links import on_links
from testbed.results.logs import RunRecords
from testbed.rundir import parquet_path

Array = NDArray[np.float64]
_COLUMNS = (
    *("request", "token", "hop", "server", "first_block", "last_block", "sent_at_s", "arrived_at_s"),
    *("departed_at_s", "received_at_s", "up_bytes", "down_bytes", "replayed_tokens"),
)


class HopWaits(NamedTuple):
    """Columns with a row per hop of one request, in the order of ``hops.parquet``, in scenario seconds.

    ``propagation_s`` and ``transmission_s`` are those of both ways, ``link_wait_s`` how much longer than with nothing
    else on the links messages took that met others there, at most what the links need for these. ``has_met``: another session's step was on the server during
    the hop's.
    """

    propagation_s: Array
    transmission_s: Array
    link_wait_s: Array
    has_met: NDArray[np.bool_]


def hop_waits(
    experiment: Experiment, run_dir: Path, clients: dict[int, int], request: int, until_s: float
) -> HopWaits:
    """Returns the waits of ``request``, which lasted until ``until_s``. ``clients``: the number of each request's."""
    table = _table(experiment, run_dir, until_s)
    chosen = table.request == request
    propagation_s, transmission_s, wait_s = (np.zeros(len(chosen)) for _ in range(3))
    logged = RunRecords([], 0, changes=read_events(run_dir, LinksChanged))
    # Simulations of earlier versions carried out what was planned, and logged none of it.
    changes = as_carried_out(experiment, logged) or experiment.network.changes
    of_clients = np.array([clients[number] for number in table.request.tolist()], dtype=np.int64)
    passed = dict(on_links(experiment, table, of_clients, changes))
    network = experiment.network
    together: dict[str, list[OnLink]] = {}
    for pair, on_link in passed.items():
        for name in network.shared_paths.get(pair, ()):
            together.setdefault(name, []).append(on_link)
    for pair, on_link in passed.items():
        groups = [together[name] for name in network.shared_paths.get(pair, ())] or [[on_link]]
        others_s = sum((_others_s(group, on_link) for group in groups), np.zeros(len(on_link.row)))
        # A row's two messages are on two links: each row comes once per link.
        propagation_s[on_link.row] += on_link.delay_s
        transmission_s[on_link.row] += on_link.transmission_s
        # No message waits longer than links work for others meanwhile: the rest is jitter, losses and the like.
        wait_s[on_link.row] += np.clip(on_link.wait_s, 0.0, others_s.clip(0.0))
    has_met = np.zeros(len(chosen), dtype=bool)
    for server in np.unique(table.server[chosen]):
        rows = np.flatnonzero(table.server == server)
        spans = table.arrived_at_s[rows], table.departed_at_s[rows]
        has_met[rows] = _n_during(*spans, *spans) > 1
    return HopWaits(propagation_s[chosen], transmission_s[chosen], wait_s[chosen], has_met[chosen])


def _others_s(all_there: Sequence[OnLink], on_link: OnLink) -> Array:
    """Returns how long a link works for the messages among ``all_there`` that were on it with each of ``on_link``.

    ``all_there`` has these messages, too, which do not count for themselves.
    """
    begins_s, ends_s, busy_s = (
        np.concatenate([getattr(each, name) for each in all_there])
        for name in ("sent_at_s", "left_at_s", "busy_s")
    )
    since_s, until_s = on_link.sent_at_s, on_link.left_at_s
    begun_s = _sum_until(begins_s, busy_s, until_s, "left")
    over_s = _sum_until(ends_s, busy_s, since_s, "right")
    return begun_s - over_s - on_link.busy_s


def _sum_until(at_s: Array, values: Array, until_s: Array, side: Literal["left", "right"]) -> Array:
    """Returns the sum of ``values`` before each of ``until_s`` (with ``right`` also at it); they are at ``at_s``."""
    order = np.argsort(at_s)
    sums = np.concatenate([[0.0], np.cumsum(values[order])])
    found: Array = sums[np.searchsorted(at_s[order], until_s, side)]
    return found


def _n_during(begins_s: Array, ends_s: Array, since_s: Array, until_s: Array) -> NDArray[np.int64]:
    """Returns how many spans overlap with each of the spans from ``since_s`` to ``until_s``."""
    n_begun = np.searchsorted(np.sort(begins_s), until_s, "left")
    n_over = np.searchsorted(np.sort(ends_s), since_s, "right")
    return n_begun - n_over


def _table(experiment: Experiment, run_dir: Path, until_s: float) -> HopTable:
    """Returns the hops that began before ``until_s``. The model's columns and the client's time are left out."""
    columns = pq.read_table(
        parquet_path(run_dir / "hops.parquet"), columns=list(_COLUMNS), filters=[("sent_at_s", "<", until_s)]
    ).to_pydict()
    numbers = {server.name: number for number, server in enumerate(experiment.problem.servers)}
    columns["server"] = [numbers[name] for name in columns["server"]]
    found: dict[str, Any] = {
        name: np.array(values, dtype=np.float64 if name.endswith("_s") else np.int64)
        for name, values in columns.items()
    }
    found["first"], found["last"] = found.pop("first_block"), found.pop("last_block")
    left_out = ("client_s", "tail_s", "model_network_s", "model_link_queue_s", "model_compute_s")
    none_s = np.zeros(len(found["request"]))
    found |= dict.fromkeys(left_out, none_s)
    return HopTable(**found)

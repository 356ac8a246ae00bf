"""A summary of each client's requests, and a line about those that differ."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import UNSET

from testbed.experiments.slo import Objectives
from testbed.records.requests import FAILED, RequestRow
from testbed.records.summary import ClientSummary
from testbed.results.requests import times_stats
from testbed.results.slo import n_met

_LABELS = {"ttft_s": "TTFT", "tpot_s": "TPOT"}
_DIFFERENT_RATIO = 1.1
"""From this ratio of two clients' p95 on, the text has them."""


def clients_of(
    clients: Sequence[str], rows: Sequence[RequestRow], objectives: Objectives
) -> dict[str, ClientSummary]:
    """Return the summary of each of ``clients`` that has requests, by its name, in their order."""
    of_client: dict[str, list[RequestRow]] = defaultdict(list)
    for row in rows:
        of_client[row.client].append(row)
    return {
        name: ClientSummary(
            n_requests=len(own),
            n_completed=sum(row.is_completed for row in own),
            n_failed=sum(row.status == FAILED for row in own),
            n_tokens=sum(row.n_tokens_done for row in own),
            n_met=n_met(own, objectives) if objectives else UNSET,
            objectives=dict(objectives.own[name]) if name in objectives.own else UNSET,
            metrics=times_stats(own),
        )
        for name in clients
        if (own := of_client.get(name))
    }


def clients_text(found: Mapping[str, ClientSummary]) -> list[str]:
    """Return a line with the best and the worst client of each metric in which they differ; else nothing."""
    parts = []
    for metric, label in _LABELS.items():
        p95_s = {name: each.metrics[metric].p95 for name, each in found.items()}
        known = {name: value for name, value in p95_s.items() if value}
        if len(known) < 2:
            continue
        best, worst = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        if known[worst] >= _DIFFERENT_RATIO * known[best]:
            parts.append(f"{label} {known[best]:.3f} s ({best}) to {known[worst]:.3f} s ({worst})")
    met = {  # of those that have ended
        name: each.n_met / n_ended
        for name, each in found.items()
        if isinstance(each.n_met, int) and (n_ended := each.n_completed + each.n_failed)
    }
    if len(met) > 1 and max(met.values()) > min(met.values()):
        worst = min(met, key=met.__getitem__)
        parts.append(f"the fewest requests meet the objectives at {worst}, {met[worst]:.0%}")
    return [f"clients differ, p95: {'; '.join(parts)}"] if parts else []

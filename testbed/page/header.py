"""The constant part of a run: its servers, sites, links, and the planned changes of links."""

from __future__ import annotations

import math
from typing import Any

from netem.networks import AUTO
from policies.decoding import Decoding
from policies.links import Link
from testbed.experiments.experiment import Experiment
from testbed.faultkinds import KINDS
from testbed.page.layout import beside_nearest, by_round_trips, places, site_rtts_s, sites_of
from testbed.records.plan import Clock, Plan


def _drafts(decoding: Decoding | None) -> dict[str, str]:
    """Return how clients draft, in words; nothing if they do not."""
    if decoding is None:
        return {}
    words = f"{decoding.drafter}, {'auto' if decoding.is_auto else decoding.tokens} per round"
    if decoding.in_flight > 1:
        words += f", {decoding.in_flight} rounds in flight"
    return {"drafts": words}


def header(experiment: Experiment, plan: Plan) -> dict[str, Any]:
    """Return the constant part of a run as JSON data. Its order numbers the servers, clients and sites."""
    problem = experiment.problem
    sites = sites_of(experiment)
    own = {row.name: row for row in experiment.network.sites}
    number = {site: i for i, site in enumerate(sites)}
    known, rtts_s = places(experiment), site_rtts_s(experiment)
    points = by_round_trips(sites, rtts_s) if known is None else beside_nearest(sites, rtts_s, known)
    ranges, cache_bytes = plan.placement.ranges, plan.placement.cache_bytes
    clock = plan.clock or Clock(name="virtual", why="simulated")
    return {
        "name": experiment.name,
        "description": experiment.description,
        "model": problem.model.name,
        "n_blocks": problem.model.n_blocks,
        "cache_bytes_per_token": problem.model.cache_bytes_per_token,
        "page_tokens": experiment.compute.paging.page_tokens if experiment.compute.paging else None,
        "placement": plan.placement.policy or experiment.policy.placement,
        "routing": experiment.policy.routing,
        "design_concurrency": plan.placement.design_concurrency,
        "network": None if plan.network == AUTO else plan.network,  # not chosen yet
        "clock": clock.name,
        "clock_why": clock.why,
        "time_scale": experiment.time_scale,
        "seed": experiment.seed,
        "workload": experiment.workload.source,
        "n_requests": None if experiment.workload.endpoint_tokens else len(experiment.workload.requests),
        "objectives": experiment.objectives.common,
        "forwarding": problem.forwarding,
        **_drafts(problem.decoding),
        "layout": "rtt" if known is None else "places",
        "sites": [
            {
                "name": site,
                "x": points[site][0],
                "y": points[site][1],
                "is_placed": known is None or site in known,
                "up_bps": own[site].up if site in own else None,
                "down_bps": own[site].down if site in own else None,
            }
            for site in sites
        ],
        "servers": [
            {
                "name": server.name,
                "hardware": server.hardware,
                "site": number[experiment.sites[server.name]],
                "memory_bytes": server.memory_bytes,
                "cache_bytes": cache_bytes[j],
                "first": ranges[j][0],
                "last": ranges[j][1],
                "state": "absent" if j in experiment.faults.absent else "online",
            }
            for j, server in enumerate(problem.servers)
        ],
        "fault_kinds": [
            {"name": kind.name, "what": kind.what, "has_factor": kind.has_factor, "is_bad": kind.is_bad}
            for kind in KINDS.values()
        ],
        "clients": [
            {
                "name": name,
                "site": number[experiment.sites[name]],
                "objectives": experiment.objectives.of(name),
            }
            for name in problem.clients
        ],
        **_links(experiment, number),
    }


def _links(experiment: Experiment, number: dict[str, int]) -> dict[str, Any]:
    """Return the links between sites that messages can use, and the planned changes of these.

    A link is ``[a, b, rtt, rate, loss]``: site numbers, seconds, bits per second (0: not limited), ratio.
    """
    present = dict(experiment.network.links)
    clients = set(experiment.problem.clients)
    pairs: dict[tuple[int, int], tuple[str, str]] = {}
    for a, b in present:
        if a in clients or (experiment.problem.forwarding and b not in clients):
            first, second = number[experiment.sites[a]], number[experiment.sites[b]]
            pairs.setdefault((min(first, second), max(first, second)), (a, b))
    pair_of = {nodes: pair for pair, nodes in pairs.items()}

    def row(a: str, b: str) -> list[float]:
        return [*pair_of[a, b], *_both(present[a, b], present[b, a])]

    links = [row(a, b) for a, b in pair_of]
    changes = []
    for change in experiment.network.changes:
        present.update(change.links)
        changed = [row(a, b) for a, b in pair_of if (a, b) in change.links or (b, a) in change.links]
        changes.append([change.at_s, change.why, changed])
    return {"links": links, "changes": changes}


def _both(there: Link, back: Link) -> tuple[float, float, float]:
    """Return a pair's round trip in seconds, and its directions' worse rate (0: not limited) and loss."""
    rate_bps = min(there.rate_bps, back.rate_bps)
    return (
        there.delay_s + back.delay_s,
        rate_bps if math.isfinite(rate_bps) else 0.0,
        max(there.loss_ratio, back.loss_ratio),
    )

"""What the paper proves about a run's seconds per token, and whether it applies to this run."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from msgspec import UNSET

from nodes.clock import NS
from policies.bounds import UpperBound, greedy_plan_of, lower_bound_per_token_s
from policies.interfaces import RoutingPolicy, trait
from policies.problem import Placement, RequestSpec
from policies.registry import shipped_policy
from policies.wsrr import WsRr
from testbed.experiments.experiment import Experiment
from testbed.experiments.units import counted
from testbed.fast.links import never_wait
from testbed.records.base import data_of
from testbed.records.requests import RequestRow
from testbed.records.summary import Bounds

_ROUNDING = 1 + 1e-9
"""A time is not over its bound by rounding alone: of floats, and of instants, which are whole nanoseconds."""
_INSTANTS = 4
"""Instants of a token at a hop: sent, arrived, computed, returned. Each may be rounded by less than a nanosecond."""


def bounds_of(
    experiment: Experiment,
    placement: Placement,
    rows: Sequence[RequestRow],
    is_reference: bool = False,
) -> Bounds:
    """Return the bounds on the requests of a run that completed, as all its means are; adds them to ``rows``.

    ``is_reference``: the run has the semantics of the published simulator, in which opening a chain takes no time and
    messages never wait for each other.
    """
    problem = experiment.problem
    n_tokens = {row.request: row.n_tokens_done for row in rows if row.is_completed}
    requests = Counter(
        replace(plan.served, n_output_tokens=n_tokens[plan.index])
        for plan in experiment.workload.requests
        if plan.index in n_tokens
    )
    found = Bounds(applies=False)
    if "proven_optimal" in placement.bounds:
        found.proven_optimal = bool(placement.bounds["proven_optimal"])
        found.gap_ratio = placement.bounds.get("gap_ratio", UNSET)
    setup_s = experiment.calibration.session_setup_s + problem.initial_delay_s
    if requests and _has_lower_bound(experiment):
        least_s = {r: lower_bound_per_token_s(problem, r, setup_s) for r in requests}
        if max(least_s.values()) < math.inf:
            found.lower_bound_by_client_s = _by_client(experiment, requests, least_s)
            found.lower_bound_per_token_s = _mean(requests, least_s)
    why_not = _why_not(experiment, placement, rows, is_reference)
    found.why = next(why_not, None) if requests else "no request has completed"
    found.applies = found.why is None
    greedy = greedy_plan_of(problem, placement)
    if found.applies and greedy is not None:
        bound = UpperBound(problem, greedy)
        most_s = {
            r: bound.per_token_s(r, setup_s if is_reference else _lead_s(experiment, placement, r.client))
            for r in requests
        }
        found.theorem1_by_client_s = _by_client(experiment, requests, most_s)
        found.theorem1_per_token_s = max(found.theorem1_by_client_s.values())
        if found.lower_bound_per_token_s:
            found.theorem1_ratio = found.theorem1_per_token_s / found.lower_bound_per_token_s
        if placement.design_concurrency and experiment.policy.routing == WsRr.name:
            leads_s = [
                setup_s if is_reference else _lead_s(experiment, placement, client)
                for client in range(len(problem.clients))
            ]
            _add_guarantee(found, bound, placement.design_concurrency, leads_s, experiment, rows)
    return found


def _add_guarantee(
    found: Bounds,
    bound: UpperBound,
    concurrency: int,
    leads_s: Sequence[float],
    experiment: Experiment,
    rows: Sequence[RequestRow],
) -> None:
    """Add the bound on its completion to each row, and to ``found`` how many requests took longer.

    The sessions that a request finds are those that have arrived before it and have not ended, also if they still wait.
    """
    clients = {name: client for client, name in enumerate(experiment.problem.clients)}
    ends_at_s: list[float] = []
    found.n_bounded = found.n_exceeded = found.n_exceeded_by_backoff = 0
    for row in sorted(rows, key=lambda row: (row.arrival_at_s, row.request)):
        if row.arrived_at_s is None or row.ended_at_s is None:
            continue
        del ends_at_s[: bisect_right(ends_at_s, row.arrived_at_s)]
        n_over = len(ends_at_s) - concurrency
        crowded_s = ends_at_s[n_over] - row.arrived_at_s if n_over >= 0 else 0.0
        client = clients[row.client]
        request = RequestSpec(client, row.n_input_tokens, row.n_output_tokens)
        row.completion_bound_s = bound.completion_s(request, leads_s[client], crowded_s)
        insort(ends_at_s, row.ended_at_s)
        e2e_s, queue_s = row.times.e2e_s, row.times.queue_s
        if e2e_s is None or queue_s is None:
            continue
        found.n_bounded += 1
        n_instants = _INSTANTS * (row.n_output_tokens + 1) * len(row.hops)  # 1: opening the chain
        limit_s = row.completion_bound_s * _ROUNDING + n_instants / NS
        if e2e_s > limit_s:
            found.n_exceeded += 1
            expected_s = crowded_s if row.wait_expected_s is None else min(row.wait_expected_s, crowded_s)
            found.n_exceeded_by_backoff += e2e_s - queue_s + min(queue_s, expected_s) <= limit_s


def _has_lower_bound(experiment: Experiment) -> bool:
    """Whether nothing can be faster than the problem says. Hops of forwarding are shorter than to the client and back."""
    network = experiment.network
    links_are_steady = not network.changes and not any(
        link.jitter_s for pair, link in network.links.items() if experiment.uses(pair)
    )
    problem = experiment.problem
    is_plain = not problem.forwarding and problem.decoding is None and experiment.compute.prefix is None
    return is_plain and links_are_steady and experiment.compute.backend == "stub"


def _why_not(
    experiment: Experiment, placement: Placement, rows: Sequence[RequestRow], is_reference: bool
) -> Iterator[str]:
    """Yield the reasons why Theorem 1 says nothing about a run."""
    problem, policy, faults = experiment.problem, experiment.policy, experiment.faults
    requests = experiment.workload.requests
    longest = max((plan.known.n_tokens for plan in requests), default=0)
    routing = shipped_policy("routing", policy.routing)
    if problem.forwarding:
        yield "servers send to each other, and the theorem is about hub-spoke"
    if problem.decoding is not None:
        yield "clients draft tokens, and how many agree is left to chance"
    if greedy_plan_of(problem, placement) is None:
        yield f"the placement, {policy.placement}, is not CG-BP's for its |R|"
    if routing is None or not trait(routing, RoutingPolicy, "takes_cheapest"):
        yield f"the routing, {policy.routing}, need not take the cheapest chain"
    if problem.batching != "none":
        yield f"sessions wait for each other's steps (compute.batching = {problem.batching})"
    if experiment.compute.backend != "stub":
        yield "real blocks do not take the profile's times"
    if experiment.compute.prefix is not None:
        yield "prompts are computed in part (cache.prefix)"
    if experiment.compute.paging is not None:
        yield "caches grow (cache.mode = paged)"
    if any(server.contention_ratio for server in problem.servers):
        yield "sessions slow each other down on shared hardware"
    if not is_reference and not never_wait(experiment):
        yield "messages of sessions can wait for each other on links"
    if policy.online is not None:
        yield f"{policy.online} changes the placement"
    if policy.state_age_s:
        yield "routing sees an old state (policy.state_age)"
    if faults.planned or faults.absent:
        yield "servers come and go"
    if longest > problem.n_input_tokens + problem.n_output_tokens:
        yield "some requests are longer than the placement is designed for"
    if any(plan.known != plan.served for plan in requests) or any(
        row.is_completed and row.n_tokens_done != row.n_output_tokens for row in rows
    ):
        yield "routing does not know the requests' lengths"


def _lead_s(experiment: Experiment, placement: Placement, client: int) -> float:
    """Return the seconds that opening a chain takes a client at most, as ``testbed.results.model.model_setup_s``."""
    problem = experiment.problem
    opened_s = max(
        problem.up_s(client, j) + problem.down_s(client, j)
        for j, held in enumerate(placement.ranges)
        if held.n_blocks
    )
    return max(opened_s, problem.initial_delay_s) + experiment.calibration.session_setup_s


def _mean(requests: Mapping[RequestSpec, int], values_s: Mapping[RequestSpec, float]) -> float:
    return math.fsum(values_s[r] * n for r, n in requests.items()) / sum(requests.values())


def _by_client(
    experiment: Experiment, requests: Mapping[RequestSpec, int], values_s: Mapping[RequestSpec, float]
) -> dict[str, float]:
    """Return the mean over each client's requests, by the client's name."""
    found = {}
    for client, name in enumerate(experiment.problem.clients):
        own = {r: n for r, n in requests.items() if r.client == client}
        if own:
            found[name] = _mean(own, values_s)
    return found


def in_ms(bounds: Bounds) -> dict[str, Any]:
    """Return the bounds as plain data with times in ms; those that do not apply are absent."""
    found: dict[str, Any] = {}
    for name, value in data_of(bounds).items():
        if name.endswith("_s"):
            ms = {client: s * 1e3 for client, s in value.items()} if isinstance(value, dict) else value * 1e3
            found[f"{name[:-2]}_ms"] = ms
        else:
            found[name] = value
    return found


def bounds_text(found: Mapping[str, Any], design_concurrency: int | None) -> str:
    """Return a line on what is proven about a token's time. ``found`` is as from ``in_ms``."""
    parts = []
    if (least_ms := found.get("lower_bound_per_token_ms")) is not None:
        least = f"{least_ms / 1e3:.3f} s"
        of = found.get("lower_bound_by_client_ms", {})
        by_client = {client: f"{ms / 1e3:.3f} s" for client, ms in of.items()}
        if len(set(by_client.values())) > 1:
            low, high = min(of, key=of.__getitem__), max(of, key=of.__getitem__)
            least = f"{by_client[low]} ({low}) to {by_client[high]} ({high}), and {least} over all that completed,"
        parts.append(f"at least {least} with any placement and routing (Lemma B.1)")
    if (most_ms := found.get("theorem1_per_token_ms")) is not None:
        sessions = counted(design_concurrency or 0, "sessions")
        parts.append(f"at most {most_ms / 1e3:.3f} s with up to |R| = {sessions} at once (Theorem 1)")
    else:
        parts.append(f"no upper bound, since {found['why']}")
    if n := found.get("n_bounded"):
        n_over, n_backoff = found["n_exceeded"], found["n_exceeded_by_backoff"]
        text = f"{n_over} of {counted(n, 'requests')} took longer than WS-RR guarantees for the sessions that they found"
        parts.append(text + (f", {n_backoff} of them by asking again later than needed" if n_over else ""))
    return f"a client's time per token: {'; '.join(parts)}"


def proof_text(found: Bounds) -> list[str]:
    """Return a line on whether a searched placement is optimal; nothing if none was searched."""
    if found.get("proven_optimal") is None:
        return []
    if found.proven_optimal:
        return ["the search proved its placement optimal"]
    gap = found.get("gap_ratio")
    within = "" if gap is None else f"; its objective is within {gap:.1%} of the best possible"
    return [f"the search did not prove its placement optimal{within}"]

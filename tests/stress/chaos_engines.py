"""The fast engine beside the system: whether a simulation of a case gives what its run gave."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from math import isclose

from policies.links import HEADER_BYTES, Link
from testbed.control.placing import place_experiment
from testbed.control.steering import online_policy
from testbed.experiments.experiment import Experiment
from testbed.fast.disturbances import disturbance
from testbed.fast.engine import simulate_fast
from testbed.fast.outcome import Disturbed
from testbed.records.requests import RequestRow
from testbed.results.tables import read_requests
from testbed.simulator.rows import outcome_rows
from tests.stress import chaos_cases
from tests.stress.chaos_cases import Document
from tests.stress.chaos_checks import Finished

_NOT_CARRIED = (chaos_cases.CANCELS, chaos_cases.INTERRUPT, chaos_cases.SLOW, "membership")
_ALIKE_S = 1e-7
_COUNTS = ("status", "chain", "n_rejections", "n_recoveries", "n_preemptions", "n_cached_tokens")
_TIMES = ("queue_s", "setup_s", "ttft_s", "e2e_s")


def carried(document: Document) -> Document:
    """Returns a case without what the fast engine leaves to the system (``testbed.fast.disturbances``), and without chance."""
    found = deepcopy({key: value for key, value in document.items() if key not in _NOT_CARRIED})
    network, policy, cache = found["network"], found["policy"], found.get("cache", {})
    is_paged, forwards = cache.get("mode") == "paged", policy["communication"] == "server-to-server"
    for of in (network, *network["pairs"]):
        of.pop("loss", None)
        of.pop("jitter", None)
    network["event"] = [event for event in network.get("event", ()) if not {"loss", "jitter"} & event.keys()]
    found["compute"].pop("serial", None)
    for kind in found["hardware"].values():
        kind.pop("contention", None)
    found.get("decoding", {}).pop("in_flight", None)
    cache.pop("hub_history", None)
    kinds = ("kill", "restart") if is_paged else ("kill", "restart", "leave", "join")
    faults = [fault for fault in found.get("fault", ()) if fault["kind"] in kinds and "at" in fault]
    drains = policy.get("online") in ("two-time-scale", "tests.support.wandering:Draining")
    if is_paged or not drains:
        for key in ("online", "online_period", "load_rate"):
            policy.pop(key, None)
    if (is_paged and forwards) or "online" in policy:
        faults = []
        found.pop("churn", None)
    if is_paged or "online" in policy:
        for server in found["servers"]:
            server.pop("hours", None)
    return found | {"fault": faults}


def simulated_otherwise(document: Document, run: Finished) -> str | None:
    """Returns what a simulation of the case says otherwise than its run: "" if nothing, ``None`` if it is not simulated.

    13: wherever the fast engine serves the scenario, each request has the run's end, chain, refusals and recoveries, and its
    times to 0.1 us; with lost servers to one acknowledgement on the slowest link. Not checked: jitter and loss, which are
    drawn otherwise, hang-ups of callers, which scenarios do not have, scaled sizes, and servers that forward and are lost.
    """
    experiment = run.experiment
    if document.get(chaos_cases.CANCELS) or chaos_cases.SLOW in document or _is_random(experiment):
        return None
    online = online_policy(experiment)
    if disturbance(experiment, online):
        return None
    try:
        fast = simulate_fast(experiment, place_experiment(experiment), online)
    except Disturbed:
        return None
    if fast.is_cut and experiment.problem.forwarding:
        return None
    within_s = _ALIKE_S
    if fast.is_cut:
        within_s += 8 * HEADER_BYTES / min(link.rate_bps for link in _links(experiment))
    of_run = read_requests(run.run_dir / "requests.parquet")
    pairs = zip(outcome_rows(experiment.problem, fast.requests), of_run, strict=True)
    return next(filter(None, (_unlike(*pair, within_s) for pair in pairs)), "")


def _links(experiment: Experiment) -> Iterator[Link]:
    yield from experiment.network.links.values()
    for change in experiment.network.changes:
        yield from change.links.values()


def _is_random(experiment: Experiment) -> bool:
    return any(link.jitter_s or 0 < link.loss_ratio < 1 for link in _links(experiment))


def _unlike(simulated: RequestRow, served: RequestRow, within_s: float) -> str:
    for name in _COUNTS:
        ours, theirs = getattr(simulated, name), getattr(served, name)
        if ours != theirs:
            return f"request {served.request}: {name} is {theirs!r}, simulated {ours!r}"
    for name in _TIMES:
        ours, theirs = simulated.times[name], served.times[name]
        if (ours is None) != (theirs is None):
            return f"request {served.request}: {name} is {theirs}, simulated {ours}"
        if ours is not None and theirs is not None and not isclose(ours, theirs, rel_tol=0, abs_tol=within_s):
            return f"request {served.request}: {name} is {theirs}, simulated {ours}"
    return ""

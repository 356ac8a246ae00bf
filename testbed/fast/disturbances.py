"""What the fast engine cannot serve, so that the engine ``virtual`` must."""

from __future__ import annotations

import math

from policies.online import OnlinePolicy
from testbed.experiments.experiment import Experiment
from testbed.faultkinds import Join, Kill, Leave, Restart

_CARRIED = (Kill.name, Restart.name, Join.name, Leave.name)
"""The kinds of fault that this engine carries out."""


def disturbance(experiment: Experiment, online: OnlinePolicy | None) -> str | None:
    """Returns the key that can disturb sessions midway; ``None``: their times follow from the closed form."""
    decoding = experiment.problem.decoding
    found = (
        (bool(reason := _not_carried(experiment)), reason),
        (
            online is not None and bool(experiment.faults.planned),
            f"fault, with policy.online {experiment.policy.online},",
        ),
        (
            experiment.compute.paging is not None
            and experiment.compute.prefix is not None
            and experiment.compute.prefix.history_bytes > 0,
            "cache.hub_history, where caches grow,",
        ),
        (experiment.compute.batching == "serial", "compute.batching serial"),
        (decoding is not None and decoding.in_flight > 1, "decoding.in_flight"),
        (
            online is not None and experiment.compute.paging is not None,
            f"policy.online {experiment.policy.online}, where caches grow,",
        ),
        (any(s.contention_ratio for s in experiment.problem.servers), "contention of hardware"),
        (
            online is not None and not online.drains,
            f"policy.online {experiment.policy.online}, which cuts sessions,",
        ),
    )
    return next((what for is_there, what in found if is_there), None)


def _not_carried(experiment: Experiment) -> str:
    """Returns which of the scenario's faults and changes of links this engine cannot carry out; "" if it can all of them."""
    faults = experiment.faults
    for fault in faults.planned:
        if fault.kind not in _CARRIED:
            return f"fault {fault.kind}"
        if fault.after is not None:
            return "fault after a token"
        if experiment.compute.paging is not None:
            if fault.kind not in (Kill.name, Restart.name):
                return f"fault {fault.kind}, where caches grow,"
            if experiment.problem.forwarding:
                return "fault, where caches grow and servers forward,"
    if faults.membership.kind != "instant":
        return "membership"
    limit_s = min(faults.recovery.connect_timeout_s, faults.recovery.step_limit_s(1))
    return f"a link that is cut for more than {limit_s:g} s" if _longest_cut_s(experiment) > limit_s else ""


def _longest_cut_s(experiment: Experiment) -> float:
    cut_at_s: dict[tuple[str, str], float] = {}
    longest_s = 0.0
    for change in experiment.network.changes:
        for pair, link in change.links.items():
            if link.loss_ratio >= 1 and experiment.uses(pair):
                cut_at_s.setdefault(pair, change.at_s)
            elif pair in cut_at_s:
                longest_s = max(longest_s, change.at_s - cut_at_s.pop(pair))
    return math.inf if cut_at_s else longest_s

"""What can go wrong in an experiment, and what is done about it."""

from __future__ import annotations

from typing import NamedTuple

from policies.membership import MembershipRules
from testbed.experiment import Experiment, Fault, RecoveryRules


class Failures(NamedTuple):
    """As an ``Experiment`` has them."""

    faults: tuple[Fault, ...] = ()
    recovery: RecoveryRules = RecoveryRules()
    membership: MembershipRules = MembershipRules()
    absent: frozenset[int] = frozenset()


def failures_of(experiment: Experiment) -> Failures | None:
    """``None`` if no server ever comes, goes or changes and routers are never wrong about them."""
    if not experiment.faults and not experiment.absent and experiment.membership.kind == "instant":
        return None
    return Failures(experiment.faults, experiment.recovery, experiment.membership, experiment.absent)

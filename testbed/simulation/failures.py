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
    """``None`` if no server ever comes, goes or changes and routers are never wrong about them.

    A session that a move of a server cuts is replayed at once without them, and otherwise only with them.
    """
    has_faults = experiment.faults or experiment.absent or experiment.membership.kind != "instant"
    is_cut_otherwise = experiment.online is not None and experiment.recovery.replay == "step_by_step"
    if not has_faults and not is_cut_otherwise:
        return None
    return Failures(experiment.faults, experiment.recovery, experiment.membership, experiment.absent)

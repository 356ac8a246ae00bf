"""What the simulator makes of a placement before it is used: for placement policies that want a "rehearsal"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # these import the module that names this one
    from policies.outcomes import Outcome
    from policies.problem import Placement
    from policies.workload import RequestPlan


class Rehearsal(Protocol):
    """Serves requests that the policy makes up with a placement that it thinks of, in the simulator's fast engine."""

    @property
    def keeps_caches(self) -> bool:
        """Whether servers keep caches for later requests, so that these are faster if they are turns of a conversation."""
        ...

    def __call__(self, placement: Placement, requests: Sequence[RequestPlan]) -> Sequence[Outcome]:
        """Returns what becomes of ``requests`` (numbered 0, 1, ... by ascending arrival), in their order.

        They are served as the scenario's are, with its routing policy, links, batches and caches, but without what nobody
        knows: its own requests, its faults, its changes of links, what its seed draws; and without ``policy.online``.
        Servers of ``Outcome.hops`` have the problem's numbers. Raises ``PolicyError`` if the placement, a request or a route
        breaks a rule, or if links are so slow that a client gives a server up.
        """
        ...

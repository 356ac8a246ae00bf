"""A request in the fast engine, from its arrival to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from nodes.admission import Attempts
from nodes.clock import on_tick
from nodes.recovery import Recovery
from policies.problem import Hop, Route
from policies.workload import RequestPlan
from testbed.fast.opening import SimulatedHop
from testbed.fast.outcome import SimulatedRequest
from testbed.fast.steps import ChainSession, Key


@dataclass(slots=True)
class Session:
    """A request that has not ended, or whose chain stays open for the next turn.

    ``number`` is the index of the request that has opened the chain first, and ``opening`` numbers the attempts to open one:
    a further turn goes on with both.
    """

    number: int
    plan: RequestPlan
    attempts: Attempts
    """Those since the request has had no chain."""
    opening: int = 0
    n_rejections: int = 0
    n_chains: int = 0
    """How many chains it has tried to open."""
    asked_at_s: float = 0.0
    waiting_s: float = 0.0
    opened_at_s: float | None = None
    """When it began to open the first chain that admitted it."""
    ready_at_s: float | None = None
    """When its prompt could be sent."""
    route: Route | None = None
    admitted: tuple[Hop, ...] = ()
    """The hops of the last chain that admitted it."""
    opened: list[SimulatedHop] = field(default_factory=list)
    """The hops that have accepted the session, in the order of their blocks once all of them have."""
    n_unfilled: int = 0
    """The hops that have not confirmed that the hub has filled their caches."""
    on_chain: ChainSession | None = None
    """The session on its present chain, or on the last one."""
    preempted_by: int | None = None
    """A server that took its cache before all of its present chain was open."""
    pages: Sequence[bytes] = ()
    """The ids of its prompt's pages, of which it asks servers for the caches."""
    begins: Sequence[int] = ()
    """Where the inputs of each hop begin that its hub has."""
    n_reused: int | None = None
    """Tokens of its prompt that are not computed; ``None``: no cache outlives its request."""
    recovery: Recovery | None = None
    """What its client does when hops fail; ``None``: it has done nothing yet."""
    is_recovering: bool = False
    """Whether it has lost hops, and their replacements have not computed the present step."""
    n_replays: int = 0
    n_preemptions: int = 0
    preempted_tokens: int = 0
    preempted_s: float = 0.0
    cost_s: float | None = None
    """What routing minimised when the request first asked."""
    wait_expected_s: float = 0.0
    """The longest wait that routing expected."""

    @property
    def key(self) -> Key:
        return self.number, self.opening

    def outcome(
        self,
        status: str,
        now_s: float,
        route: Route | None,
        first_at_s: float | None,
        ended_at_s: float | None,
        reason: str,
    ) -> SimulatedRequest:
        """Returns how it has ended now, with when it had its first token and all of them."""
        arrived_at_s, setup_s = on_tick(self.plan.arrival_at_s), None
        waiting_s = now_s - arrived_at_s if self.ready_at_s is None else self.waiting_s
        if self.ready_at_s is not None and first_at_s is not None:
            setup_s = self.ready_at_s - (arrived_at_s + waiting_s)
        return SimulatedRequest(
            plan=self.plan,
            status=status,
            route=route,
            n_rejections=self.n_rejections,
            waiting_s=waiting_s,
            setup_s=setup_s,
            ttft_s=None if first_at_s is None else first_at_s - arrived_at_s,
            time_s=None if ended_at_s is None else ended_at_s - arrived_at_s,
            ended_s=now_s - arrived_at_s,
            reason=reason,
            rounds=None if self.on_chain is None else self.on_chain.rounds,
            n_done=self.on_chain.token if self.on_chain is not None and ended_at_s is None else 0,
            n_replays=self.n_replays,
            n_preemptions=self.n_preemptions,
            preempted_tokens=self.preempted_tokens,
            preempted_s=self.preempted_s,
            cost_s=self.cost_s,
            wait_expected_s=self.wait_expected_s,
            n_cached_tokens=self.n_reused,
        )

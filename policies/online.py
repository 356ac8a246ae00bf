"""Two-time-scale operation: the placement follows the load while sessions are routed all the time.

Contains the interface between an engine and an online policy, the steps from one placement to another, and
the policy that places again when concurrency leaves the range that the placement was designed for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Protocol

from policies.cgbp import CgBp
from policies.design import memory_bound
from policies.feasibility import largest_concurrency
from policies.interfaces import PlacementPolicy
from policies.joining import among, spread
from policies.problem import BlockRange, InfeasiblePlacement, Placement, PolicyError, Problem


class SystemView(NamedTuple):
    """The state of the system that a controller sees at a check.

    ``n_active`` counts requests that have arrived and not ended. Those that wait for room are included,
    because sessions alone could never show that the room is too small. ``mean_active`` is its time average
    and ``request_rate`` the arrivals per second, both since the last check. ``placement`` is the one last
    decided. ``moving`` are the servers that have not reached it yet. ``alive`` are the servers that are
    believed to be alive (``None``: all of them).
    """

    n_active: int
    mean_active: float
    request_rate: float
    placement: Placement
    moving: tuple[int, ...] = ()
    alive: frozenset[int] | None = None


class Controller(Protocol):
    """An online policy bound to one problem and the placement that it starts from."""

    next_check_at_s: float
    """When ``check`` must be called next; each call moves it on. Infinite: never again."""

    def check(self, now_s: float, view: SystemView) -> Placement | None:
        """Returns the placement to move to, or ``None`` to change nothing. Must not change ``view.moving``."""
        ...


class OnlinePolicy(Protocol):
    """Makes controllers. ``name`` is its name in scenarios.

    With ``drains`` a server that must change accepts new sessions only for the blocks that it keeps, lets
    those on other blocks finish, loads, and then serves its new range. At most ``at_once`` servers
    change together, and every block always has a server that accepts sessions. Otherwise servers
    change at once and their sessions are cut.
    """

    name: str
    drains: bool = True
    at_once: int = 1
    needs_petals_throughput: ClassVar[bool] = False
    """As of a placement policy (``policies.interfaces``)."""
    counts_drafts: ClassVar[bool] = False
    """As of a placement policy."""

    def bind(self, problem: Problem, placement: Placement) -> Controller: ...


def moves(old: Placement, new: Placement) -> list[int]:
    """Returns the servers whose blocks or cache room differ, in list order."""
    return [
        j
        for j in range(len(old.ranges))
        if old.ranges[j] != new.ranges[j] or old.cache_bytes[j] != new.cache_bytes[j]
    ]


def loading_s(problem: Problem, server: int, old: BlockRange, new: BlockRange, load_bps: float) -> float:
    """Returns the seconds to load the blocks of ``new`` that ``old`` lacks on ``server``, at ``load_bps`` bits/s."""
    stored = problem.stored(server)
    return (stored.range_bytes(new) - stored.range_bytes(kept(old, new))) * 8 / load_bps


def kept(old: BlockRange, new: BlockRange) -> BlockRange:
    """Returns the blocks in both ranges, which a draining server continues to serve while it moves."""
    first, last = max(old.first, new.first), min(old.last, new.last)
    return BlockRange(first, last) if first < last else BlockRange(0, 0)


def can_spare(
    offered: Sequence[BlockRange], server: int, stays: BlockRange, alive: Collection[int] | None = None
) -> bool:
    """Whether another server offers every block that ``server`` offers outside ``stays``.

    With ``alive`` only those servers count as others.
    """
    others = {
        b
        for j, held in enumerate(offered)
        if j != server and (alive is None or j in alive)
        for b in range(*held)
    }
    return all(b in others or stays.first <= b < stays.last for b in range(*offered[server]))


def rolling_order(
    old: Sequence[BlockRange],
    new: Sequence[BlockRange],
    changing: Sequence[int],
    n_blocks: int,
    alive: Collection[int] | None = None,
) -> list[int]:
    """Returns an order in which the servers ``changing`` can move one by one while every block stays held.

    While a server moves, it holds the blocks that it keeps; afterwards its new range. The next one is always
    the server whose move does the least harm: its lost block with the fewest holders has the most of them. On
    ties it is the first one. If the rest cannot move, because each would leave a block on no server, the
    order is shorter than ``changing``. With ``alive`` only those servers count and move, and blocks that none
    of them holds are ignored.
    """
    there = range(len(old)) if alive is None else alive
    held = Counter(b for j, r in enumerate(old) if j in there for b in range(r.first, r.last))
    if alive is None and any(held[b] < 1 for b in range(n_blocks)):
        return []
    left, order = [j for j in changing if j in there], []
    while left:
        spare, _, j = max((_spare(held, old[j], new[j]), -j, j) for j in left)
        if spare < 1:
            break
        left.remove(j)
        order.append(j)
        held.subtract(range(*old[j]))
        held.update(range(*new[j]))
    return order


def _spare(held: Counter[int], old: BlockRange, new: BlockRange) -> float:
    """Returns the fewest other holders of any block that a server drops by moving from ``old`` to ``new``."""
    stays = kept(old, new)
    lost = (b for b in range(*old) if not stays.first <= b < stays.last)
    return min((held[b] - 1 for b in lost), default=math.inf)


@dataclass
class TwoTimeScale(OnlinePolicy):
    """Runs a placement policy again when the mean concurrency leaves the design range for long enough.

    Every ``period_s`` it computes the |R| that the paper would choose for the mean number n of requests in
    the system: n + sqrt(n), up to the memory bound. If that is outside [|R| / (1 + tolerance), |R| (1 +
    tolerance)] of the present placement, on the same side, for ``patience_s``, it runs ``placement`` again
    for the mean over that time. Servers drain one after another (``at_once``). If the new placement is
    infeasible, or cannot be reached without leaving a block on no server, the old one stays.

    It also reacts to servers that die or join. If for ``patience_s`` other servers are alive than were
    placed, it places again for those that are alive. If no alive server holds some block, it does so at the
    next check. A server that is away keeps its blocks for when it comes back.
    """

    placement: PlacementPolicy = field(default_factory=CgBp)
    period_s: float = 60.0
    patience_s: float = 300.0
    tolerance_ratio: float = 0.25
    at_once: int = 1
    drains: bool = True
    name: str = "two-time-scale"
    counts_drafts: ClassVar[bool] = True

    def bind(self, problem: Problem, placement: Placement) -> TwoTimeScaleController:
        """Returns the controller. Raises ``PolicyError`` if ``placement`` has no design concurrency."""
        if placement.design_concurrency is None:
            raise PolicyError(
                f"{self.name} needs a placement that was designed for a number of sessions, which "
                f"{placement.policy} is not; use cg-bp, for example"
            )
        return TwoTimeScaleController(problem, placement, placement.design_concurrency, self)


@dataclass
class _Outside:
    """How long something has differed from the plan in the same way, and the load during that time.

    ``integral`` is the number of active requests, integrated over that time in seconds.
    """

    way: object = None
    lasted_s: float = 0.0
    integral: float = 0.0

    def note(self, way: object, elapsed_s: float, mean_active: float) -> None:
        """Record that it differed in the way ``way`` for ``elapsed_s``; ``None``: it was as planned."""
        if way != self.way:
            self.way, self.lasted_s, self.integral = way, 0.0, 0.0
        if way is not None:
            self.lasted_s += elapsed_s
            self.integral += elapsed_s * mean_active


class TwoTimeScaleController:
    """Watches the load and which servers are alive; see ``TwoTimeScale``."""

    def __init__(
        self, problem: Problem, placement: Placement, design_concurrency: int, policy: TwoTimeScale
    ) -> None:
        self._problem = problem
        self._policy = policy
        self._bound = max(min(memory_bound(problem), largest_concurrency(problem)), 1)
        self.design_concurrency = design_concurrency
        self.next_check_at_s = policy.period_s
        self._checked_at_s = 0.0
        self._load = _Outside()
        self._members = _Outside()
        self._placed_for = frozenset(j for j, held in enumerate(placement.ranges) if held.n_blocks)

    def check(self, now_s: float, view: SystemView) -> Placement | None:
        elapsed_s, self._checked_at_s = now_s - self._checked_at_s, now_s
        self.next_check_at_s = now_s + self._policy.period_s
        side = 0 if view.moving else self._side_of(self._wanted(view.mean_active))
        self._load.note(side or None, elapsed_s, view.mean_active)
        others = None if view.moving or view.alive == self._placed_for else view.alive
        self._members.note(others, elapsed_s, view.mean_active)
        patience_s = self._policy.patience_s
        is_placed_for_others = others is not None and (
            self._members.lasted_s >= patience_s or self._n_unserved(view.placement.ranges, others) > 0
        )
        wanted = self.design_concurrency
        if is_outside := side != 0 and self._load.lasted_s >= patience_s:
            wanted = self._wanted(self._load.integral / self._load.lasted_s)
            self._load = _Outside()
        return self._placed(wanted, view) if is_outside or is_placed_for_others else None

    def _placed(self, wanted: int, view: SystemView) -> Placement | None:
        """Returns a placement for ``wanted`` sessions, or ``None`` if the old one must stay."""
        old, n_blocks = view.placement, self._problem.model.n_blocks
        try:
            if view.alive is None:
                new = self._policy.placement.place(self._problem, wanted)
            else:
                new = self._placed_among(view.alive, wanted, old)
        except InfeasiblePlacement:
            return None  # the servers cannot hold it: the old placement stays
        changing = moves(old, new)
        order = rolling_order(old.ranges, new.ranges, changing, n_blocks, view.alive)
        if len(order) < len(changing):
            if view.alive is None:
                return None
            new = _only(old, new, order)
            if self._n_unserved(new.ranges, view.alive) >= self._n_unserved(old.ranges, view.alive):
                return None
        else:
            self.design_concurrency = wanted
            if view.alive is not None:
                self._placed_for, self._members = view.alive, _Outside()
        return new if order else None

    def _placed_among(self, alive: frozenset[int], wanted: int, old: Placement) -> Placement:
        """Returns a placement on the servers ``alive``; the others keep their blocks.

        It is for fewer sessions than ``wanted`` if these do not fit. Raises ``InfeasiblePlacement`` if the
        alive servers have no room for the model.
        """
        servers, n_servers = sorted(alive), self._problem.n_servers
        there = self._problem if len(servers) == n_servers else among(self._problem, servers)
        while True:
            try:
                new = spread(self._policy.placement.place(there, wanted), servers, n_servers)
                break
            except InfeasiblePlacement:
                if wanted == 1:
                    raise
                wanted = max(1, wanted * 3 // 4)
        return _only(old, new, servers)

    def _n_unserved(self, ranges: Sequence[BlockRange], alive: Collection[int]) -> int:
        """Returns how many blocks no alive server holds."""
        held = {b for j in alive for b in range(*ranges[j])}
        return self._problem.model.n_blocks - len(held)

    def _wanted(self, mean_active: float) -> int:
        """Returns |R| for a mean of ``mean_active`` requests in the system (the paper's lambda T)."""
        return max(1, min(math.floor(mean_active + math.sqrt(mean_active) + 0.5), self._bound))

    def _side_of(self, wanted: int) -> int:
        """Returns 1 if ``wanted`` is above the design range, -1 if below, 0 if inside."""
        most = 1 + self._policy.tolerance_ratio
        design = self.design_concurrency
        return (wanted > design * most) - (wanted < design / most)


def _only(old: Placement, new: Placement, servers: Collection[int]) -> Placement:
    """Returns a placement that is ``new`` on ``servers`` and ``old`` on all others."""
    n_servers = range(len(old.ranges))
    return replace(
        new,
        ranges=tuple((new if j in servers else old).ranges[j] for j in n_servers),
        cache_bytes=tuple((new if j in servers else old).cache_bytes[j] for j in n_servers),
    )

"""Foresight's routing: the chain with the least cost for all requests, the backoff's waits included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from policies.chains import ChainGraph, Chains, Link, cheapest, route_of
from policies.interfaces import RoutingPolicy
from policies.link_waits import LinkWaits, Way
from policies.prefixes import saved_s
from policies.problem import Hop, Placement, Problem, RequestSpec, Route, service_s
from policies.remember import remember
from policies.replay import backoff_s
from policies.sharing import ByNumber, SharedSteps, Sharing
from policies.state import SystemState
from policies.waiting import fits, waiting_s
from policies.workload import Backoff
from policies.wsrr import has_room

_MOST_CYCLES = 2_000
"""What sessions add to each other is kept for at most this many cycles."""
WEIGHED = ("ttft", "tpot")
"""The objectives that say how the first token and the further ones weigh."""


def counted_tokens(problem: Problem, client: int) -> int | None:
    """Returns how many output tokens of a client's request count in a chain's cost; ``None``: all of them.

    With objectives for both the first token and the further ones, as many further tokens count as may take as long as the
    first: a chain's cost is then the share of its objectives that a request uses.
    """
    objectives_s = dict(problem.objectives_of(client))
    if not objectives_s.keys() >= set(WEIGHED):
        return None
    first_s, further_s = (objectives_s[name] for name in WEIGHED)
    return 1 + max(round(first_s / further_s), 1)


@dataclass
class ForesightRouting(RoutingPolicy):
    """The chain that costs this request least, waits of the retry backoff included (own); see ``ForesightRouter``.

    ``backoff`` has the waits of clients between attempts to open a session.
    """

    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen
    name: str = "foresight"
    counts_drafts: ClassVar[bool] = True

    def bind(self, problem: Problem, placement: Placement) -> ForesightRouter:
        return ForesightRouter(problem, placement, self.backoff, waits=LinkWaits.of(problem))


class ForesightRouter:
    """Minimises ``B(max_j t^W_j) + sum_j (service of hop j)`` exactly, over all chains.

    B(w) is the first attempt of the backoff series at or after w: what a wait of w really costs. For each
    distinct value v of B over the links, ascending, it finds the cheapest chain over links with B(t^W) <= v,
    and keeps the best sum. It ends when v plus the cost of the cheapest idle chain cannot be less than the
    best sum. So no chain would cost this request less in the present state. Of equal costs the
    shorter wait wins, then the server listed first.

    If servers share their time among sessions (``Problem.batching``), a link's cost also includes how much
    longer this request's steps take because of the sessions on the server, and how much longer theirs take
    because of this request (``policies.sharing``). Then first and further tokens weigh as the objectives say
    (``counted_tokens``). If messages wait for links, it also includes how long this
    request's do, and how much longer others' tokens do because of it (``waits``).

    Chains that probably hold the beginning of the prompt (``SystemState.asking``) cost what that saves less. Only whole
    chains are known to hold it, so the best of them is compared with the best of all. None is worse because of what it holds.
    """

    def __init__(
        self,
        problem: Problem,
        placement: Placement,
        backoff: Backoff,
        sharing: Sharing | None = None,
        waits: LinkWaits | None = None,
        chains: Chains | None = None,
    ) -> None:
        self._problem = problem
        self._placement = placement
        self._chains = chains or Chains(problem, placement)
        self._backoff = backoff
        self._sharing = None if problem.batching == "none" else sharing or Sharing(problem)
        self._link_waits = waits
        self._added_s: dict[SharedSteps, list[ByNumber]] = {}
        """What one session more costs per token, by server."""
        self._n_counted = [
            None if self._sharing is None else counted_tokens(problem, client)
            for client in range(len(problem.clients))
        ]

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the cheapest chain; ``cost_s`` includes the backoff, ``wait_s`` is the raw wait."""
        request = self._weighed(request)
        graph = self._chains.of(request)
        if graph.idle is None:
            return None
        ways_s = self._on_ways(graph.idle.hops, request, state, now_s)
        kept = () if state.asking is None else state.asking.chains
        n_active = state.all_active()
        shares = self._sharing is not None and any(n_active[hop.server] for hop in graph.idle.hops)
        waits = ways_s is not None and any(map(ways_s, graph.idle_links))
        if not kept and not shares and not waits and has_room(graph, state):
            return graph.idle  # nothing beats the idle optimum if it has no wait
        loads_s = self._loads(graph.idle.hops, request, n_active)
        waits_s, steps_s = self._waits(graph, state, now_s)
        best: Route | None = None
        best_s = math.inf
        for most_s in sorted({0.0, *steps_s.values()}):
            if most_s + graph.idle.cost_s >= best_s or most_s == math.inf:
                break

            longer = {link for link, step_s in steps_s.items() if step_s > most_s}
            service_s, chain = cheapest(graph.into, ways_s, None, loads_s, longer)
            if most_s + service_s < best_s:
                best_s = most_s + service_s
                best = route_of(chain, max(waits_s.get(id(link), 0.0) for link in chain), best_s)
        for hops, n_held in kept:

            def is_of(link: Link, hops: tuple[Hop, ...] = hops) -> bool:
                return link.hop is None or link.hop in hops

            service_s, chain = cheapest(graph.into, ways_s, is_of, loads_s)
            if not chain:  # some server holds other blocks by now
                continue
            cost_s = max(steps_s.get(id(link), 0.0) for link in chain) + service_s
            cost_s -= saved_s(self._problem, request, hops, n_held)
            if cost_s < best_s:
                best_s = cost_s
                best = route_of(chain, max(waits_s.get(id(link), 0.0) for link in chain), best_s)
        return best

    def _weighed(self, request: RequestSpec) -> RequestSpec:
        """Returns the request with as many output tokens as count; it needs room for all of them."""
        n_counted = self._n_counted[request.client]
        if n_counted is None or n_counted >= request.n_output_tokens:
            return request
        return replace(request, n_output_tokens=n_counted, held_tokens=request.cache_tokens)

    def _on_ways(
        self, idle: tuple[Hop, ...], request: RequestSpec, state: SystemState, now_s: float
    ) -> Callable[[Link], float] | None:
        """As ``_loads``, for the ways from a server or the client to a server, and back from it; a function of links."""
        waits = self._link_waits
        if waits is None:
            return None
        problem, client = self._problem, request.client
        n_decoded = request.n_output_tokens - 1
        pace = waits.pace(client, idle)
        prompt_s = service_s(problem, request, idle)[0] / problem.model.n_blocks
        used = set(state.used_queues())

        def on_way_s(way: Way, position: int) -> float:
            """``position``: the number of blocks that the prompt has passed when it comes to the way."""
            found_s = 0.0
            for queue in way:
                if queue in used:
                    n, backlog_s = state.use(queue, now_s, now_s + position * prompt_s)
                    present_s, with_s = (waits.token_wait_s(queue, among, pace) for among in (n, n + 1))
                    tokens_s = n_decoded * (present_s + n * (with_s - present_s))
                    found_s = max(found_s, backlog_s + tokens_s)
            return found_s

        ranges, forwarding = self._placement.ranges, problem.forwarding
        known_s: dict[tuple[int | None, int | None], float] = {}

        def ways_s(link: Link) -> float:
            if (found_s := known_s.get(link.ends)) is not None:
                return found_s
            previous, server = link.ends
            found_s = 0.0
            if server is not None:
                # Whatever block it enters at: servers are passed in the order of their ranges.
                found_s = on_way_s(waits.there(client, previous, server), ranges[server].first)
            last = previous if server is None else server
            if last is not None and (server is None or not forwarding):
                found_s += on_way_s(waits.back(client, last), ranges[last].last)
            known_s[link.ends] = found_s
            return found_s

        return ways_s

    def _loads(
        self, idle: tuple[Hop, ...], request: RequestSpec, n_active: Sequence[int]
    ) -> list[float] | None:
        """Returns how many seconds sharing each server adds to the cost of a hop there, and 0 for the way back.

        It is what the server's sessions add to this request's time, and what this request adds to theirs. ``None``: servers
        are not shared. ``n_active``: the number of sessions on every server.
        """
        if self._sharing is None:
            return None
        n_decoded, steps = request.n_output_tokens - 1, self._sharing.on(request.client, idle)
        if (added_s := self._added_s.get(steps)) is None:
            held = enumerate(self._placement.ranges)
            added_s = [steps.added_s(server, blocks.n_blocks) for server, blocks in held]
            remember(self._added_s, steps, added_s, _MOST_CYCLES)
        loads_s = [n_decoded * by_number[n] for by_number, n in zip(added_s, n_active, strict=True)]
        loads_s.append(0.0)
        return loads_s

    def _waits(
        self, graph: ChainGraph, state: SystemState, now_s: float
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Returns the raw waits, and the waits rounded up to the backoff's attempts, by ``id`` of the link.

        Links without a wait are left out.
        """
        waits_s: dict[int, float] = {}
        steps_s: dict[int, float] = {}
        free_bytes = state.all_free_bytes()
        for server, most_bytes, links in graph.of_servers:
            if fits(free_bytes[server], most_bytes):
                continue
            of_need: dict[float, tuple[float, float]] = {}
            for link in links:
                if (found := of_need.get(link.need_bytes)) is None:
                    wait_s = waiting_s(state, server, link.need_bytes, now_s)
                    step_s = backoff_s(wait_s, self._backoff) if wait_s < math.inf else wait_s
                    found = of_need[link.need_bytes] = wait_s, step_s
                if found[0]:
                    waits_s[id(link)], steps_s[id(link)] = found
        return waits_s, steps_s

"""Chains with capacities: GBP-CR, GCA, Theorem 4's choice of c, and JFFC (arXiv 2604.14993).

From a later paper by authors of the paper: Sun, He, Hou, "Serving Chain-structured Jobs with Large Memory
Footprints". A request of mean length takes T_k seconds alone on chain k, which has room for c_k such requests
at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import ClassVar, NamedTuple

from policies.chains import Chains, Link, cheapest, route_of
from policies.design import check_design_concurrency
from policies.feasibility import gigabytes
from policies.greedy import whole
from policies.interfaces import PlacementPolicy, Queue, RoutingPolicy
from policies.problem import (
    BlockRange,
    Hop,
    InfeasiblePlacement,
    Linear,
    Matrix,
    Placement,
    Problem,
    RequestSpec,
    Route,
    service_s,
)
from policies.state import SystemState
from policies.waiting import waiting_s

UTILISATION = 0.7
"""The load may use this share of the throughput of all chains that GBP-CR makes: its rho-bar."""

_LEAST_S = 1e-12
"""A request takes at least this many seconds on a chain."""
_MOST_TRIALS = 20_000
"""Limit of servers times concurrencies that a placement tries."""


class Chain(NamedTuple):
    """A chain with room for ``capacity`` mean requests at a time; each takes ``time_s`` alone.

    Its hops are whole ranges of servers, or their last parts.
    """

    hops: tuple[Hop, ...]
    capacity: int
    time_s: float


class MeanRequests:
    """Requests of the known mean lengths from an average client: its times are the means over all clients."""

    def __init__(self, problem: Problem) -> None:
        sent, one_way = problem.transmissions, problem.one_way
        if sent is not None:
            up, down = (Linear(_mean_row(way.base_s), _mean_row(way.slope_s)) for way in (sent.up, sent.down))
            sent = replace(sent, up=up, down=down)
        self.problem = replace(
            problem,
            clients=("mean",),
            hub_token_s=sum(map(problem.hub_s, range(len(problem.clients)))) / len(problem.clients)
            if problem.hub_tokens_s
            else problem.hub_token_s,
            hub_tokens_s=(),
            raw_rtt_s=_mean_row(problem.raw_rtt_s),
            token_rtt_s=_mean_row(problem.token_rtt_s),
            input_rtt_base_s=_mean_row(problem.input_rtt_base_s),
            input_rtt_slope_s=_mean_row(problem.input_rtt_slope_s),
            transmissions=sent,
            links=None,
            one_way=one_way
            and one_way._replace(up_s=_mean_row(one_way.up_s), down_s=_mean_row(one_way.down_s)),
        )
        self.request = RequestSpec(0, *problem.mean_lengths)
        self.slot_bytes = problem.model.cache_bytes(self.request.n_tokens)
        """Bytes of one block's cache for such a request."""

    def time_s(self, hops: Sequence[Hop]) -> float:
        """Returns T_k: the seconds of one such request alone on this chain, more than 0."""
        return max(service_s(self.problem, self.request, hops)[1], _LEAST_S)


def _mean_row(rows: Matrix) -> Matrix:
    return (tuple(map(fmean, zip(*rows, strict=True))),)


def compose(mean: MeanRequests, placement: Placement) -> list[Chain]:
    """Returns GCA's chains (Alg. 2), fastest first: each is in turn the fastest with room, and uses all of it.

    A server's room is counted in slots, each of which holds one block's cache of a mean request. A server
    that ends with block b may be followed by any whose range contains b + 1; it computes the rest of its
    range.
    """
    links = Chains(mean.problem, placement).of(mean.request).into
    slots = [whole(room, mean.slot_bytes) for room in placement.cache_bytes]

    def has_room(link: Link) -> bool:
        return link.hop is None or slots[link.hop.server] >= link.hop.n_blocks

    chains = []
    while found := cheapest(links, keep=has_room)[1]:
        hops = route_of(found, 0.0, 0.0).hops
        capacity = min(slots[hop.server] // hop.n_blocks for hop in hops)
        for hop in hops:
            slots[hop.server] -= capacity * hop.n_blocks
        chains.append(Chain(hops, capacity, mean.time_s(hops)))
    return sorted(chains, key=lambda chain: chain.time_s)


def least_response_s(chains: Sequence[Chain], rate: float) -> float:
    """Returns Theorem 4's lower bound on the mean response time in seconds at ``rate`` requests per second.

    It is infinite if the chains cannot carry the rate. The model is a birth-death chain: with n requests in
    the system the min(n, all) fastest slots work, each at 1 / T_k. That is optimal even if requests may move
    to the fastest slots at any time. By Little's law the bound is the mean number of requests divided by the
    rate.
    """
    speeds = sorted(((1 / chain.time_s, chain.capacity) for chain in chains), reverse=True)
    full = sum(speed * capacity for speed, capacity in speeds)
    if rate >= full:
        return math.inf
    # State probabilities are relative, and rescaled when one becomes large, so that none overflows.
    weight, total, number, n, drains = 1.0, 1.0, 0.0, 0, 0.0
    for speed, capacity in speeds:
        for _ in range(capacity):
            n, drains = n + 1, drains + speed
            weight *= rate / drains
            if weight > 1e100:
                total, number, weight = total / weight, number / weight, 1.0
            total += weight
            number += n * weight
    # From here on every state is rho times as probable as the one before.
    rho = rate / full
    tail = weight * rho / (1 - rho)
    total += tail
    number += tail * (n + 1 / (1 - rho))
    return number / total / rate


@dataclass
class ChainComposition(PlacementPolicy):
    """Disjoint chains of the servers with the least time per block, as many as needed (GBP-CR, Alg. 1).

    m_j(c) = min(floor(M_j / (s_m + c s_c)), L) at mean lengths. Servers are used in the order of (tau^c_j +
    tau^p_j m_j) / m_j, where tau^c_j and tau^p_j are a mean request's times on j besides the blocks and per
    block. Windows follow each other; the last one of a chain is shifted back to L - m_j as in the authors'
    Python code (their MATLAB code cuts it off). Chains are added until their throughput at c sessions each
    reaches the load / 0.7. The other servers hold nothing. If c is not given, it is the one whose chains,
    composed by GCA, have the smallest ``least_response_s``. Differences to the paper: clients are averaged,
    and if no c carries the load, it is the one with the most throughput. Differences to the authors' code:
    servers whose chain stays incomplete hold nothing, where theirs keep their blocks, of which GCA can make
    further chains; and a chain's time counts every block once, where theirs counts the whole last window.
    """

    name: str = "chain-composition"
    sees_join_order: ClassVar[bool] = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks. Raises ``InfeasiblePlacement`` if these servers make no chain."""
        check_design_concurrency(design_concurrency)
        mean = MeanRequests(problem)
        tried = _concurrencies(mean) if design_concurrency is None else [design_concurrency]
        found = [placement for c in tried if (placement := self._at(mean, c)) is not None]
        if not found:
            memory = gigabytes(sum(server.memory_bytes for server in problem.servers))
            raise InfeasiblePlacement(
                f"{self.name} makes no chain of {problem.model.n_blocks} blocks of "
                f"{gigabytes(problem.model.block_bytes)} at design concurrency {1 if design_concurrency is None else design_concurrency} "
                f"({memory} of memory in all); add servers"
            )
        if len(found) == 1:
            return found[0]
        return min(found, key=lambda placement: _worth(mean, placement))

    def _at(self, mean: MeanRequests, concurrency: int) -> Placement | None:
        problem = mean.problem
        n_blocks = problem.model.n_blocks
        counts = _counts(mean, concurrency)
        able = [j for j, count in enumerate(counts) if count]
        hub_s = problem.hub_s(mean.request.client) * mean.request.n_output_tokens
        order = sorted(able, key=lambda j: (mean.time_s((Hop(j, 0, counts[j]),)) - hub_s) / counts[j])
        ranges = [BlockRange(0, 0)] * problem.n_servers
        throughput, hops = 0.0, list[Hop]()
        for j in order:
            position = hops[-1].last if hops else 0
            first = min(position, n_blocks - counts[j])
            ranges[j] = BlockRange(first, first + counts[j])
            hops.append(Hop(j, position, ranges[j].last))
            if ranges[j].last == n_blocks:
                throughput += concurrency / mean.time_s(hops)
                hops = []
                if throughput * UTILISATION >= problem.request_rate:
                    break
        for hop in hops:  # those of an unfinished chain
            ranges[hop.server] = BlockRange(0, 0)
        if not throughput:
            return None
        return Placement(self.name, tuple(ranges), problem.room_bytes(ranges), concurrency)


def _counts(mean: MeanRequests, concurrency: int) -> list[int]:
    problem, cache_bytes = mean.problem, concurrency * mean.slot_bytes
    return [
        problem.stored(j).most_blocks(server.memory_bytes, cache_bytes)
        for j, server in enumerate(problem.servers)
    ]


def _concurrencies(mean: MeanRequests) -> list[int]:
    """Returns the values of c to try, ascending: each is the largest with the same m_j of some server.

    With many servers they are thinned out.
    """
    problem = mean.problem
    servers = problem.servers
    kinds = {(server.memory_bytes, problem.stored(j)) for j, server in enumerate(servers)}
    found = {
        whole(memory / count - model.worst_bytes(count) / count, mean.slot_bytes)
        for memory, model in kinds
        for count in range(1, model.n_blocks + 1)
        if memory >= model.worst_bytes(count)
    }
    ordered = sorted(c for c in found if c >= 1)
    step = -(-len(ordered) * len(servers) // _MOST_TRIALS)
    return ordered[:: max(step, 1)]


def _worth(mean: MeanRequests, placement: Placement) -> tuple[float, float]:
    """Returns (least response in seconds, minus the throughput) of a placement; smaller is better."""
    chains = compose(mean, placement)
    return least_response_s(chains, mean.problem.request_rate), -sum(c.capacity / c.time_s for c in chains)


class Jffc(RoutingPolicy):
    """The fastest chain with a free slot; without one the request waits in order (JFFC, Alg. 3).

    Chains and slots are GCA's. It needs the coordinator's queue in order of arrival (``queue``).
    """

    name = "jffc"
    queue: ClassVar[Queue] = "fifo"

    def bind(self, problem: Problem, placement: Placement) -> JffcRouter:
        return JffcRouter(problem, placement)


class JffcRouter:
    """The router of ``Jffc``.

    A session uses one slot, whatever its length. Because lengths differ, servers' room is checked, too.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._placement = placement
        self.chains = compose(MeanRequests(problem), placement)

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the fastest chain with a free slot and room now, else the one that has them first."""
        block_bytes = self._problem.model.cache_bytes(request.cache_tokens)
        best: tuple[Chain, float] | None = None
        for chain in self.chains:
            needs = [(hop.server, hop.n_blocks * block_bytes) for hop in chain.hops]
            wait_s = max(waiting_s(state, server, need, now_s) for server, need in needs)
            if wait_s == math.inf:  # the chain can never hold the request
                continue
            if min(state.n_active(hop.server) for hop in chain.hops) >= chain.capacity:
                ends = sorted(_sessions(state, chain.hops))
                n_over = len(ends) - chain.capacity
                if n_over >= 0:
                    wait_s = max(wait_s, ends[n_over] - now_s, math.ulp(0.0))
            if best is None or wait_s < best[1]:
                best = chain, wait_s
            if wait_s == 0.0:
                break
        if best is None:
            return None
        chain, wait_s = best
        return Route(chain.hops, wait_s, wait_s + service_s(self._problem, request, chain.hops)[1])


def _sessions(state: SystemState, hops: Sequence[Hop]) -> list[float]:
    """Returns the expected ends of sessions on this chain: those with its number of blocks on each server."""
    ends: dict[object, float] = {}
    for at, hop in enumerate(hops):
        n_blocks = hop.n_blocks
        here = {held.key: held.ends_at_s for held in state.sessions(hop.server) if held.n_blocks == n_blocks}
        ends = here if at == 0 else {key: ends[key] for key in ends if key in here}
    return list(ends.values())

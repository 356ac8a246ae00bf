"""Helix (ASPLOS '25): a placement with the largest flow of requests, and round robin weighted by that flow.

Servers batch, so that what counts is how many requests a second each of them can serve. The chains are paths through a
flow network: the clients, servers that follow each other, the clients again. Public code: Thesys-lab/Helix-ASPLOS25.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.composition import MeanRequests
from policies.feasibility import gigabytes
from policies.greedy import whole
from policies.neighbours import Neighbours, Ranges
from policies.petals import choose_ranges
from policies.pipelines import SeparatePipelines, Swarm
from policies.problem import (
    BlockRange,
    Hop,
    InfeasiblePlacement,
    Placement,
    Problem,
    RequestSpec,
    Route,
    service_s,
)
from policies.state import SystemState
from policies.waiting import waiting_s

WEIGHTS_RATIO = 0.5
"""Of a server's memory, the most that blocks take where no number of sessions is given."""
_MOST_EXACT = 60
"""Servers up to which the program is solved; it has a switch for each two of them."""
_N_DRAWS = 6000
_SCALE = 10**6
"""Flows are whole millionths of the largest server's."""

_LEAST_S = 1e-9
"""What a request takes of a server at least."""

HUB = -1
"""The clients, as a node of the flow network."""
Flow = dict[tuple[int, int], float]
"""Requests per second by (from, to), where there are any."""


class Capacities:
    """What servers and links carry, in requests of mean length per second."""

    def __init__(self, problem: Problem) -> None:
        self.mean = MeanRequests(problem)
        self.problem = self.mean.problem
        request = self.mean.request
        self._n_states = request.n_tokens - 1
        """Hidden states that a request sends over each of its links."""

    def server_rps(self, server: int, n_blocks: int) -> float:
        """With ``n_blocks``, and as many sessions in a batch as the rest of its memory has room for.

        Each takes its prompt alone, and its further tokens with the others. With hub-spoke its link is part of it.
        """
        spec, request = self.problem.servers[server], self.mean.request
        free_bytes = spec.memory_bytes - n_blocks * self.problem.model.block_bytes
        n = max(1, whole(free_bytes, n_blocks * self.mean.slot_bytes))
        prompt_s = spec.step_base_s + n_blocks * spec.prefill_s(request.n_input_tokens)
        step_s = spec.step_base_s + n_blocks * (spec.mean_decode_s(request) + spec.session_slope_s * (n - 1))
        rps = 1 / max(prompt_s + (request.n_output_tokens - 1) * step_s / n, _LEAST_S)
        if self.problem.forwarding:
            return rps
        return min(rps, self._rps(self.problem.input_rtt_slope_s[0][server] / 2))

    def link_rps(self, one: int, other: int) -> float:
        """Between servers, or a server and the clients (``HUB``)."""
        sent = self.problem.transmissions
        if not self.problem.forwarding or sent is None:
            return math.inf
        if one == HUB:
            return self._rps(sent.up.slope_s[0][other])
        return self._rps(sent.down.slope_s[0][one] if other == HUB else sent.across.slope_s[one][other])

    def _rps(self, state_s: float) -> float:
        return 1 / (state_s * self._n_states) if state_s > 0 else math.inf


def links_of(ranges: Sequence[BlockRange], n_blocks: int) -> list[tuple[int, int]]:
    """The links that sessions may take: to j after i where j has the block after i's last, and ends later."""
    held = [(j, r) for j, r in enumerate(ranges) if r.n_blocks]
    links = [(HUB, j) for j, r in held if r.first == 0]
    links += [(i, j) for i, a in held for j, b in held if b.first <= a.last < b.last]
    return links + [(j, HUB) for j, r in held if r.last == n_blocks]


def largest_flow(capacities: Capacities, ranges: Sequence[BlockRange]) -> tuple[float, Flow]:
    """The most requests per second that a placement serves, and where they go; by SciPy's maximum flow."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    n = len(ranges)
    rps = [capacities.server_rps(j, r.n_blocks) if r.n_blocks else 0.0 for j, r in enumerate(ranges)]
    unit = max(rps, default=0.0) / _SCALE
    links = links_of(ranges, capacities.problem.model.n_blocks)
    if not unit or not links:
        return 0.0, {}
    most = np.iinfo(np.int32).max // (n + 2)

    def whole_units(value: float) -> int:
        return int(min(value / unit, most)) if value > 0 else 0

    # Server j is entered at node j and left at node n + j; the clients are the source and the sink.
    source, sink = 2 * n, 2 * n + 1
    edges = [(j, n + j, whole_units(rps[j])) for j in range(n) if rps[j]]
    edges += [
        (source if i == HUB else n + i, sink if j == HUB else j, whole_units(capacities.link_rps(i, j)))
        for i, j in links
    ]
    tails, heads, amounts = zip(*edges, strict=True)
    graph = csr_array((np.array(amounts, dtype=np.int32), (tails, heads)), shape=(2 * n + 2, 2 * n + 2))
    found = maximum_flow(graph, source, sink)
    flow: Flow = {}
    for i, j in links:
        amount = found.flow[source if i == HUB else n + i, sink if j == HUB else j]
        if amount > 0:
            flow[i, j] = float(amount) * unit
    return float(found.flow_value) * unit, flow


@dataclass
class Helix:
    """The placement with the largest flow of requests through it, by mixed-integer programming (Helix).

    Blocks take at most half of a server's memory, as there; with ``design_concurrency`` given, all but the caches of as many
    mean requests. Tokens per second of k blocks are not measured here but follow from the hardware profile
    (``Capacities.server_rps``). Up to 60 servers HiGHS improves the best of SWARM's stages, separate pipelines, PETALS'
    windows and a local search; beyond, that is the answer. ``bounds`` has the flow, what no placement exceeds, and
    ``proven_optimal``: if it is 0, the limits of the search decided (``max_nodes``, which every machine reaches alike, or
    ``time_limit_s``).
    """

    time_limit_s: float = 60.0
    max_nodes: int = 300
    name: str = "helix"

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Raises ``InfeasiblePlacement`` if the servers cannot hold all blocks within these limits."""
        capacities = Capacities(problem)
        counts = _most_blocks(capacities, design_concurrency)
        ranges = _searched(capacities, counts, problem)
        if ranges is None:
            memory = gigabytes(sum(server.memory_bytes for server in problem.servers))
            limit = (
                "half of their memory"
                if design_concurrency is None
                else f"room for {design_concurrency} sessions"
            )
            raise InfeasiblePlacement(
                f"{self.name} finds no way to put {problem.model.n_blocks} blocks of "
                f"{gigabytes(problem.model.block_bytes)} on these servers with {limit} ({memory} in all); add servers, or "
                "set policy.design_concurrency lower"
            )
        flow = largest_flow(capacities, ranges)[0]
        bound, proven = _bound(capacities, counts), 0.0
        if problem.n_servers <= _MOST_EXACT and flow < bound * (1 - 1e-6):
            from policies.helix_program import improved

            ranges, better_bound, is_optimal = improved(
                capacities, counts, ranges, time_limit_s=self.time_limit_s, max_nodes=self.max_nodes
            )
            flow = largest_flow(capacities, ranges)[0]
            bound, proven = max(flow, min(bound, better_bound)), float(is_optimal)
        if flow >= bound * (1 - 1e-6):
            proven = 1.0
        block_bytes = problem.model.block_bytes
        rooms = tuple(
            server.memory_bytes - block_bytes * held.n_blocks if held.n_blocks else 0.0
            for server, held in zip(problem.servers, ranges, strict=True)
        )
        bounds = {"flow_rps": flow, "upper_bound_rps": bound, "proven_optimal": proven}
        return Placement(self.name, tuple(ranges), rooms, design_concurrency, bounds)


def _most_blocks(capacities: Capacities, design_concurrency: int | None) -> list[int]:
    model, counts = capacities.problem.model, []
    for server in capacities.problem.servers:
        if design_concurrency is None:
            most = whole(server.memory_bytes * WEIGHTS_RATIO, model.block_bytes)
        else:
            each_bytes = model.block_bytes + design_concurrency * capacities.mean.slot_bytes
            most = whole(server.memory_bytes, each_bytes)
        counts.append(min(most, model.n_blocks))
    return counts


def _bound(capacities: Capacities, counts: Sequence[int]) -> float:
    """No placement serves more: every request needs all blocks, and a server is fastest per block with its best number."""
    n_blocks = capacities.problem.model.n_blocks
    best = (
        max((k * capacities.server_rps(j, k) for k in range(1, most + 1)), default=0.0)
        for j, most in enumerate(counts)
    )
    return sum(best) / n_blocks


def _searched(capacities: Capacities, counts: Sequence[int], problem: Problem) -> Ranges | None:
    """The best of other policies' placements within ``counts``, improved by small changes while they help."""
    n_blocks = problem.model.n_blocks
    limited = _limited(problem, counts)
    seeds: list[Ranges] = []
    for policy in (Swarm(), SeparatePipelines()):
        try:
            seeds.append(policy.place(limited, 1).ranges)
        except InfeasiblePlacement:
            continue
    order = sorted(range(len(counts)), key=lambda j: problem.servers[j].decode_s)
    seeds.append(tuple(choose_ranges(problem, list(counts), [j for j in order if counts[j]])))
    whole_ones = [
        ranges
        for ranges in seeds
        if all(held.n_blocks <= most for held, most in zip(ranges, counts, strict=True))
        and not Placement("", ranges, ()).uncovered(n_blocks)
    ]
    if not whole_ones:
        return None

    def worth(ranges: Ranges) -> float:
        return largest_flow(capacities, ranges)[0]

    best = max(whole_ones, key=worth)
    best_flow, bound = worth(best), _bound(capacities, counts)
    neighbours = Neighbours(problem, random.Random("helix"))
    for _ in range(_N_DRAWS * _MOST_EXACT // max(_MOST_EXACT, problem.n_servers)):
        if best_flow >= bound * (1 - 1e-6):
            break
        ranges = neighbours.draw(best)
        if ranges is None or any(held.n_blocks > most for held, most in zip(ranges, counts, strict=True)):
            continue
        flow = worth(ranges)
        if flow >= best_flow:  # sideways, too: many placements serve equally much
            best, best_flow = ranges, flow
    return best


def _limited(problem: Problem, counts: Sequence[int]) -> Problem:
    """The same servers with memory for ``counts`` blocks and one session."""
    from dataclasses import replace

    each_bytes = problem.model.block_bytes + problem.design_cache_bytes
    servers = tuple(
        replace(server, memory_bytes=count * each_bytes, block_cap=None)
        for server, count in zip(problem.servers, counts, strict=True)
    )
    return replace(problem, servers=servers)


EDGE_RATIO = 0.05
"""Links with less of what leaves a server are not used."""
HIGH_WATER = 0.9
"""Of a server's room for caches; with more in use it gets no new sessions."""
OUTPUT_RATIO = 0.6
"""Of the output that a request may have, what it is expected to need room for."""


class Iwrr:
    """At each hop the server whose turn it is, by the largest flow through the placement (Helix' scheduler).

    Interleaved weighted round robin: the least of (load + length / flow), to which the request then adds. Links with less
    than 5 % of what leaves a server are masked, and servers with more than 0.9 of their caches in use once the request's
    input and 0.6 of its output is there. Ours differs: Helix takes 240 tokens for every output; a request that finds all masked
    waits for the chain that it would take without masks.
    """

    name = "iwrr"

    def bind(self, problem: Problem, placement: Placement) -> IwrrRouter:
        return IwrrRouter(problem, placement)


class IwrrRouter:
    """A router whose links remember what they were given."""

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._placement = placement
        _, flow = largest_flow(Capacities(problem), placement.ranges)
        self._next = _next_servers(flow)
        self._load: dict[tuple[int, int], float] = dict.fromkeys(flow, 0.0)
        self._flow = flow

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """``Route.wait_s`` is the longest wait of its hops, ``cost_s`` that and the time of the service."""
        hops = self._walk(request, state, masked=True) or self._walk(request, state, masked=False)
        if hops is None:
            return None
        block_bytes = self._problem.model.cache_bytes(request.n_tokens)
        wait_s = max(waiting_s(state, hop.server, hop.n_blocks * block_bytes, now_s) for hop in hops)
        if wait_s == 0.0:  # else it asks again
            for link in zip((HUB, *(h.server for h in hops)), (*(h.server for h in hops), HUB), strict=True):
                self._load[link] += request.n_tokens / self._flow[link]
        return Route(hops, wait_s, wait_s + service_s(self._problem, request, hops)[1])

    def _walk(self, request: RequestSpec, state: SystemState, *, masked: bool) -> tuple[Hop, ...] | None:
        """Hop by hop; back where a server leads nowhere. Without masks all but caches that could never hold it count."""
        n_blocks, model = self._problem.model.n_blocks, self._problem.model
        n_expected = request.n_input_tokens + OUTPUT_RATIO * request.n_output_tokens
        expected_bytes = model.cache_bytes_per_token * n_expected
        dead: set[int] = set()

        def takes(hop: Hop) -> bool:
            room = self._placement.cache_bytes[hop.server]
            if (
                waiting_s(state, hop.server, hop.n_blocks * model.cache_bytes(request.n_tokens), 0.0)
                == math.inf
            ):
                return False
            used_bytes = room - state.free_bytes(hop.server)
            return not masked or used_bytes + hop.n_blocks * expected_bytes <= HIGH_WATER * room

        def walk(at: int, position: int) -> list[Hop] | None:
            if position == n_blocks:
                return []
            for j in sorted(self._next.get(at, ()), key=lambda j: self._turn(at, j, request)):
                hop = Hop(j, position, self._placement.ranges[j].last)
                if j in dead or not takes(hop):
                    continue
                rest = walk(j, hop.last)
                if rest is not None:
                    return [hop, *rest]
                dead.add(j)
            return None

        found = walk(HUB, 0)
        return None if found is None else tuple(found)

    def _turn(self, at: int, server: int, request: RequestSpec) -> float:
        return self._load[at, server] + request.n_tokens / self._flow[at, server]


def _next_servers(flow: Mapping[tuple[int, int], float]) -> dict[int, list[int]]:
    """Where each node's flow goes, without links that carry next to nothing of it."""
    out: dict[int, float] = {}
    for (i, _), rps in flow.items():
        out[i] = out.get(i, 0.0) + rps
    following: dict[int, list[int]] = {}
    for (i, j), rps in sorted(flow.items()):
        if j != HUB and rps >= EDGE_RATIO * out[i]:
            following.setdefault(i, []).append(j)
    return following

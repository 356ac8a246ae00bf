"""PETALS' own placement and routing, in the form that the paper's simulator gives them."""

from __future__ import annotations

import math

from policies.problem import BlockRange, Hop, InfeasiblePlacement, Placement, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import waiting_s

HOP_OVERHEAD_S = 0.018
SHORTAGE_PENALTY_S = 10.0


class PetalsPlacement:
    """PETALS: servers join in random order and take the window with the least throughput."""

    name = "petals"

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """|R| plays no part. Raises ``InfeasiblePlacement`` naming the blocks that nobody took."""
        model = problem.model
        throughput = [0.0] * model.n_blocks
        ranges = [BlockRange(0, 0)] * problem.n_servers
        for j in problem.join_order:
            server = problem.servers[j]
            per_block = model.block_bytes + model.petals_cache_bytes
            room = server.memory_bytes - model.petals_autograd_bytes
            m = min(max(0, math.floor(room / per_block)), model.n_blocks)
            if server.block_cap is not None:
                m = min(m, server.block_cap)
            if not m:
                continue
            first = min(range(model.n_blocks - m + 1), key=lambda a: sorted(throughput[a : a + m]))
            ranges[j] = BlockRange(first, first + m)
            gain = min(server.petals_forward_rps / ((1 + m) / 2), server.petals_network_rps)
            for b in range(first, first + m):
                throughput[b] += gain
        cache = tuple(r.n_blocks * model.petals_cache_bytes for r in ranges)
        placement = Placement(self.name, tuple(ranges), cache)
        missing = placement.uncovered(model.n_blocks)
        if missing:
            raise InfeasiblePlacement(
                f"under PETALS' placement nobody holds {len(missing)} of {model.n_blocks} blocks "
                f"({missing[0]} to {missing[-1]}): "
                f"{len(missing) * (model.block_bytes + model.petals_cache_bytes) / 1e9:.1f} GB more memory would hold them; "
                "add servers"
            )
        return placement


class PetalsRouter:
    """Shortest path over servers with half-RTT links, 18 ms per hop and +10 s where cache is short.

    The penalty applies when a server's session capacity is exactly used up, as in the reference.
    """

    def __init__(self, problem: Problem, placement: Placement) -> None:
        self._problem = problem
        self._placement = placement

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Dijkstra; ties go to the lowest server index, only strict improvement relaxes."""
        problem, ranges = self._problem, self._placement.ranges
        n, n_blocks, raw = problem.n_servers, problem.model.n_blocks, problem.raw_rtt_s[request.client]
        per_block_bytes = problem.model.cache_bytes(request.n_tokens)
        penalty = [self._penalty_s(j, per_block_bytes, state) for j in range(n)]
        distance = [math.inf] * n
        came = [-1] * n
        for j, (first, last) in enumerate(ranges):
            if first == 0 < last:
                decode = problem.servers[j].decode_s * last
                distance[j] = raw[j] / 2 + HOP_OVERHEAD_S + decode + penalty[j]
        pending = [j for j in range(n) if ranges[j].n_blocks]
        best_s, best = math.inf, -1
        while pending:
            i = min(pending, key=distance.__getitem__)
            if distance[i] >= best_s:
                break
            pending.remove(i)
            end = ranges[i].last
            if end == n_blocks:
                if distance[i] + raw[i] / 2 < best_s:
                    best_s, best = distance[i] + raw[i] / 2, i
                continue
            for j in pending:
                first, last = ranges[j]
                if first <= end < last:
                    step = problem.server_rtt_s[i][j] / 2 + HOP_OVERHEAD_S
                    total = distance[i] + step + problem.servers[j].decode_s * (last - end) + penalty[j]
                    if total < distance[j]:
                        distance[j], came[j] = total, i
        return None if best < 0 else self._chain(best, came, best_s, per_block_bytes, state, now_s)

    def _penalty_s(self, server: int, per_block_bytes: float, state: SystemState) -> float:
        n_blocks = self._placement.ranges[server].n_blocks
        if not n_blocks:
            return 0.0
        capacity = math.floor(self._placement.cache_bytes[server] / (n_blocks * per_block_bytes) + 1e-9)
        return SHORTAGE_PENALTY_S if capacity == state.n_active(server) else 0.0

    def _chain(
        self,
        last: int,
        came: list[int],
        cost_s: float,
        per_block_bytes: float,
        state: SystemState,
        now_s: float,
    ) -> Route:
        servers = [last]
        while came[servers[-1]] >= 0:
            servers.append(came[servers[-1]])
        hops: list[Hop] = []
        position = 0
        for server in reversed(servers):
            hops.append(Hop(server, position, self._placement.ranges[server].last))
            position = hops[-1].last
        wait = max(waiting_s(state, h.server, h.n_blocks * per_block_bytes, now_s) for h in hops)
        return Route(tuple(hops), wait, cost_s)


class PetalsRouting:
    """PETALS' routing as the paper's simulator has it: latency only, +10 s where cache is short."""

    name = "petals"

    def bind(self, problem: Problem, placement: Placement) -> PetalsRouter:
        return PetalsRouter(problem, placement)

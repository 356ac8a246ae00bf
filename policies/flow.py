"""How many tokens per second a placement can process: servers and links as a flow network.

After Helix (arXiv 2406.01566).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from policies.greedy import whole
from policies.link_rates import LinkRates
from policies.problem import BlockRange, Matrix, Problem
from policies.waiting import ROUNDING_RATIO

HUB = -1
"""Number of the node for all clients together, where every chain begins and ends."""
_MOST_TPS = 1e12
"""Tokens per second of something that takes no time."""


class Rates:
    """Tokens per second that servers and links can process, prompts and decoding together.

    A request of mean lengths is ``l_in + l_out - 1`` tokens, and keeps a server with k blocks busy for k
    (tau^I(l_in) + (l_out - 1) tau) seconds. Each token counts as the request's mean token, and steps are
    computed one after another. If the hardware profile has the time that a further session adds to a step
    (``session_slope_s``), tokens after the first are computed in full batches: of as many sessions as have
    room beside the blocks. Then a token counts as its share of a batch. A link passes as many tokens as its
    rate allows hidden states. All clients send equally, so the slowest client's link limits what they send
    together. A link that several pairs share limits each of them as if it were alone, since Helix' edges are pairs.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known_tps: dict[tuple[int, int], float] = {}
        sent = problem.transmissions if problem.forwarding else None
        self._across_s = None if sent is None else sent.across.slope_s
        into, back = (
            (problem.input_rtt_slope_s, None) if sent is None else (sent.up.slope_s, sent.down.slope_s)
        )
        if problem.links is not None and sent is None:
            into = _slower_s(problem.links)
        self._into_tps = self._of_clients(into)
        self._back_tps = None if back is None else self._of_clients(back)

    def _of_clients(self, slope_s: Matrix) -> list[float]:
        return [_per_s(len(slope_s), max(column)) for column in zip(*slope_s, strict=True)]

    def server_tps(self, server: int, n_blocks: int) -> float:
        """Returns T(k), the tokens per second of a server with k = ``n_blocks`` >= 1 blocks.

        With hub-spoke, and without ``Problem.transmissions``, the clients' links to the server limit it, too.
        """
        key = server, n_blocks
        if key not in self._known_tps:
            compute_tps = self._compute_tps(server, n_blocks)
            limit_tps = _MOST_TPS if self._across_s is not None else self._into_tps[server]
            self._known_tps[key] = min(compute_tps, limit_tps)
        return self._known_tps[key]

    def _compute_tps(self, server: int, n_blocks: int) -> float:
        problem, spec = self._problem, self._problem.servers[server]
        n_input, n_output = problem.mean_lengths
        n_decoded = n_output - 1
        step_s, n_together = n_blocks * spec.decode_s, 1
        if spec.session_slope_s or spec.experts_s:
            free_bytes = spec.memory_bytes - problem.stored(server).worst_bytes(n_blocks)
            n_together = max(1, whole(free_bytes, n_blocks * problem.model.cache_bytes(n_input + n_output)))
            step_s += spec.step_base_s + n_blocks * spec.further_s(n_together)
        busy_s = n_blocks * spec.prefill_s(n_input) + n_decoded * step_s / n_together
        return _per_s(n_input + n_decoded, busy_s)

    def link_tps(self, tail: int, head: int) -> float:
        """Returns the tokens per second of the link between two servers, or between a server and ``HUB``.

        It is practically unlimited if ``server_tps`` contains the clients' links.
        """
        if self._across_s is None or self._back_tps is None:
            return _MOST_TPS
        if tail == HUB:
            return self._into_tps[head]
        return self._back_tps[tail] if head == HUB else _per_s(1, self._across_s[tail][head])

    def most_tps(self, most: Sequence[int], n_blocks: int) -> float:
        """Returns a bound for all placements with at most ``most[j]`` blocks on server j.

        Every token needs every block on some server.
        """
        blocks_tps = (
            max((k * self._compute_tps(j, k) for k in range(1, count + 1)), default=0.0)
            for j, count in enumerate(most)
        )
        return min(sum(blocks_tps) / n_blocks, _MOST_TPS)


def _slower_s(links: LinkRates) -> Matrix:
    """Returns the seconds that a token takes on the slower way between clients and servers: there, or back."""
    n_bits = 8 * links.token_bytes
    return tuple(
        tuple(n_bits / min(pair) for pair in zip(*rows, strict=True))
        for rows in zip(links.up_bps, links.down_bps, strict=True)
    )


def _per_s(amount: float, seconds: float) -> float:
    return min(amount / seconds, _MOST_TPS) if seconds > 0 else _MOST_TPS


class Flow(NamedTuple):
    """Tokens per second, in total and over each edge (tail, head) with a flow, from ``HUB`` to ``HUB``."""

    total_tps: float
    edges_tps: dict[tuple[int, int], float]


def edges(ranges: Sequence[BlockRange], n_blocks: int) -> list[tuple[int, int]]:
    """Returns the (tail, head) that may follow each other: head holds the block after tail's last one."""
    holding = [j for j, held in enumerate(ranges) if held.n_blocks]
    found = [(HUB, j) for j in holding if ranges[j].first == 0]
    for i in holding:
        last = ranges[i].last
        found += [(i, j) for j in holding if ranges[j].first <= last < ranges[j].last]
        if last == n_blocks:
            found.append((i, HUB))
    return found


def max_flow(rates: Rates, ranges: Sequence[BlockRange], n_blocks: int) -> Flow:
    """Returns the largest flow from the hub over servers and links back to it (Dinic's algorithm).

    A session counts with all blocks of a server, even if it enters the server's range in the middle, as in
    Helix.
    """
    net = _Network(2 + 2 * len(ranges))
    for j, held in enumerate(ranges):
        if held.n_blocks:
            net.edge(2 + 2 * j, 3 + 2 * j, rates.server_tps(j, held.n_blocks))
    numbers = {
        (tail, head): net.edge(
            0 if tail == HUB else 3 + 2 * tail, 1 if head == HUB else 2 + 2 * head, rates.link_tps(tail, head)
        )
        for tail, head in edges(ranges, n_blocks)
    }
    total_tps = net.solve()
    # An edge's flow is the capacity left on its reverse edge.
    flows = {ends: net.left[number + 1] for ends, number in numbers.items()}
    least_tps = total_tps * ROUNDING_RATIO
    return Flow(total_tps, {ends: tps for ends, tps in flows.items() if tps > least_tps})


class _Network:
    """A network whose flow goes from node 0 to node 1.

    Every edge has a reverse edge with the next number. ``left`` is the capacity that each has left.
    """

    def __init__(self, n_nodes: int) -> None:
        self._out: list[list[int]] = [[] for _ in range(n_nodes)]
        self._head: list[int] = []
        self.left: list[float] = []

    def edge(self, tail: int, head: int, capacity: float) -> int:
        number = len(self._head)
        self._head += [head, tail]
        self.left += [capacity, 0.0]
        self._out[tail].append(number)
        self._out[head].append(number + 1)
        return number

    def solve(self) -> float:
        total = 0.0
        while (level := self._levels())[1] >= 0:
            at = [0] * len(self._out)
            while (pushed := self._push(level, at)) > 0:
                total += pushed
        return total

    def _levels(self) -> list[int]:
        level = [-1] * len(self._out)
        level[0] = 0
        queue = deque([0])
        while queue:
            node = queue.popleft()
            for number in self._out[node]:
                head = self._head[number]
                if self.left[number] > 0 and level[head] < 0:
                    level[head] = level[node] + 1
                    queue.append(head)
        return level

    def _push(self, level: list[int], at: list[int]) -> float:
        """Fills one shortest path; returns the flow added, 0 if no path is left.

        ``at`` is the number of each node's edges that lead nowhere any more.
        """
        path: list[int] = []
        node = 0
        while node != 1:
            out = self._out[node]
            while at[node] < len(out):
                number = out[at[node]]
                if self.left[number] > 0 and level[self._head[number]] == level[node] + 1:
                    break
                at[node] += 1
            else:
                if not path:
                    return 0.0
                node = self._head[path.pop() ^ 1]
                at[node] += 1
                continue
            path.append(number)
            node = self._head[number]
        amount = min((self.left[number] for number in path), default=math.inf)
        for number in path:
            self.left[number] -= amount
            self.left[number ^ 1] += amount
        return amount

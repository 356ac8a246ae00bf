"""How many tokens per second a placement can pass: servers and links as a flow network (Helix, arXiv 2406.01566)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from policies.problem import BlockRange, Matrix, Problem

HUB = -1
"""The clients together, where every chain begins and ends."""
_MOST_TPS = 1e12
"""What takes no time passes this many tokens per second."""
_ROUNDING_RATIO = 1e-9


class Rates:
    """Tokens per second that servers and links can pass, prompts and decoding together.

    A request of the design lengths is ``l_in + l_out - 1`` tokens, and keeps a server with k blocks busy for
    k (tau^I(l_in) + (l_out - 1) tau) seconds. So the server passes T(k) = T(1) / k tokens per second: a token counts
    as the request's mean one, and steps are computed one after another. A link passes as many tokens as its rate
    allows hidden states; clients send alike, so the slowest one's link says what all of them can send.
    """

    def __init__(self, problem: Problem) -> None:
        n_decoded = problem.n_output_tokens - 1
        n_tokens = problem.n_input_tokens + n_decoded
        self._n_servers = problem.n_servers
        self._server_tps = [
            _per_s(n_tokens, server.prefill_s(problem.n_input_tokens) + n_decoded * server.decode_s)
            for server in problem.servers
        ]
        sent = problem.transmissions if problem.forwarding else None
        self._across_s = None if sent is None else sent.across.slope_s
        into, back = (
            (problem.input_rtt_slope_s, None) if sent is None else (sent.up.slope_s, sent.down.slope_s)
        )
        self._into_tps = self._of_clients(into)
        self._back_tps = None if back is None else self._of_clients(back)

    def _of_clients(self, slope_s: Matrix) -> list[float]:
        return [_per_s(len(slope_s), max(column)) for column in zip(*slope_s, strict=True)]

    def server_tps(self, server: int, n_blocks: int) -> float:
        """T(k) for ``n_blocks`` >= 1. Where all goes through clients, also no more than their links bring."""
        compute_tps = self._server_tps[server] / n_blocks
        return compute_tps if self._across_s is not None else min(compute_tps, self._into_tps[server])

    def link_tps(self, tail: int, head: int) -> float:
        """From one server to another, or from or to ``HUB``."""
        if self._across_s is None or self._back_tps is None:
            return _MOST_TPS  # the clients' links are in ``server_tps``
        if tail == HUB:
            return self._into_tps[head]
        return self._back_tps[tail] if head == HUB else _per_s(1, self._across_s[tail][head])

    def most_tps(self, servers: Sequence[int], n_blocks: int) -> float:
        """No placement on ``servers`` passes more: every token costs each block's time somewhere."""
        return min(sum(self._server_tps[j] for j in servers) / n_blocks, _MOST_TPS)


def _per_s(amount: float, seconds: float) -> float:
    return min(amount / seconds, _MOST_TPS) if seconds > 0 else _MOST_TPS


class Flow(NamedTuple):
    """Tokens per second in all and over each edge (tail, head) that has any; ``HUB`` begins and ends."""

    total_tps: float
    edges_tps: dict[tuple[int, int], float]


def edges(ranges: Sequence[BlockRange], n_blocks: int) -> list[tuple[int, int]]:
    """(tail, head) between which sessions may go: head's range holds the block after tail's last, and ends later."""
    holding = [j for j, held in enumerate(ranges) if held.n_blocks]
    found = [(HUB, j) for j in holding if ranges[j].first == 0]
    for i in holding:
        last = ranges[i].last
        found += [(i, j) for j in holding if ranges[j].first <= last < ranges[j].last]
        if last == n_blocks:
            found.append((i, HUB))
    return found


def max_flow(rates: Rates, ranges: Sequence[BlockRange], n_blocks: int) -> Flow:
    """The largest flow from the hub over servers and links back to it (Dinic).

    A server counts with all its blocks, even for what enters its range in the middle, as in Helix.
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
    # An edge's flow is what its way back has left.
    flows = {ends: net.left[number + 1] for ends, number in numbers.items()}
    least_tps = total_tps * _ROUNDING_RATIO
    return Flow(total_tps, {ends: tps for ends, tps in flows.items() if tps > least_tps})


class _Network:
    """Edges come in pairs, there and back: ``left`` is what each can still take. From node 0 to node 1."""

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
        """Fill one shortest path; 0 if none is left. ``at``: edges of each node that lead nowhere any more."""
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

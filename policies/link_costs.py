"""What one link costs a request per token, and the cheapest chain by that."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from policies.positions import PositionGraph
from policies.problem import Hop, PolicyError, Problem, RequestSpec


class LinkCosts(NamedTuple):
    """A hop on server j for k blocks costs ``hop_s[j] + k * block_s[j]`` seconds per token."""

    hop_s: tuple[float, ...]
    block_s: tuple[float, ...]

    def of(self, hops: Sequence[Hop]) -> float:
        """Time per token over a chain."""
        return sum(self.hop_s[hop.server] + self.block_s[hop.server] * hop.n_blocks for hop in hops)


def link_costs(problem: Problem, request: RequestSpec, *, decode_only: bool = False) -> LinkCosts:
    """Costs of ``request`` on every server, averaged over all of its output tokens.

    Of l_out tokens one costs the prefill, t^I_cj + k tau^I_j, and the others a decode step,
    t_cj + k tau_j. ``decode_only`` leaves the first token out: every token is a decode step. Raises
    ``PolicyError`` with server-to-server forwarding, where a hop's cost depends on the one before.
    """
    if problem.forwarding:
        raise PolicyError(
            "the offline optimum and its bounds are for sessions through the client; "
            "turn server-to-server forwarding off, or place with cg-bp"
        )
    decode_s = problem.token_rtt_s[request.client]
    if decode_only:
        return LinkCosts(decode_s, tuple(server.decode_s for server in problem.servers))
    n_in, n_out = request.n_input_tokens, request.n_output_tokens
    first, rest = 1 / n_out, (n_out - 1) / n_out
    return LinkCosts(
        tuple(
            first * problem.input_rtt_s(request.client, j, n_in) + rest * decode_s[j]
            for j in range(problem.n_servers)
        ),
        tuple(first * s.prefill_s(n_in) + rest * s.decode_s for s in problem.servers),
    )


def with_costs(problem: Problem, request: RequestSpec, costs: LinkCosts) -> Problem:
    """The problem of one client, whose decode steps cost ``costs``, designed for ``request``'s lengths.

    What is known for decode steps then holds for ``costs``.
    """
    ways = problem.ways
    return replace(
        problem,
        servers=tuple(
            replace(server, decode_s=block_s)
            for server, block_s in zip(problem.servers, costs.block_s, strict=True)
        ),
        clients=(problem.clients[request.client],),
        raw_rtt_s=(problem.raw_rtt_s[request.client],),
        token_rtt_s=(costs.hop_s,),
        ways=ways and ways._replace(up_s=(ways.up_s[request.client],), down_s=(ways.down_s[request.client],)),
        input_rtt_base_s=(problem.input_rtt_base_s[request.client],),
        input_rtt_slope_s=(problem.input_rtt_slope_s[request.client],),
        n_input_tokens=request.n_input_tokens,
        n_output_tokens=request.n_output_tokens,
    )


def cheapest_chain(
    graph: PositionGraph, costs: LinkCosts, allowed: Callable[[Hop], bool] | None = None
) -> tuple[Hop, ...] | None:
    """The cheapest chain over all blocks, of ``allowed`` hops only; ``None`` if there is none.

    Nobody waits. Equal costs: the hop listed first.
    """
    n = len(graph.positions)
    total_s = [0.0] + [math.inf] * (n - 1)
    entered: list[tuple[int, Hop] | None] = [None] * n
    for end in range(1, n):
        for tail, hop in graph.into[end]:
            if allowed is not None and not allowed(hop):
                continue
            reached_s = total_s[tail] + costs.of((hop,))
            if reached_s < total_s[end]:
                total_s[end] = reached_s
                entered[end] = (tail, hop)
    chain: list[Hop] = []
    at = n - 1
    while at:
        step = entered[at]
        if step is None:
            return None
        chain.append(step[1])
        at = step[0]
    return tuple(reversed(chain))

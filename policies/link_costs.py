"""The time per token that one hop costs a request, and the chain with the least of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from policies.positions import PositionGraph
from policies.problem import Hop, PolicyError, Problem, RequestSpec


class LinkCosts(NamedTuple):
    """Seconds per token: a hop on server j for k blocks costs ``hop_s[j] + k * block_s[j]``."""

    hop_s: tuple[float, ...]
    block_s: tuple[float, ...]

    def of(self, hops: Sequence[Hop]) -> float:
        """Returns the seconds per token over a chain."""
        return sum(self.hop_s[hop.server] + self.block_s[hop.server] * hop.n_blocks for hop in hops)


def link_costs(problem: Problem, request: RequestSpec, *, decode_only: bool = False) -> LinkCosts:
    """Returns the costs of ``request`` on every server, averaged over all of its output tokens.

    The first of l_out tokens costs the prefill, t^I_cj + k tau^I_j, and the others a decode step each, t_cj +
    k tau_j. With ``decode_only`` every token counts as a decode step. Raises ``PolicyError`` if servers
    forward to each other, because a hop's cost then depends on the server before.
    """
    if problem.forwarding:
        raise PolicyError(
            "the offline optimum and its bounds exist only where every hop goes through the client; "
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
    """Returns the problem of ``request``'s client alone, with decode steps that cost ``costs``.

    It is designed for the lengths of ``request``. Bounds that hold for decode steps then hold for ``costs``.
    """
    one_way = problem.one_way
    return replace(
        problem,
        servers=tuple(
            replace(server, decode_s=block_s)
            for server, block_s in zip(problem.servers, costs.block_s, strict=True)
        ),
        clients=(problem.clients[request.client],),
        raw_rtt_s=(problem.raw_rtt_s[request.client],),
        token_rtt_s=(costs.hop_s,),
        one_way=one_way
        and one_way._replace(up_s=(one_way.up_s[request.client],), down_s=(one_way.down_s[request.client],)),
        input_rtt_base_s=(problem.input_rtt_base_s[request.client],),
        input_rtt_slope_s=(problem.input_rtt_slope_s[request.client],),
        n_input_tokens=request.n_input_tokens,
        n_output_tokens=request.n_output_tokens,
        links=None,
    )


def cheapest_chain(
    graph: PositionGraph, costs: LinkCosts, allowed: Callable[[Hop], bool] | None = None
) -> tuple[Hop, ...] | None:
    """Returns the cheapest chain over all blocks that has only ``allowed`` hops, or ``None`` if there is none.

    Waits are not counted. Of equal costs the hop listed first wins.
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

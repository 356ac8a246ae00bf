"""The time per token that one hop costs a request, and the chain with the least of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from policies.positions import PositionGraph
from policies.problem import Hop, Matrix, Problem, RequestSpec, hop_times_s, return_times_s


class LinkCosts(NamedTuple):
    """Seconds per token: a hop on server j for k blocks costs ``hop_s[j] + k * block_s[j]``.

    With server-to-server forwarding ``hop_s[j]`` is that of the first hop of a chain, from the client;
    ``across_s[i][j]`` replaces it after server i, and the last server j adds ``return_s[j]``. Both are ``None``
    with hub-spoke.
    """

    hop_s: tuple[float, ...]
    block_s: tuple[float, ...]
    across_s: Matrix | None = None
    return_s: tuple[float, ...] | None = None

    @property
    def returned_s(self) -> float:
        """The seconds per token back to the client where they do not depend on the last server."""
        return 0.0 if self.return_s is None else self.return_s[0]

    def of_hop(self, hop: Hop, previous: int | None) -> float:
        """Returns the seconds per token of a hop after server ``previous`` (``None``: the client)."""
        at = hop.server
        way_s = self.hop_s[at] if self.across_s is None or previous is None else self.across_s[previous][at]
        return way_s + self.block_s[at] * hop.n_blocks

    def of(self, hops: Sequence[Hop]) -> float:
        """Returns the seconds per token over a chain."""
        before = [None, *(hop.server for hop in hops)]
        total_s = sum(self.of_hop(hop, previous) for hop, previous in zip(hops, before, strict=False))
        return total_s + (self.return_s[hops[-1].server] if self.return_s and hops else 0.0)

    def of_any_way(self, pick: Callable[[Iterable[float]], float]) -> LinkCosts:
        """Returns costs that do not depend on the server before: ``pick`` (min or max) of all ways to a server.

        With ``min`` no chain costs more than with the real costs, with ``max`` none costs less.
        """
        if self.across_s is None or self.return_s is None:
            return self
        ways, n = (self.hop_s, *self.across_s), len(self.hop_s)
        hop_s = tuple(pick(way[j] for i, way in enumerate(ways) if i != j + 1) for j in range(n))
        return LinkCosts(hop_s, self.block_s, None, (pick(self.return_s),) * n)


def link_costs(
    problem: Problem, request: RequestSpec, *, decode_only: bool = False, is_bound: bool = False
) -> LinkCosts:
    """Returns the costs of ``request`` on every server, averaged over all of its output tokens.

    The first of l_out tokens costs the prefill, t^I_cj + k tau^I_j, and the others a decode step each, t_cj +
    k tau_j. With ``decode_only`` every token counts as a decode step. Where servers forward to each other,
    t_cj and t^I_cj are those of the way from the server before (``hop_times_s``, ``return_times_s``).
    Where a model's blocks differ, tau is that of the largest, and with ``is_bound`` that of the fastest.
    """
    n_in, n_out = request.n_input_tokens, request.n_output_tokens
    first, rest = (0.0, 1.0) if decode_only else (1 / n_out, (n_out - 1) / n_out)

    def per_token_s(times_s: tuple[float, float]) -> float:
        return first * times_s[0] + rest * times_s[1]

    servers = range(problem.n_servers)
    hop_s = tuple(per_token_s(hop_times_s(problem, request, None, j)) for j in servers)
    block_s = tuple(
        min(
            per_token_s((law.prefill_s(n_in), law.mean_decode_at_s(n_in, n_out - 1)))
            for law in (server, *(server.others if is_bound else ()))
        )
        for server in problem.servers
    )
    if not problem.forwarding:
        return LinkCosts(hop_s, block_s)
    across_s = tuple(
        tuple(per_token_s(hop_times_s(problem, request, i, j)) for j in servers) for i in servers
    )
    return_s = tuple(per_token_s(return_times_s(problem, request, j)) for j in servers)
    return LinkCosts(hop_s, block_s, across_s, return_s)


def chain_total_s(request: RequestSpec, costs: LinkCosts, chain: Sequence[Hop]) -> float:
    """Returns the seconds of all output tokens of ``request`` on ``chain``: l_out times those per token."""
    return request.n_output_tokens * costs.of(chain)


def with_costs(problem: Problem, request: RequestSpec, costs: LinkCosts) -> Problem:
    """Returns the problem of ``request``'s client alone, with decode steps that cost ``costs``.

    It is designed for the lengths of ``request``. Bounds that hold for decode steps then hold for ``costs``,
    which must be those of hub-spoke (``LinkCosts.of_any_way``).
    """
    one_way = problem.one_way
    return replace(
        problem,
        servers=tuple(
            replace(server, decode_s=block_s)
            for server, block_s in zip(problem.servers, costs.block_s, strict=True)
        ),
        clients=(problem.clients[request.client],),
        hub_token_s=problem.hub_s(request.client),
        hub_tokens_s=(),
        raw_rtt_s=(problem.raw_rtt_s[request.client],),
        token_rtt_s=(costs.hop_s,),
        one_way=one_way
        and one_way._replace(up_s=(one_way.up_s[request.client],), down_s=(one_way.down_s[request.client],)),
        input_rtt_base_s=(problem.input_rtt_base_s[request.client],),
        input_rtt_slope_s=(problem.input_rtt_slope_s[request.client],),
        n_input_tokens=request.n_input_tokens,
        n_output_tokens=request.n_output_tokens,
        forwarding=False,
        links=None,
    )


def cheapest_chain(
    graph: PositionGraph, costs: LinkCosts, allowed: Callable[[Hop], bool] | None = None
) -> tuple[Hop, ...] | None:
    """Returns the cheapest chain over all blocks that has only ``allowed`` hops, or ``None`` if there is none.

    Waits are not counted. Of equal costs the hop listed first wins.
    """
    # The cheapest way to each position: with forwarding one per server that it comes from.
    reached: list[dict[int | None, tuple[float, tuple[Hop, ...]]]] = [{} for _ in graph.positions]
    reached[0][None] = (0.0, ())
    for end, entries in enumerate(graph.into):
        for tail, hop in entries:
            if allowed is not None and not allowed(hop):
                continue
            key = None if costs.across_s is None else hop.server
            for previous, (before_s, chain) in reached[tail].items():
                total_s = before_s + costs.of_hop(hop, previous)
                if key not in reached[end] or total_s < reached[end][key][0]:
                    reached[end][key] = (total_s, (*chain, hop))
    whole = [chain for _, chain in reached[-1].values()]
    return min(whole, key=costs.of, default=None)

"""Servers that join later: placement without them, and the blocks that a server chooses when it joins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from policies.petals import petals_block_counts, weakest_window, window_rps
from policies.problem import BlockRange, Linear, Matrix, OneWayDelays, Placement, Problem


def among(problem: Problem, servers: Sequence[int]) -> Problem:
    """Returns the problem with only ``servers`` (ascending), renumbered 0, 1, ...; their join order stays."""
    number = {j: i for i, j in enumerate(servers)}

    def columns(matrix: Matrix) -> Matrix:
        return tuple(tuple(row[j] for j in servers) for row in matrix)

    def linear(times: Linear) -> Linear:
        return Linear(columns(times.base_s), columns(times.slope_s))

    def rows(times: Linear) -> Linear:
        base_s, slope_s = (tuple(matrix[j] for j in servers) for matrix in times)
        return Linear(base_s, slope_s)

    sent, one_way = problem.transmissions, problem.one_way
    return replace(
        problem,
        servers=tuple(problem.servers[j] for j in servers),
        raw_rtt_s=columns(problem.raw_rtt_s),
        token_rtt_s=columns(problem.token_rtt_s),
        further_token_s=columns(problem.further_token_s),
        input_rtt_base_s=columns(problem.input_rtt_base_s),
        input_rtt_slope_s=columns(problem.input_rtt_slope_s),
        server_rtt_s=columns(tuple(problem.server_rtt_s[j] for j in servers)),
        one_way=None
        if one_way is None
        else OneWayDelays(
            columns(one_way.up_s),
            columns(one_way.down_s),
            columns(tuple(one_way.across_s[j] for j in servers)),
        ),
        transmissions=None
        if sent is None
        else replace(sent, up=linear(sent.up), down=linear(sent.down), across=linear(rows(sent.across))),
        links=None if problem.links is None else problem.links.among(servers),
        places=None if problem.places is None else problem.places.among(servers),
        join_order=tuple(number[j] for j in problem.join_order if j in number),
    )


def spread(placement: Placement, servers: Sequence[int], n_servers: int) -> Placement:
    """Returns a placement of ``among(problem, servers)`` as one of ``n_servers``; the others hold nothing."""
    ranges, cache_bytes = [BlockRange(0, 0)] * n_servers, [0.0] * n_servers
    for i, j in enumerate(servers):
        ranges[j], cache_bytes[j] = placement.ranges[i], placement.cache_bytes[i]
    return replace(placement, ranges=tuple(ranges), cache_bytes=tuple(cache_bytes))


def join(problem: Problem, placement: Placement, server: int, announced: Iterable[int]) -> Placement:
    """Returns the placement with ``server`` added; it chooses its blocks as PETALS' servers do when they join.

    Number of blocks: m_j = min(floor(M_j / (s_m + s_c |R|)), L) if the placement was designed for |R|
    sessions; the rest of the memory is for caches. Otherwise PETALS' own number, with PETALS' cache per
    block. In both cases at most the server's cap. Window: the one whose sorted block throughputs, summed over
    the servers ``announced``, are lexicographically smallest; the first one on ties. A server without memory
    for a block holds none.
    """
    model, spec = problem.model, problem.servers[server]
    concurrency = placement.design_concurrency
    if concurrency is None:
        count = petals_block_counts(problem)[server]
    else:
        count = min(
            problem.stored(server).most_blocks(spec.memory_bytes, problem.design_cache_bytes * concurrency),
            model.n_blocks if spec.block_cap is None else spec.block_cap,
        )
    held = BlockRange(0, 0)
    if count > 0:
        throughput = [0.0] * model.n_blocks
        for j in sorted(set(announced) - {server}):
            rps = window_rps(problem.servers[j], placement.ranges[j].n_blocks)
            for b in range(*placement.ranges[j]):
                throughput[b] += rps
        first = weakest_window(throughput, count)
        held = BlockRange(first, first + count)
    ranges, rooms = list(placement.ranges), list(placement.cache_bytes)
    ranges[server] = held
    if concurrency is None:
        rooms[server] = held.n_blocks * model.petals_cache_bytes
    else:
        rooms[server] = problem.room_bytes(ranges)[server]
    return replace(placement, ranges=tuple(ranges), cache_bytes=tuple(rooms))

"""Helix' mixed-integer program: which blocks every server holds so that the flow of requests is largest."""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.helix import HUB, Capacities, largest_flow, links_of
from policies.milp_solver import LinearModel
from policies.neighbours import Ranges
from policies.problem import BlockRange, PolicyError


def improved(
    capacities: Capacities, counts: Sequence[int], start: Ranges, *, time_limit_s: float, max_nodes: int
) -> tuple[Ranges, float, bool]:
    """A placement at least as good as ``start``, what none exceeds (requests/s), and whether it is proven the best.

    Per server i the first block s_i and the number of blocks, one-hot b_ik; per link a switch d_ij and a flow f_ij. Flow into a
    server is at most sum_k T_i(k) b_ik, on a link at most what it carries. The link to j after i is open only if
    s_j <= e_i < e_j with e_i = s_i + sum_k k b_ik, that from the clients if s_j = 0, that to them if e_i = L. ``counts`` are
    the most blocks of each server.
    """
    n_blocks = capacities.problem.model.n_blocks
    able = [j for j, most in enumerate(counts) if most]
    start_flow, start_flows = largest_flow(capacities, start)
    # The shortfall from what no placement exceeds is what HiGHS makes small; flows are in units of that.
    unit = sum(max(capacities.server_rps(j, k) for k in range(1, counts[j] + 1)) for j in able)
    linear = LinearModel()
    shortfall = linear.variable(1.0, 1.0, integer=False)
    first = {j: linear.variable(0.0, n_blocks - 1) for j in able}
    has = {j: [linear.variable(0.0, 1) for _ in range(counts[j])] for j in able}
    links = (
        [(HUB, j) for j in able] + [(i, j) for i in able for j in able if i != j] + [(j, HUB) for j in able]
    )
    most = {link: min(capacities.link_rps(*link) / unit, 1.0) for link in links}
    is_open = {link: linear.variable(0.0, 1) for link in links}
    flow = {link: linear.variable(0.0, most[link], integer=False) for link in links}

    def end(j: int, sign: float = 1.0) -> dict[int, float]:
        return {first[j]: sign, **{b: sign * k for k, b in enumerate(has[j], 1)}}

    for j in able:
        linear.row(dict.fromkeys(has[j], 1.0), 0.0, 1.0)
        linear.row(end(j), 0.0, n_blocks)
        into = {flow[link]: 1.0 for link in links if link[1] == j}
        served = {b: -capacities.server_rps(j, k) / unit for k, b in enumerate(has[j], 1)}
        linear.row({**into, **served}, -math.inf, 0.0)
        linear.row({**into, **{flow[link]: -1.0 for link in links if link[0] == j}}, 0.0, 0.0)
    for i, j in links:
        switch = is_open[i, j]
        linear.row({flow[i, j]: 1.0, switch: -most[i, j]}, -math.inf, 0.0)
        if i == HUB:  # s_j <= L (1 - d)
            linear.row({first[j]: 1.0, switch: n_blocks}, 0.0, n_blocks)
        elif j == HUB:  # e_i >= L d
            linear.row({**end(i), switch: -n_blocks}, 0.0, math.inf)
        else:
            # s_j <= e_i + L (1 - d); e_i + 1 <= e_j + (L + 1) (1 - d)
            linear.row({first[j]: 1.0, **end(i, -1.0), switch: n_blocks}, -math.inf, n_blocks)
            ends = {**end(i), **end(j, -1.0), switch: n_blocks + 1.0}
            linear.row(ends, -math.inf, float(n_blocks))
    entering = {flow[HUB, j]: 1.0 for j in able}
    linear.row({**entering, shortfall: 1.0}, 1.0, math.inf)

    values = dict.fromkeys(range(linear.n_variables), 0.0)
    values[shortfall] = max(0.0, 1.0 - start_flow / unit)
    for j in able:
        values[first[j]] = float(start[j].first)
        if start[j].n_blocks:
            values[has[j][start[j].n_blocks - 1]] = 1.0
    for link in links_of(start, n_blocks):
        values[is_open[link]] = 1.0
        values[flow[link]] = start_flows.get(link, 0.0) / unit
    try:
        solution = linear.solve(time_limit_s=time_limit_s, max_nodes=max_nodes, start=list(values.values()))
    except PolicyError:  # nothing found in time, not even what it began with
        return start, math.inf, False
    assert solution is not None, "the program has the placement that it began with"
    ranges = [BlockRange(0, 0)] * len(counts)
    for j in able:
        count = sum(k for k, b in enumerate(has[j], 1) if solution.values[b] > 0.5)
        at = round(solution.values[first[j]])
        ranges[j] = BlockRange(at, at + count) if count else BlockRange(0, 0)
    bound = (1.0 - solution.bound) * unit
    if largest_flow(capacities, ranges)[0] <= start_flow:
        return start, bound, solution.proven_optimal
    return tuple(ranges), bound, solution.proven_optimal

"""Helix' placement: the one with the largest flow of tokens per second (arXiv 2406.01566, ASPLOS '25)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from policies.design import given_or_one
from policies.flow import HUB, Flow, Rates, max_flow
from policies.interfaces import PlacementPolicy
from policies.milp_solver import LinearModel, Solution
from policies.neighbours import Neighbours, Ranges
from policies.petals import choose_ranges
from policies.pipelines import NOTHING, consecutive, even, infeasible, most_blocks, placed
from policies.problem import BlockRange, Placement, Problem

_MEMORY_RATIO = 0.5
"""Blocks use at most this share of a server's memory, as in Helix."""
_MOST_VARIABLES = 20_000
"""Larger programs (about 100 servers) are not solved: then only small changes are tried."""
_DRAWS_PER_PAIR, _MOST_DRAWS = 40, 50_000
"""How many small changes are tried per pair of servers, and at most in total."""


@dataclass
class Helix(PlacementPolicy):
    """The placement whose servers and links can process the most tokens per second, by HiGHS (Helix).

    It maximises the flow from the clients over servers and links back to the clients. A server with k blocks
    processes at most T(k) tokens per second, a link as many as its rate allows (``policies.flow.Rates``
    derives both from the problem). A session goes from server i to j only if first_j <= last_i < last_j.
    Blocks use at most half of a server's memory, and leave cache for ``design_concurrency`` sessions (for one
    if it is not given). If the model does not fit with half of the memory, only the second rule applies.

    The search starts from the best of equal stages and PETALS' windows, and improves it by small changes,
    whose number depends on the number of servers. Then HiGHS searches up to ``max_nodes`` branches. Both
    limits are counts, so the result is the same on every machine. ``bounds`` has
    the flow reached (``flow_tps``), a flow that no placement exceeds (``flow_bound_tps``), the gap between
    them (``gap_ratio``, as a share of the bound), and whether the flow is the largest (``proven_optimal``).
    Flows are in tokens per second.

    Helix measures T(k) on its GPUs; here it follows from the hardware profile. Helix also leaves out slow
    edges for a smaller program, does not improve its start by small changes, and stops Gurobi by the clock.
    All experiments in its repository use the program's option that first_j == last_i.
    """

    max_nodes: int = 500
    name: str = "helix"
    sees_join_order: ClassVar[bool] = False
    searches: ClassVar[bool] = (
        True  # one search takes as long as trials of 40 |R|, and half of the memory is for caches
    )

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Places the blocks. Raises ``InfeasiblePlacement``, and ``PolicyError`` if HiGHS fails."""
        n_blocks = problem.model.n_blocks
        at_least = given_or_one(design_concurrency)
        most = most_blocks(problem, at_least, _MEMORY_RATIO)
        if sum(most) < n_blocks:
            raise infeasible(self.name, problem, at_least)
        rates = Rates(problem)
        bound_tps = rates.most_tps(most, n_blocks)
        ranges, flow = self._by_heuristics(problem, rates, most, bound_tps)
        model = _Model(rates, most, n_blocks, bound_tps)
        if flow.total_tps < bound_tps * (1 - 1e-9) and model.linear.n_variables <= _MOST_VARIABLES:
            solution = model.linear.solve(max_nodes=self.max_nodes, start=model.values(ranges, flow))
            assert solution is not None, "the program has the heuristics' solution"
            found = model.ranges(solution)
            found_flow = max_flow(rates, found, n_blocks)
            if found_flow.total_tps > flow.total_tps * (1 + 1e-9):
                ranges, flow = found, found_flow
            # The program minimises the shortfall from the bound, so its own bound is a lower limit of the
            # shortfall.
            bound_tps = flow.total_tps if solution.proven_optimal else bound_tps * (1 - solution.bound)
        bound_tps = max(bound_tps, flow.total_tps)
        gap_ratio = 1 - flow.total_tps / bound_tps
        bounds = {
            "flow_tps": flow.total_tps,
            "flow_bound_tps": bound_tps,
            "gap_ratio": gap_ratio,
            "proven_optimal": float(gap_ratio <= 1e-9),
        }
        return placed(self.name, problem, ranges, design_concurrency, bounds)

    def _by_heuristics(
        self, problem: Problem, rates: Rates, most: Sequence[int], bound_tps: float
    ) -> tuple[Ranges, Flow]:
        """Returns the best placement found by small changes, and its flow.

        Equally good changes are kept, too: they lead off plateaus.
        """
        n_blocks = problem.model.n_blocks
        best = max(
            _starts(problem, most, rates), key=lambda ranges: max_flow(rates, ranges, n_blocks).total_tps
        )
        flow = max_flow(rates, best, n_blocks)
        neighbours = Neighbours(problem, Random("helix"), most)
        for _ in range(min(_DRAWS_PER_PAIR * problem.n_servers**2, _MOST_DRAWS)):
            if flow.total_tps >= bound_tps * (1 - 1e-9):
                break
            drawn = neighbours.draw(best)
            if drawn is not None and _weakest_tps(rates, drawn, n_blocks) >= flow.total_tps:
                changed = max_flow(rates, drawn, n_blocks)
                if changed.total_tps >= flow.total_tps:
                    best, flow = drawn, changed
        return best, flow


def _starts(problem: Problem, most: Sequence[int], rates: Rates) -> list[Ranges]:
    """Returns placements to start from: PETALS' windows, and equal stages of every number.

    Equal stages may leave blocks on no server; then their flow is 0.
    """
    n_blocks = problem.model.n_blocks
    order = sorted((j for j, count in enumerate(most) if count), key=lambda j: -rates.server_tps(j, 1))
    starts = [choose_ranges(problem, most, order)]
    for n_stages in range(1, min(len(order), n_blocks) + 1):
        stages = consecutive(even(n_blocks, n_stages))
        ranges, passed_tps = [NOTHING] * len(most), [0.0] * n_stages
        for j in order:
            possible = [i for i, stage in enumerate(stages) if stage.n_blocks <= most[j]]
            if possible:
                at = min(possible, key=passed_tps.__getitem__)
                ranges[j] = stages[at]
                passed_tps[at] += rates.server_tps(j, stages[at].n_blocks)
        starts.append(tuple(ranges))
    return starts


def _weakest_tps(rates: Rates, ranges: Ranges, n_blocks: int) -> float:
    """Returns the tokens per second that the weakest block's servers process together: no flow is larger."""
    sums_tps = [0.0] * n_blocks
    for j, held in enumerate(ranges):
        if held.n_blocks:
            server_tps = rates.server_tps(j, held.n_blocks)
            for b in range(held.first, held.last):
                sums_tps[b] += server_tps
    return min(sums_tps)


class _Model:
    """The mixed-integer program. Flows are shares of ``unit_tps``; it minimises the total's shortfall from 1.

    Variables of server j: its first block, and a binary for each number of blocks k (at index k - 1), of
    which at most one is 1. Variables of each edge (i, j): its flow, and a binary that is 1 if the edge may
    have any flow.
    """

    def __init__(self, rates: Rates, most: Sequence[int], n_blocks: int, unit_tps: float) -> None:
        self.linear = LinearModel()
        self._n_blocks, self._unit_tps = n_blocks, unit_tps
        able = [j for j, count in enumerate(most) if count]
        self._n_servers = len(most)
        self._short = self.linear.variable(1.0, 1.0, integer=False)
        self._first = {j: self.linear.variable(0.0, n_blocks - 1) for j in able}
        self._sizes = {j: [self.linear.variable(0.0, 1.0) for _ in range(most[j])] for j in able}
        pairs = [(HUB, j) for j in able] + [(i, j) for i in able for j in [*able, HUB] if i != j]
        self._flow = {pair: self.linear.variable(0.0, 1.0, integer=False) for pair in pairs}
        self._open = {pair: self.linear.variable(0.0, 1.0) for pair in pairs}
        for j in able:
            self._server(rates, j, pairs)
        for pair in pairs:
            self._edge(rates, pair)
        leaving = {self._flow[HUB, j]: 1.0 for j in able}
        self.linear.row({**leaving, self._short: 1.0}, 1.0, 1.0)

    def _server(self, rates: Rates, j: int, pairs: Sequence[tuple[int, int]]) -> None:
        row, sizes = self.linear.row, self._sizes[j]
        row(dict.fromkeys(sizes, 1.0), 0.0, 1.0)
        row({self._first[j]: 1.0, **self._n_held(j)}, 0.0, self._n_blocks)
        into = {self._flow[pair]: 1.0 for pair in pairs if pair[1] == j}
        out = {self._flow[pair]: -1.0 for pair in pairs if pair[0] == j}
        row({**into, **out}, 0.0, 0.0)
        passed = {x: -self._part(rates.server_tps(j, k)) for k, x in enumerate(sizes, 1)}
        row({**into, **passed}, -float(self._n_blocks), 0.0)

    def _edge(self, rates: Rates, pair: tuple[int, int]) -> None:
        row, n_blocks, (i, j) = self.linear.row, float(self._n_blocks), pair
        is_open = self._open[pair]
        row({self._flow[pair]: 1.0, is_open: -self._part(rates.link_tps(i, j))}, -1.0, 0.0)
        if i == HUB:  # first_j <= 0
            row({self._first[j]: 1.0, is_open: n_blocks}, 0.0, n_blocks)
            return
        last = {self._first[i]: 1.0, **self._n_held(i)}
        if j == HUB:  # last_i >= L
            row({**last, is_open: -n_blocks}, 0.0, n_blocks)
            return
        # first_j <= last_i < last_j, each only where the edge is open
        row({self._first[j]: 1.0, **_negative(last), is_open: n_blocks}, -2 * n_blocks, n_blocks)
        later = _negative({self._first[j]: 1.0, **self._n_held(j)})
        row({**last, **later, is_open: n_blocks + 1}, -2 * n_blocks, n_blocks)

    def _n_held(self, j: int) -> dict[int, float]:
        return {x: float(k) for k, x in enumerate(self._sizes[j], 1)}

    def _part(self, tps: float) -> float:
        """Returns ``tps`` as a share of the unit, at most 1."""
        return min(tps / self._unit_tps, 1.0)

    def values(self, ranges: Ranges, flow: Flow) -> list[float]:
        """Returns the values of all variables for a placement and its flow."""
        values = [0.0] * self.linear.n_variables
        values[self._short] = 1 - flow.total_tps / self._unit_tps
        for j, sizes in self._sizes.items():
            if ranges[j].n_blocks:
                values[self._first[j]] = ranges[j].first
                values[sizes[ranges[j].n_blocks - 1]] = 1.0
        for pair, tps in flow.edges_tps.items():
            values[self._flow[pair]] = tps / self._unit_tps
            values[self._open[pair]] = 1.0
        return values

    def ranges(self, solution: Solution) -> Ranges:
        """Returns the placement of a solution."""
        held = [NOTHING] * self._n_servers
        for j, sizes in self._sizes.items():
            n_held = sum(k for k, x in enumerate(sizes, 1) if solution.values[x] > 0.5)
            if n_held:
                first = round(solution.values[self._first[j]])
                held[j] = BlockRange(first, first + n_held)
        return tuple(held)


def _negative(terms: dict[int, float]) -> dict[int, float]:
    return {x: -value for x, value in terms.items()}

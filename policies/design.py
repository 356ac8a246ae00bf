"""Chooses |R|, the number of concurrent sessions that a placement is designed for."""

from __future__ import annotations

import math
from typing import NamedTuple

from policies.feasibility import largest_concurrency, no_concurrency, one_infeasible
from policies.greedy import plan
from policies.problem import Placement, PolicyError, Problem, RequestSpec
from policies.state import SystemState
from policies.wsrr import WsRr


class DesignConcurrency(NamedTuple):
    """|R| and how it was chosen. ``value`` is the least of ``wanted``, ``memory_bound`` and ``largest``, at least 1.

    ``largest`` is the largest |R| at which CG-BP holds every block. The memory bound promises that |R| up to it fit, but
    it knows no block caps, with which less may fit. ``single_request_s`` is T, the seconds of one request alone, see the function of that name.
    """

    value: int
    wanted: int
    memory_bound: int
    largest: int
    single_request_s: float


def memory_bound(problem: Problem) -> int:
    """Returns floor((sum M_j - s_m (L + |V_s|)) / (s_c (L + |V_s|))): any |R| up to it is guaranteed to fit.

    It can be negative. Where blocks differ in size, also by server, it is the largest |R| that fits.
    """
    if problem.model.blocks_bytes or any(server.stored for server in problem.servers):
        return largest_concurrency(problem, honour_cap=False)
    held_blocks = problem.model.n_blocks + problem.n_servers
    total_bytes = sum(server.memory_bytes for server in problem.servers)
    free_bytes = total_bytes - problem.model.block_bytes * held_blocks
    return math.floor(free_bytes / (problem.design_cache_bytes * held_blocks))


def single_request_s(problem: Problem) -> float:
    """Returns T: the seconds of one request of the design lengths, alone, under CG-BP with |R| = 1 and WS-RR.

    T is that of the slowest client and includes ``initial_delay_s``. As in the reference simulator, the
    servers' block caps do not apply here. Raises ``InfeasiblePlacement`` if some block has no server.
    """
    greedy = plan(problem, 1, honour_cap=False)
    placement = Placement("single request", greedy.ranges, problem.room_bytes(greedy.ranges), 1)
    missing = placement.uncovered(problem.model.n_blocks)
    if missing:
        raise one_infeasible(problem, missing)
    router = WsRr().bind(problem, placement)
    idle = SystemState(placement.cache_bytes)
    slowest_s = 0.0
    for client in range(len(problem.clients)):
        request = RequestSpec(client, problem.n_input_tokens, problem.n_output_tokens)
        route = router.route(request, idle, 0.0)
        assert route is not None, "a placement for one request has a chain with room for it"
        slowest_s = max(slowest_s, route.cost_s)
    return slowest_s + problem.initial_delay_s


def check_design_concurrency(given: int | None) -> None:
    """Raises ``PolicyError`` if the given |R| is below 1. ``None`` is for the policy to choose."""
    if given is not None and given < 1:
        raise PolicyError(f"design concurrency must be at least 1, not {given}")


def given_or_one(given: int | None) -> int:
    """Returns the given |R|, or 1. Raises ``PolicyError``."""
    check_design_concurrency(given)
    return 1 if given is None else given


def given_or_chosen(problem: Problem, given: int | None, *, honour_cap: bool = True) -> int:
    """Returns the given |R|, or that of ``choose_design_concurrency``. Raises ``PolicyError``."""
    check_design_concurrency(given)
    return choose_design_concurrency(problem, honour_cap=honour_cap).value if given is None else given


def choose_design_concurrency(problem: Problem, *, honour_cap: bool = True) -> DesignConcurrency:
    """Returns |R| = min(round(lambda T + sqrt(lambda T)), memory bound, largest that fits), at least 1.

    ``honour_cap``: whether servers keep to their block caps, which can make the largest |R| that fits less than the
    memory bound. In the reference simulator it does not count (``Problem.caps_limit_concurrency``).
    Raises ``InfeasiblePlacement`` if the memory bound is below 1 or one request does not fit.
    """
    alone_s = single_request_s(problem)
    bound = memory_bound(problem)
    if bound < 1:
        raise no_concurrency(problem, bound)
    mean_active = problem.request_rate * alone_s
    wanted = math.floor(mean_active + math.sqrt(mean_active) + 0.5)
    largest = largest_concurrency(problem, honour_cap)
    most = min(bound, largest) if problem.caps_limit_concurrency else bound
    return DesignConcurrency(max(min(wanted, most), 1), wanted, bound, largest, alone_s)

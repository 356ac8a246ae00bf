"""Checks the rules that every placement and route must keep, those of users' policies included."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from policies.feasibility import block_list, gigabytes
from policies.problem import BlockRange, Hop, Placement, PolicyError, Problem, RequestSpec, Route
from policies.state import SystemState
from policies.waiting import ROUNDING_RATIO, waiting_s
from policies.workload import RequestPlan


def check_placement(problem: Problem, placement: Placement, name: str | None = None) -> Placement:
    """Checks that every block is held, ranges lie in ``[0, L)``, and s_m m_j + cache_j <= M_j on every server.

    Returns the placement with Python's own numbers, because those of numpy cannot be written to a run's plan. ``name`` is
    the policy's name, if it is not ``placement.policy``. Raises ``PolicyError`` that names the policy and the rule that it
    broke.
    """
    model = problem.model
    who = f"placement policy {name or getattr(placement, 'policy', '?')}"
    if not isinstance(placement, Placement):
        raise PolicyError(f"{who} must return a Placement, not {type(placement).__name__}")
    returned: tuple[tuple[str, Any], ...] = (
        ("range", placement.ranges),
        ("cache size", placement.cache_bytes),
    )
    for what, values in returned:
        if not isinstance(values, tuple | list):
            raise PolicyError(f"{who} must return {what}s as a tuple, not {type(values).__name__}")
        if len(values) != problem.n_servers:
            raise PolicyError(
                f"{who} must return one {what} for each of the {problem.n_servers} servers, not {len(values)}"
            )
    for j, (server, held, cache_bytes) in enumerate(
        zip(problem.servers, placement.ranges, placement.cache_bytes, strict=True)
    ):
        first, last = _ints(held, who, server.name)
        if not is_number(cache_bytes):
            raise PolicyError(
                f"{who} leaves {cache_bytes!r} bytes for caches on {server.name}; it must be a number"
            )
        if not 0 <= first <= last <= model.n_blocks:
            raise PolicyError(
                f"{who} puts blocks [{first}, {last}) on {server.name}; the model has [0, {model.n_blocks})"
            )
        own_bytes = problem.stored(j).range_bytes(BlockRange(first, last))
        if own_bytes + max(cache_bytes, 0.0) > server.memory_bytes * (1 + ROUNDING_RATIO):
            raise PolicyError(
                f"{who} overbooks {server.name}: {gigabytes(own_bytes)} of blocks and "
                f"{gigabytes(max(cache_bytes, 0.0))} of caches in {gigabytes(server.memory_bytes)} of memory"
            )
        if not cache_bytes >= 0:
            raise PolicyError(
                f"{who} leaves {cache_bytes} bytes for caches on {server.name}; it must be >= 0"
            )
    designed: Any = placement.design_concurrency
    bounds: Any = placement.bounds
    if not isinstance(placement.policy, str):
        raise PolicyError(f"{who} states policy = {placement.policy!r}; it must be a text")
    if designed is not None and not isinstance(designed, numbers.Integral):
        raise PolicyError(
            f"{who} states design_concurrency = {designed!r}; it must be a whole number or None"
        )
    if not isinstance(bounds, Mapping):
        raise PolicyError(f"{who} states bounds = {bounds!r}; they must be a dict")
    for key, bound in bounds.items():
        if bound is not None and not (is_number(bound) and math.isfinite(bound)):
            raise PolicyError(f"{who} states the bound {key} = {bound!r}; it must be a finite number or None")
    missing = placement.uncovered(model.n_blocks)
    if missing:
        raise PolicyError(f"{who} leaves blocks {block_list(missing)} on no server; blocks count from 0")
    stated: Mapping[str, Any] = {
        key: bound if bound is None or type(bound) is bool else plain(bound) for key, bound in bounds.items()
    }
    return replace(
        placement,
        ranges=tuple(BlockRange(int(held.first), int(held.last)) for held in placement.ranges),
        cache_bytes=tuple(map(plain, placement.cache_bytes)),
        design_concurrency=None if designed is None else int(designed),
        bounds=stated,
    )


def check_route(problem: Problem, placement: Placement, route: Route, name: str) -> None:
    """Checks that a chain covers ``[0, L)`` in order and leaves servers at the end of their ranges (Lemma 1).

    Checks its seconds, too (``check_times``). Raises ``PolicyError`` that names the policy ``name`` and the rule that it
    broke.
    """
    if not isinstance(route, Route):
        raise PolicyError(f"routing policy {name} must return a Route or None, not {type(route).__name__}")
    if not isinstance(route.hops, tuple) or not all(isinstance(hop, Hop) for hop in route.hops):
        raise PolicyError(f"routing policy {name} must return a Route whose hops are a tuple of Hop")
    position = 0
    for hop in route.hops:
        if not all(type(number) is int for number in hop):
            raise PolicyError(
                f"routing policy {name} returns {hop!r}; a hop must have whole numbers of Python"
            )
        if not 0 <= hop.server < problem.n_servers:
            raise PolicyError(f"routing policy {name} names server {hop.server}, which does not exist")
        first, last = placement.ranges[hop.server]
        what = (
            f"routing policy {name} sends blocks [{hop.first}, {hop.last}) to "
            f"{problem.servers[hop.server].name}, which holds [{first}, {last})"
        )
        if hop.first != position:
            raise PolicyError(f"{what}, but block {position} is next")
        if not first <= hop.first < hop.last <= last:
            raise PolicyError(f"{what}; a hop must stay inside the server's range")
        if hop.last != last:
            raise PolicyError(f"{what}; a hop must go on to the end of the server's range")
        position = hop.last
    if position != problem.model.n_blocks:
        raise PolicyError(
            f"routing policy {name} stops before block {position}; the model has {problem.model.n_blocks}"
        )
    check_times(route, name)


def check_times(route: Route, name: str) -> None:
    """Checks that a route's ``wait_s`` and ``cost_s`` are numbers, and that the wait is at least 0 and finite.

    Raises ``PolicyError`` that names the policy ``name`` and the value.
    """
    for key, value in (("wait_s", route.wait_s), ("cost_s", route.cost_s)):
        if not is_number(value):
            raise PolicyError(
                f"routing policy {name} returns a Route whose {key} is {value!r}; it must be a number of seconds"
            )
    if not 0 <= route.wait_s < math.inf:
        raise PolicyError(
            f"routing policy {name} expects a wait of {route.wait_s} s; it must be >= 0 and finite, or the route None"
        )


def check_waiting(
    problem: Problem, request: RequestSpec, route: Route, state: SystemState, now_s: float, name: str
) -> None:
    """Checks that a route's ``wait_s`` is at least t^W of each hop, so there is room when the session starts.

    Raises ``PolicyError`` that names the policy ``name``, the server and the memory.
    """
    block_bytes = problem.model.cache_bytes(request.cache_tokens)
    for hop in route.hops:
        need_bytes = hop.n_blocks * block_bytes
        until_s = waiting_s(state, hop.server, need_bytes, now_s)
        if until_s > route.wait_s * (1 + ROUNDING_RATIO) + ROUNDING_RATIO:
            when = "never has it" if until_s == math.inf else f"has it only in {until_s:.3f} s"
            raise PolicyError(
                f"routing policy {name} overbooks {problem.servers[hop.server].name}: after a wait of "
                f"{route.wait_s:g} s the session needs {gigabytes(need_bytes)} of cache there, and it {when}"
            )


def check_made_up(requests: Sequence[RequestPlan], n_clients: int, name: str) -> None:
    """Checks requests that the placement policy ``name`` makes up for a rehearsal.

    Raises ``PolicyError`` that names the first one which is wrong, and what to change.
    """
    if not isinstance(requests, Sequence) or not requests:
        raise PolicyError(f"placement policy {name} rehearses no requests; give a list of one or more")
    before_s = 0.0
    for number, plan in enumerate(requests):
        who = f"placement policy {name} rehearses request {number}"
        if not isinstance(plan, RequestPlan):
            raise PolicyError(f"{who} as {type(plan).__name__}; it must be a RequestPlan")
        if plan.index != number:
            raise PolicyError(
                f"{who} with the index {plan.index!r}; indices must be 0, 1, ... in the list's order"
            )
        if not _is_count(plan.client, 0) or plan.client >= n_clients:
            raise PolicyError(
                f"{who} from client {plan.client!r}; it must be a whole number from 0 to {n_clients - 1}"
            )
        if not is_number(plan.arrival_at_s) or not before_s <= plan.arrival_at_s < math.inf:
            raise PolicyError(
                f"{who}, which arrives at {plan.arrival_at_s!r} s; arrivals must be finite, at least 0, and ascending"
            )
        if not _is_count(plan.n_input_tokens, 0) or not _is_count(plan.n_output_tokens, 1):
            raise PolicyError(
                f"{who} with {plan.n_input_tokens!r} input and {plan.n_output_tokens!r} output tokens; they must be whole "
                "numbers of at least 0 and 1"
            )
        if plan.turn is not None and plan.turn.after is not None:
            _check_turn(requests, plan, plan.turn.after, who)
        before_s = plan.arrival_at_s


def _check_turn(requests: Sequence[RequestPlan], plan: RequestPlan, after: int, who: str) -> None:
    if not _is_count(after, 0) or after >= plan.index:
        raise PolicyError(f"{who} as a turn after request {after!r}; that must be one before it in the list")
    earlier = requests[after]
    if plan.n_input_tokens < earlier.n_input_tokens + earlier.n_output_tokens:
        raise PolicyError(
            f"{who} as a turn after request {after} with {plan.n_input_tokens} input tokens; they begin with all "
            f"{earlier.n_input_tokens} + {earlier.n_output_tokens} tokens of that one"
        )


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, numbers.Integral) and int(value) >= least


def _ints(held: Any, who: str, server: str) -> tuple[int, int]:
    """Returns a range's two block numbers. Raises ``PolicyError`` if a policy returned something else."""
    if isinstance(held, BlockRange) and all(isinstance(b, int) for b in held):
        return held.first, held.last
    raise PolicyError(
        f"{who} returns {held!r} for {server}; it must be a BlockRange(first, last) of whole numbers"
    )


def is_number(value: Any) -> bool:
    """Whether it is a real number, of Python or of a library; whole ones of at most 64 bits, as they are sent."""
    if isinstance(value, float):  # takes a tenth of the time of what follows
        return True
    return abs(value) < 2**63 if isinstance(value, int) else isinstance(value, numbers.Real)


def plain(number: float) -> float:
    """Returns a number as one of Python's own, which can be sent and written, unlike those of numpy."""
    return number if type(number) in (float, int) else float(number)

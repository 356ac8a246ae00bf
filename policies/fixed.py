"""Policies for a user's own decisions: a given placement, and given chains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.interfaces import PlacementPolicy, RoutingPolicy
from policies.problem import (
    BlockRange,
    Hop,
    Placement,
    PolicyError,
    Problem,
    RequestSpec,
    Route,
    service_s,
)
from policies.state import SystemState
from policies.waiting import waiting_s


@dataclass
class FixedPlacement(PlacementPolicy):
    """The blocks that each server holds, as given.

    ``ranges`` and ``cache_bytes`` are in the order of the servers. ``cache_bytes`` ``None`` means all memory
    that the blocks leave. ``from_one``: the user wrote ranges as [first block, number of blocks], counted from
    1, and not as [first, last); errors repeat them so.
    """

    ranges: tuple[BlockRange, ...]
    cache_bytes: tuple[float, ...] | None = None
    name: str = "fixed"
    sees_absent_servers: ClassVar[bool] = True
    from_one: bool = False

    def place(self, problem: Problem, design_concurrency: int | None = None) -> Placement:
        """Returns the given placement; of its rules only the ranges are checked (``checks.check_placement``).

        ``design_concurrency`` is stored in it and has no other effect. Raises ``PolicyError``.
        """
        n_blocks = problem.model.n_blocks
        for server, held in zip(problem.servers, self.ranges, strict=False):
            if not 0 <= held.first <= held.last <= n_blocks:
                given, form = (
                    [held.first, held.last],
                    f"[first block, block after the last], from 0 to {n_blocks}",
                )
                if self.from_one:
                    given = [held.first + 1, held.n_blocks]
                    form = f"[first block, number of blocks], with blocks from 1 to {n_blocks}"
                raise PolicyError(f"the fixed placement has {given} for {server.name}, but needs {form}")
        cache_bytes = problem.room_bytes(self.ranges) if self.cache_bytes is None else self.cache_bytes
        return Placement(self.name, self.ranges, cache_bytes, design_concurrency)


@dataclass
class FixedRouting(RoutingPolicy):
    """One chain for every request, or one per client, as given.

    ``chains`` maps a client's name to its servers, by name or number. The key ``""`` is for all other
    clients.
    """

    chains: Mapping[str, Sequence[str | int]]
    name: str = "fixed"

    def bind(self, problem: Problem, placement: Placement) -> FixedRouter:
        """Returns the router. Raises ``PolicyError`` if a client has no chain, or a chain lacks blocks."""
        unknown = [name for name in self.chains if name and name not in problem.clients]
        if unknown:
            raise PolicyError(
                f"the fixed route is for {unknown[0]!r}, which is no client; clients: "
                f"{', '.join(problem.clients)}"
            )
        hops = []
        for client in problem.clients:
            chain = self.chains.get(client, self.chains.get(""))
            if chain is None:
                raise PolicyError(f"the fixed route has no chain for {client}; add one")
            hops.append(_hops(problem, placement, chain))
        return FixedRouter(problem, tuple(hops))


class FixedRouter:
    """Returns the client's chain; requests wait until every server on it has room."""

    def __init__(self, problem: Problem, chains: tuple[tuple[Hop, ...], ...]) -> None:
        self._problem = problem
        self._chains = chains

    def route(self, request: RequestSpec, state: SystemState, now_s: float) -> Route | None:
        """Returns the client's chain, or ``None`` if one of its servers can never hold the request."""
        hops = self._chains[request.client]
        block_bytes = self._problem.model.cache_bytes(request.cache_tokens)
        wait_s = max(waiting_s(state, hop.server, hop.n_blocks * block_bytes, now_s) for hop in hops)
        if wait_s == math.inf:
            return None
        return Route(hops, wait_s, wait_s + service_s(self._problem, request, hops)[1])


def _hops(problem: Problem, placement: Placement, chain: Sequence[str | int]) -> tuple[Hop, ...]:
    numbers = {server.name: j for j, server in enumerate(problem.servers)}
    position, hops = 0, []
    for server in chain:
        j = numbers.get(server, -1) if isinstance(server, str) else server
        if not 0 <= j < problem.n_servers:
            raise PolicyError(
                f"the fixed route names server {server!r}, which does not exist; servers: {', '.join(numbers)}"
            )
        held = placement.ranges[j]
        if not held.first <= position < held.last:
            raise PolicyError(
                f"the fixed route needs block {position} on {problem.servers[j].name}, which holds "
                f"{f'blocks {held.first}-{held.last - 1}' if held.n_blocks else 'none'}"
            )
        hops.append(Hop(j, position, held.last))
        position = held.last
    if position != problem.model.n_blocks:
        raise PolicyError(
            f"the fixed route ends before block {position}; the model has {problem.model.n_blocks}"
        )
    return tuple(hops)

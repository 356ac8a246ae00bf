"""The rules that every placement and route must keep; users' policies are held to them."""

from __future__ import annotations

from policies.problem import Placement, PolicyError, Problem, Route


def check_placement(problem: Problem, placement: Placement) -> None:
    """Raises ``PolicyError`` naming the policy and the rule that it broke."""
    model, name = problem.model, placement.policy
    if len(placement.ranges) != problem.n_servers or len(placement.cache_bytes) != problem.n_servers:
        raise PolicyError(
            f"placement {name} must answer one range and one cache size for each of {problem.n_servers} servers"
        )
    for server, (first, last), cache in zip(
        problem.servers, placement.ranges, placement.cache_bytes, strict=True
    ):
        if not 0 <= first <= last <= model.n_blocks:
            raise PolicyError(
                f"placement {name} puts blocks [{first}, {last}) on {server.name}; the model has [0, {model.n_blocks})"
            )
        needed = model.block_bytes * (last - first) + cache
        if cache < 0 or needed > server.memory_bytes * (1 + 1e-9):
            raise PolicyError(
                f"placement {name} overbooks {server.name}: {needed / 1e9:.3f} GB of blocks and caches in "
                f"{server.memory_bytes / 1e9:.3f} GB"
            )
    missing = placement.uncovered(model.n_blocks)
    if missing:
        raise PolicyError(f"placement {name} leaves blocks {missing} on no server")


def check_route(problem: Problem, placement: Placement, route: Route, name: str) -> None:
    """A chain covers ``[0, L)`` in order and leaves every server at the end of its range (Lemma 1)."""
    position = 0
    for hop in route.hops:
        if not 0 <= hop.server < problem.n_servers:
            raise PolicyError(f"routing {name} names server {hop.server}, which does not exist")
        first, last = placement.ranges[hop.server]
        if hop.first != position or not first <= hop.first < hop.last or hop.last != last:
            raise PolicyError(
                f"routing {name} sends blocks [{hop.first}, {hop.last}) to {problem.servers[hop.server].name}, which "
                f"holds [{first}, {last}), when block {position} is next"
            )
        position = hop.last
    if position != problem.model.n_blocks:
        raise PolicyError(f"routing {name} stops before block {position} of {problem.model.n_blocks}")

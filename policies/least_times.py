"""The least times that requests can take on a placement, whatever else it serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from policies.chains import Chains
from policies.problem import Problem, RequestSpec, hop_input_s, hop_token_s, return_times_s
from policies.shared_replay import NOTICED_RATIO
from policies.sharing import Sharing
from policies.workload import RequestPlan

_Ends = tuple[int | None, int | None]
"""The servers that a way leads from and to; ``None``: the client."""


class Weights(NamedTuple):
    """What a request's time counts: the seconds until its first token, and those per further token."""

    first: float
    further: float


class LeastTimes:
    """Bounds from below of what requests take in ``policies.shared_replay``.

    A request is alone on its chain, none of its messages waits, and steps are as much shorter as is not noticed there. The chain
    is the one that takes the least then. ``weights`` returns those of a request. More than two that occur with one prompt are
    ``first`` and 1 - ``first``.
    """

    def __init__(self, problem: Problem, sharing: Sharing, weights: Callable[[RequestPlan], Weights]) -> None:
        self._problem = problem
        self._sharing = sharing
        self._weights = weights
        self._ways_s: dict[tuple[int, int], dict[_Ends, tuple[float, float]]] = {}
        """By client and length of the prompt: seconds for the prompt and per further token between two ends."""
        self._prompts_s: dict[int, list[float]] = {}
        """Seconds per block for a prompt of some length, by server."""

    def of(self, chains: Chains, n_held: Sequence[int], requests: Sequence[RequestPlan]) -> list[float]:
        """Returns the least weighted time of each request; infinite if no chain holds all blocks.

        ``n_held`` is how many blocks each server holds.
        """
        kinds: dict[tuple[int, int], set[Weights]] = {}
        keys = [(plan.client, plan.n_input_tokens) for plan in requests]
        weights = [self._weights(plan) for plan in requests]
        for key, of_request in zip(keys, weights, strict=True):
            kinds.setdefault(key, set()).add(of_request)
        graph = _Graph.of(chains)
        noticed = 1 - NOTICED_RATIO
        token_s = [
            noticed * self._sharing.alone_s(server, n) / n if n else 0.0 for server, n in enumerate(n_held)
        ]
        least = {key: self._by_weights(graph, token_s, key, sorted(found)) for key, found in kinds.items()}
        return [least[key][of_request] for key, of_request in zip(keys, weights, strict=True)]

    def _by_weights(
        self, graph: _Graph, token_s: Sequence[float], key: tuple[int, int], weights: list[Weights]
    ) -> dict[Weights, float]:
        """Returns the least times by weights, which are ascending.

        ``token_s`` are seconds per block and further token, by server. ``key``: the client, and the length of the prompt. Times
        between two weights are interpolated: the least of linear functions is concave, and no less than that.
        """
        first, last = weights[0], weights[-1]
        ways_s = self._ways_s.setdefault(key, {})
        for ends in graph.ends:
            if ends not in ways_s:
                ways_s[ends] = self._way_s(*key, *ends)
        ways = [(ends[1], *ways_s[ends]) for ends in graph.ends]
        if (prompts_s := self._prompts_s.get(key[1])) is None:
            prompts_s = self._prompts_s[key[1]] = [one.prefill_s(key[1]) for one in self._problem.servers]
        low, high = (self._least(graph, ways, prompts_s, token_s, key[0], one) for one in (first, last))
        found = {first: low, last: high}
        for one in weights[1:-1]:
            part = (one.first - first.first) / (last.first - first.first)
            found[one] = (1 - part) * low + part * high
        return found

    def _least(
        self,
        graph: _Graph,
        ways: Sequence[tuple[int | None, float, float]],
        prompts_s: Sequence[float],
        token_s: Sequence[float],
        client: int,
        weights: Weights,
    ) -> float:
        first, further = weights
        costs = [
            (
                first * prompt_s + further * further_s,
                0.0 if server is None else first * prompts_s[server] + further * token_s[server],
            )
            for server, prompt_s, further_s in ways
        ]
        least = [0.0]
        for edges in graph.into:
            best = math.inf
            for tail, way, n_blocks in edges:
                of_way, of_block = costs[way]
                cost = least[tail] + of_way + n_blocks * of_block
                if cost < best:
                    best = cost
            least.append(best)
        hub_s = self._problem.hub_s(client)
        return least[-1] + first * (self._problem.initial_delay_s + hub_s) + further * hub_s

    def _way_s(
        self, client: int, n_input: int, previous: int | None, server: int | None
    ) -> tuple[float, float]:
        problem, request = self._problem, RequestSpec(client, n_input, 1)
        if server is None:
            assert previous is not None, "the last server sends the result"
            return return_times_s(problem, request, previous)
        token_s = hop_token_s(problem, client, previous, server) - problem.servers[server].step_base_s
        return hop_input_s(problem, request, previous, server), token_s


class _Graph(NamedTuple):
    """The edges of ``Chains``, by the node that they lead to, from the second on: (tail, number of its ends, blocks)."""

    ends: list[_Ends]
    into: list[list[tuple[int, int, int]]]

    @classmethod
    def of(cls, chains: Chains) -> _Graph:
        number_of: dict[_Ends, int] = {}
        into = [
            [(edge.tail, number_of.setdefault(edge.ends, len(number_of)), edge.n_blocks) for edge in edges]
            for _, edges in chains.nodes[1:]
        ]
        return cls(list(number_of), into)

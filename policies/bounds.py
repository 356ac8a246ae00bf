"""How long a request's tokens take at most and at least: Theorem 1 for the routing in use, and Lemma B.1.

The paper's Theorem 1 is about decode steps, while WS-RR minimises the time of the whole request, prefill included: its
chain may decode more slowly than the theorem says. So t^c_ij is redefined as in the paper's Remark. A hop costs what it
adds to the whole request, divided by the request's output tokens (``policies.link_costs``).
"""

from __future__ import annotations

from policies.cgbp import lower_bound_s, theorem1_s, theorem1_servers
from policies.greedy import GreedyPlan, plan
from policies.link_costs import cheapest_chain, link_costs
from policies.positions import PositionGraph
from policies.problem import Placement, Problem, RequestSpec


def greedy_plan_of(problem: Problem, placement: Placement) -> GreedyPlan | None:
    """Returns CG-BP's plan that has the ranges of ``placement``; ``None``: it is another one, without Theorem 1."""
    if not placement.design_concurrency:
        return None
    for honour_cap in (True, False):
        greedy = plan(problem, placement.design_concurrency, honour_cap=honour_cap)
        if greedy.ranges == placement.ranges:
            return greedy
    return None


class UpperBound:
    """Theorem 1 on a placement of CG-BP, for a routing policy that takes the cheapest chain where all have room.

    It holds for requests of at most the design lengths while no more than |R| sessions are there.
    """

    def __init__(self, problem: Problem, greedy: GreedyPlan) -> None:
        self._problem = problem
        self._greedy = greedy
        self._graph = PositionGraph(greedy.ranges, problem.model.n_blocks)

    def per_token_s(self, request: RequestSpec, lead_s: float) -> float:
        """Returns the bound in seconds: on the mean over all tokens, and on that over all but the first.

        ``lead_s``: the seconds before the prompt is sent. The mean over all tokens is at most Theorem 1's value for the
        whole request's costs. Without the first token it is at most what the cheapest prefill leaves of them.
        """
        n, whole_s = request.n_output_tokens, self._service_s(request)
        longest_s = (lead_s + whole_s) / n
        if n > 1:
            longest_s = max(longest_s, (whole_s - self._least_prefill_s(request)) / (n - 1))
        return longest_s + self._problem.hub_s(request.client)

    def completion_s(self, request: RequestSpec, lead_s: float, crowded_s: float) -> float:
        """Returns the bound in seconds on a request from its arrival to its last token, if nobody had to ask again.

        ``crowded_s``: the seconds until fewer than |R| of the sessions that it found are left; 0 if they were fewer. From
        then on no hop waits. WS-RR minimises the sum of the waits at all hops and the chain's own time, and the
        request waits no longer than that sum: on the chain of Theorem 1 it is at most ``crowded_s`` for each hop.
        """
        n_hops = len(theorem1_servers(self._greedy, self._problem.model.n_blocks))
        tokens_s = self._service_s(request) + request.n_output_tokens * self._problem.hub_s(request.client)
        return lead_s + n_hops * crowded_s + tokens_s

    def _service_s(self, request: RequestSpec) -> float:
        """Returns Theorem 1's bound on the seconds of the cheapest chain, for all output tokens."""
        costs = link_costs(self._problem, request)
        per_token_s = theorem1_s(costs, self._greedy, self._problem.model.n_blocks)
        return request.n_output_tokens * per_token_s

    def _least_prefill_s(self, request: RequestSpec) -> float:
        """Returns the seconds of the cheapest chain's prefill, if only the prefill counted."""
        costs = link_costs(self._problem, RequestSpec(request.client, request.n_input_tokens, 1))
        chain = cheapest_chain(self._graph, costs)
        assert chain is not None, "CG-BP holds every block"
        return costs.of(chain)


def lower_bound_per_token_s(problem: Problem, request: RequestSpec, lead_s: float) -> float:
    """Returns Lemma B.1's bound in seconds on the mean over all of a request's tokens, on any placement and route.

    ``lead_s``: the seconds before its prompt is sent. Infinite if the servers cannot hold the model.
    """
    costs = link_costs(problem, request, is_bound=True)
    return (
        lead_s / request.n_output_tokens
        + lower_bound_s(problem, request.n_tokens, costs)
        + problem.hub_s(request.client)
    )

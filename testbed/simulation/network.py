"""How long messages take in the real mode: always the same, or by the links in force when they are sent."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from nodes.links import GIVE_UP_S
from policies.problem import Hop, Problem, RequestSpec, hop_times_s, return_times_s
from testbed.experiment import Experiment
from testbed.scenario.network import policy_times
from testbed.timeline import Timeline
from testbed.wiring import idle_s


class LostError(Exception):
    """What waits for a link waits in vain: the request has failed at ``at_s``."""

    def __init__(self, at_s: float, reason: str) -> None:
        super().__init__(reason)
        self.at_s = at_s


class ControlTimes(Protocol):
    """Messages that open and close sessions: small, and half of the RTT each way."""

    def arrives_at_s(self, client: int, server: int, at_s: float) -> float:
        """When a message sent at ``at_s`` reaches the server; infinite: never."""
        ...

    def answered_at_s(self, client: int, server: int, at_s: float) -> float:
        """When its answer is back at the client; infinite: never."""
        ...


class Ways(ControlTimes, Protocol):
    """All ways of messages: one by one, and those of steps."""

    def passes_at_s(self, server: int, to: int, at_s: float) -> float:
        """When a small message that ``server`` sends another at ``at_s`` is there; infinite: never."""
        ...

    def returns_at_s(self, client: int, server: int, at_s: float) -> float:
        """When a small message that the server sends at ``at_s`` is at the client; infinite: never."""
        ...

    def step_arrives_at_s(
        self, request: RequestSpec, previous: int | None, server: int, at_s: float, is_prompt: bool
    ) -> float:
        """When what a step needs, sent at ``at_s``, is at ``server``."""
        ...

    def step_returns_at_s(
        self, request: RequestSpec, server: int, at_s: float, is_prompt: bool, is_last: bool
    ) -> float:
        """When a step's result, ready at ``at_s``, can go on to the next hop."""
        ...


class SteadyTimes:
    """The problem's RTTs."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._rtt_s = problem.raw_rtt_s

    def returns_at_s(self, client: int, server: int, at_s: float) -> float:
        return at_s + self._rtt_s[client][server] / 2

    def step_arrives_at_s(
        self, request: RequestSpec, previous: int | None, server: int, at_s: float, is_prompt: bool
    ) -> float:
        way_s = way_times_s(self._problem, request, previous, server)[0 if is_prompt else 1]
        return at_s + (way_s if self._problem.forwarding else way_s / 2)

    def step_returns_at_s(
        self, request: RequestSpec, server: int, at_s: float, is_prompt: bool, is_last: bool
    ) -> float:
        if self._problem.forwarding:
            return at_s + return_times_s(self._problem, request, server)[not is_prompt] if is_last else at_s
        return at_s + way_times_s(self._problem, request, None, server)[0 if is_prompt else 1] / 2

    def passes_at_s(self, server: int, to: int, at_s: float) -> float:
        return at_s + self._problem.server_rtt_s[server][to] / 2

    def arrives_at_s(self, client: int, server: int, at_s: float) -> float:
        return at_s + self._rtt_s[client][server] / 2

    def answered_at_s(self, client: int, server: int, at_s: float) -> float:
        return at_s + self._rtt_s[client][server]


class ChangingNetwork:
    """The links of an experiment with changes, instant by instant.

    Every way of a message takes half of the RTT (or of t_cj, t^I_cj) that the links in force when it is
    sent give; a message that meets a cut link goes out when that is up again. A session that waits for longer
    than servers keep it is lost, unless ``loses_nothing``.
    """

    def __init__(self, experiment: Experiment, *, loses_nothing: bool = False) -> None:
        self._experiment = experiment
        self._timeline = Timeline(experiment)
        self._since_s = [change.at_s for change in experiment.changes]
        self._problems: dict[int, Problem] = {0: experiment.problem}
        self._servers = [server.name for server in experiment.problem.servers]
        self._clients = experiment.problem.clients
        self._idle_s = math.inf if loses_nothing else idle_s(experiment)

    def problem(self, at_s: float) -> Problem:
        """The problem with the times of the links in force at ``at_s``."""
        number = bisect_right(self._since_s, at_s)
        if number not in self._problems:
            experiment = self._experiment
            links = {**experiment.links}
            for change in experiment.changes[:number]:
                links.update(change.links)
            times = policy_times(
                links,
                self._clients,
                self._servers,
                experiment.problem.model,
                experiment.calibration,
                experiment.mtu,
                [server.step_base_s for server in experiment.problem.servers],
                experiment.problem.forwarding,
            )
            self._problems[number] = replace(experiment.problem, **vars(times))
        return self._problems[number]

    def arrives_at_s(self, client: int, server: int, at_s: float) -> float:
        return self._control_at_s(client, (self._clients[client], self._servers[server]), server, at_s)

    def answered_at_s(self, client: int, server: int, at_s: float) -> float:
        return self.returns_at_s(client, server, self.arrives_at_s(client, server, at_s))

    def returns_at_s(self, client: int, server: int, at_s: float) -> float:
        return self._control_at_s(client, (self._servers[server], self._clients[client]), server, at_s)

    def passes_at_s(self, server: int, to: int, at_s: float) -> float:
        sent_at_s = self._goes_out_at_s((self._servers[server], self._servers[to]), at_s)
        if sent_at_s == math.inf:
            return math.inf
        return sent_at_s + self.problem(sent_at_s).server_rtt_s[server][to] / 2

    def _control_at_s(self, client: int, pair: tuple[str, str], server: int, at_s: float) -> float:
        sent_at_s = self._goes_out_at_s(pair, at_s)
        if sent_at_s == math.inf:
            return math.inf
        return sent_at_s + self.problem(sent_at_s).raw_rtt_s[client][server] / 2

    def _goes_out_at_s(self, pair: tuple[str, str], at_s: float) -> float:
        """When a small message of ``at_s`` finds the link of ``pair`` up; infinite: never."""
        return self._timeline.up_at_s(pair, at_s) if at_s < math.inf else at_s

    def step_arrives_at_s(
        self, request: RequestSpec, previous: int | None, server: int, at_s: float, is_prompt: bool
    ) -> float:
        """When what a step needs, sent at ``at_s``, is at ``server``. Raises ``LostError``."""
        forwarding = self._experiment.problem.forwarding
        sender = (
            self._servers[previous] if forwarding and previous is not None else self._clients[request.client]
        )
        sent_at_s = self._sent_at_s((sender, self._servers[server]), at_s)
        way_s = way_times_s(self.problem(sent_at_s), request, previous, server)[0 if is_prompt else 1]
        return sent_at_s + (way_s if forwarding else way_s / 2)

    def step_returns_at_s(
        self, request: RequestSpec, server: int, at_s: float, is_prompt: bool, is_last: bool
    ) -> float:
        """When a step's result, ready at ``at_s``, can go on to the next hop. Raises ``LostError``."""
        forwarding = self._experiment.problem.forwarding
        if forwarding and not is_last:
            return at_s
        sent_at_s = self._sent_at_s((self._servers[server], self._clients[request.client]), at_s)
        problem = self.problem(sent_at_s)
        if forwarding:
            return sent_at_s + return_times_s(problem, request, server)[not is_prompt]
        return sent_at_s + way_times_s(problem, request, None, server)[0 if is_prompt else 1] / 2

    def _sent_at_s(self, pair: tuple[str, str], at_s: float) -> float:
        sent_at_s = self._timeline.up_at_s(pair, at_s)
        if sent_at_s - at_s > self._idle_s:
            reason = f"nothing came from {pair[0]} to {pair[1]} for {self._idle_s:g} s"
            raise LostError(min(sent_at_s, at_s + GIVE_UP_S), reason)
        return sent_at_s

    def steps(
        self, request: RequestSpec, hops: Sequence[Hop], ready_at_s: float
    ) -> Iterator[tuple[float, float, float, float]]:
        """(sent, arrived, departed, received) of every token's hops in order, for a request alone.

        The client's own part of a token comes before the next one's first hop.
        """
        at_s = ready_at_s
        for token in range(request.n_output_tokens):
            previous: int | None = None
            for number, hop in enumerate(hops):
                sent_at_s, is_last = at_s, number + 1 == len(hops)
                arrived_at_s = self.step_arrives_at_s(request, previous, hop.server, at_s, token == 0)
                n_input_tokens = request.n_input_tokens
                position, n_tokens = (n_input_tokens + token - 1, 1) if token else (0, n_input_tokens)
                takes_s = busy_s(self._experiment.problem, hop, position, n_tokens)
                departed_at_s = arrived_at_s + takes_s
                at_s = self.step_returns_at_s(request, hop.server, departed_at_s, token == 0, is_last)
                yield sent_at_s, arrived_at_s, departed_at_s, at_s
                previous = hop.server
            at_s += self._experiment.problem.hub_token_s


def way_times_s(
    problem: Problem, request: RequestSpec, previous: int | None, server: int
) -> tuple[float, float]:
    """Communication alone of one hop: (of the prompt, of every further token)."""
    input_s, token_s = hop_times_s(problem, request, previous, server)
    base_s = problem.servers[server].step_base_s
    return input_s - base_s, token_s - base_s


def busy_s(problem: Problem, hop: Hop, position: int, n_tokens: int) -> float:
    """A step alone on its server: k tau^I(l) at position 0, else k tau a token, and what a step costs once."""
    server = problem.servers[hop.server]
    block_s = n_tokens * server.decode_at_s(position) if position else server.prefill_s(n_tokens)
    return server.step_base_s + hop.n_blocks * block_s

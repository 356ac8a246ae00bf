"""What a running testbed provides to those who send requests from outside."""

from __future__ import annotations

import asyncio

from nodes import control, messages
from nodes.clock import Clock
from nodes.request import Generation, Request
from policies.links import Link
from policies.problem import RequestSpec
from policies.workload import RequestPlan
from testbed.control.coordinator import Coordinator
from testbed.control.links import LinkChanges
from testbed.experiments.experiment import Experiment
from testbed.runtime.nodeset import NodeSet
from testbed.runtime.progress import Progress

_STATUS_S = 1.0
"""Seconds that a server has to report its status."""


class Reception:
    """The ``testbed.runtime.guests.Host`` of a run."""

    def __init__(
        self,
        experiment: Experiment,
        coordinator: Coordinator,
        nodes: NodeSet,
        links: LinkChanges,
        clock: Clock,
        progress: Progress,
    ) -> None:
        self._experiment = experiment
        self._coordinator = coordinator
        self._nodes = nodes
        self._links = links
        self._clock = clock
        self._progress = progress

    def could_hold(self, client: int, n_input_tokens: int, n_output_tokens: int) -> bool:
        """Whether there would be a chain for such a request if it were the only one.

        Assumed for every request that is not longer than the placement is designed for.
        """
        problem = self._experiment.problem
        if n_input_tokens + n_output_tokens <= problem.n_input_tokens + problem.n_output_tokens:
            return True
        return self._coordinator.could_route(RequestSpec(client, n_input_tokens, n_output_tokens))

    def submit(self, client: int, n_input_tokens: int, n_output_tokens: int, how: Generation) -> int:
        """Serve one more request at ``client`` now; returns its index."""
        index, now_s = len(self._coordinator.requests), self._clock.now_s()
        self._coordinator.requests[index] = RequestPlan(index, client, now_s, n_input_tokens, n_output_tokens)
        self._progress.n_requests += 1
        request = Request(index, now_s, n_input_tokens, n_output_tokens, how)
        self._nodes.peers[self._experiment.problem.clients[client]].notify(messages.Submit(request))
        return index

    def end_request(self, index: int, *, enough: bool) -> None:
        """End a submitted request: it has tokens ``enough``, or else its sender has disconnected."""
        client = self._experiment.problem.clients[self._coordinator.requests[index].client]
        self._nodes.peers[client].notify(messages.End(index, enough))

    def links_now(self) -> dict[tuple[str, str], Link]:
        """Return the scenario's links as they are now, by (from, to)."""
        return {pair: self._links.link(pair) for pair in self._experiment.network.links}

    async def statuses(self) -> dict[str, messages.ServerStatus | None]:
        """Return every server's status by name; ``None`` for a server that does not answer."""
        names = [server.name for server in self._experiment.problem.servers]
        return dict(zip(names, await asyncio.gather(*map(self._status, names)), strict=True))

    async def _status(self, name: str) -> messages.ServerStatus | None:
        peer = self._nodes.peers.get(name)
        if peer is None:  # it has not joined yet
            return None
        try:
            async with asyncio.timeout(_STATUS_S):
                return await peer.ask(messages.GetStatus())
        except (TimeoutError, control.ControlError):
            return None

"""What a running testbed provides to those who send requests from outside."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from nodes import control, messages
from nodes.clock import Clock
from nodes.prefixes import page_ids, split_ids
from nodes.request import Generation, Request
from policies.links import Link
from policies.problem import RequestSpec
from policies.workload import RequestPlan, Turn
from testbed.control.coordinator import Coordinator
from testbed.control.links import LinkChanges
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import kept_tokens
from testbed.runtime.nodeset import NodeSet
from testbed.runtime.progress import Progress

_MOST_SESSIONS = 100_000
"""Conversations whose last chain is remembered."""
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
        self._page_tokens = kept_tokens(experiment)
        self._sessions: dict[str, tuple[int, int]] = {}
        """The number of each conversation, and its turns so far; the one used last at the end."""
        self._n_forgotten = 0

    def could_hold(self, client: int, n_input_tokens: int, n_output_tokens: int) -> bool:
        """Whether there would be a chain for such a request if it were the only one.

        Assumed for every request that is not longer than the placement is designed for.
        """
        problem = self._experiment.problem
        if n_input_tokens + n_output_tokens <= problem.n_input_tokens + problem.n_output_tokens:
            return True
        return self._coordinator.could_route(RequestSpec(client, n_input_tokens, n_output_tokens))

    def submit(
        self, client: int, n_input_tokens: int, n_output_tokens: int, how: Generation, session: str = ""
    ) -> int:
        """Serve one more request at ``client`` now, of the conversation ``session`` ("": of none); returns its index."""
        index, now_s = len(self._coordinator.requests), self._clock.now_s()
        plan = RequestPlan(index, client, now_s, n_input_tokens, n_output_tokens)
        if self._page_tokens is not None:
            ids = split_ids(page_ids(how.prompt, self._page_tokens))
            plan = replace(
                plan,
                turn=self._turn(session) if session else None,
                block_ids=tuple(int.from_bytes(each) for each in ids),
                block_tokens=self._page_tokens,
            )
        self._coordinator.requests[index] = plan
        self._progress.n_requests += 1
        request = Request(index, now_s, n_input_tokens, n_output_tokens, how, turn=plan.turn)
        self._nodes.peers[self._experiment.problem.clients[client]].notify(messages.Submit(request))
        return index

    def _turn(self, session: str) -> Turn:
        conversation, n_turns = self._sessions.pop(session, (len(self._sessions) + self._n_forgotten, 0))
        self._sessions[session] = conversation, n_turns + 1
        if len(self._sessions) > _MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
            self._n_forgotten += 1
        return Turn(conversation, n_turns)

    def end_request(self, index: int, *, enough: bool, reason: str = "") -> None:
        """End a submitted request: it has tokens ``enough``, it fails for ``reason``, or else its sender has disconnected."""
        client = self._experiment.problem.clients[self._coordinator.requests[index].client]
        self._nodes.peers[client].notify(messages.End(index, enough, reason))

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

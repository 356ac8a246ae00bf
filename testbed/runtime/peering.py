"""Sends servers the addresses and links of the other servers, for server-to-server communication."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping

from nodes.control import ControlError, Peer
from nodes.messages import Links, Message, Peers, Reach, Warm
from policies.links import Link, Pair
from policies.problem import Placement
from testbed.control.placing import followers
from testbed.errors import RunError
from testbed.experiments.experiment import Experiment
from testbed.experiments.step_limits import token_s
from testbed.runtime import wiring
from testbed.runtime.warming import Warming

Ends = Mapping[str, tuple[str, int]]
"""(address, port) of every node; port 0: the node has not started yet."""


class Peering:
    """Introduces servers to each other. Does nothing in runs with hub-spoke communication.

    ``peers`` are the nodes' control connections; ``link_now`` returns the link of a pair that is in force.
    """

    def __init__(
        self, experiment: Experiment, peers: Mapping[str, Peer], link_now: Callable[[Pair], Link]
    ) -> None:
        self._experiment = experiment
        self._peers = peers
        self._link_now = link_now
        self._is_needed = experiment.problem.forwarding
        self._names = [server.name for server in experiment.problem.servers]

    async def begin(self, ends: Ends, placement: Placement, delays_in_nodes: bool, warming: Warming) -> None:
        """Introduce all servers to each other, and connect each to those that can follow it in a chain.

        Raises ``RunError`` if a server cannot reach another.
        """
        if not self._is_needed:
            return
        present = [number for number, name in enumerate(self._names) if name in self._peers]
        try:
            await asyncio.gather(*(self._introduce(server, ends, delays_in_nodes) for server in present))
            await asyncio.gather(
                *(
                    self._peers[self._names[server]].ask(
                        Warm(
                            *(warming.n_bytes, warming.at_once_bytes),
                            [to for to in self._next(placement, server) if to in present],
                        )
                    )
                    for server in present
                )
            )
        except ControlError as error:
            raise RunError(f"a server cannot reach another: {error}") from error

    def pairs(self, placement: Placement) -> Iterable[Pair]:
        """Return the pairs of servers of which the first is connected to the second from the beginning."""
        if self._is_needed:
            for server, name in enumerate(self._names):
                yield from ((name, self._names[to]) for to in self._next(placement, server))

    def _next(self, placement: Placement, server: int) -> Iterable[int]:
        """Return the servers that ``server`` may push to: all others if an online policy moves blocks."""
        if self._experiment.policy.online is not None:
            return (number for number in range(len(self._names)) if number != server)
        return followers(placement, server)

    async def begun(self, server: int, ends: Ends, delays_in_nodes: bool) -> None:
        """Send ``server``, which has just begun to serve, the others' addresses, and the others its own."""
        if not self._is_needed:
            return
        await self._introduce(server, ends, delays_in_nodes)
        for name in self._names:
            if name != self._names[server]:
                self._tell(name, Reach(server, *ends[self._names[server]]))

    async def _introduce(self, server: int, ends: Ends, delays_in_nodes: bool) -> None:
        name = self._names[server]
        links = {pair: self._link_now(pair) for pair in self._experiment.network.links if pair[0] == name}
        view = wiring.node_view(self._experiment, name, ends, links if delays_in_nodes else None)
        limits = self._experiment.faults.recovery.push_limit_s, token_s(self._experiment)
        await self._peers[name].ask(Peers(view, *limits))

    def change(self, links: Mapping[tuple[str, str], Link]) -> None:
        """Send servers the changed links that they delay by themselves.

        A halted server reads this when it continues.
        """
        for name in self._names if self._is_needed else ():
            changed = wiring.changed_links(self._experiment, name, links)
            if changed:
                self._tell(name, Links(changed))

    def _tell(self, name: str, message: Message) -> None:
        if name in self._peers:
            with contextlib.suppress(ControlError):  # ended: it is sent everything when it begins again
                self._peers[name].notify(message)

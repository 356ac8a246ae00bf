"""Real memory of servers with real blocks, beside what the model counts of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from nodes import control
from nodes.messages import GetStatus, ServerStatus
from policies.problem import Problem

_PERIOD_S, _PATIENCE_S = 0.5, 2.0


class ServerMemory:
    """``largest`` has, by server, the moment at which it had most in blocks and caches.

    ``real_bytes`` are those (on a GPU all that its allocator has given out); ``model_bytes`` are ``s_m m_j + s_c sum k`` then; the rest is as the server says.
    """

    def __init__(self, problem: Problem) -> None:
        self.largest: dict[str, dict[str, float]] = {}
        self._problem = problem

    async def watch(self, peers: Mapping[str, control.Peer]) -> None:
        """Ask all servers among ``peers`` twice a second until cancelled; those that have ended or do not answer
        do not count."""
        while True:
            names = [server.name for server in self._problem.servers if server.name in peers]
            asked = (asyncio.wait_for(peers[name].ask(GetStatus()), _PATIENCE_S) for name in names)
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for name, answer in zip(names, answers, strict=True):
                if not isinstance(answer, BaseException):
                    self.note(name, answer)
                elif not isinstance(answer, control.ControlError | TimeoutError):
                    raise answer
            await asyncio.sleep(_PERIOD_S)

    def note(self, server: str, status: ServerStatus) -> None:
        """Keep a server's status if it has more than before."""
        memory = status.memory
        held_bytes = memory["blocks_bytes"] + memory["cache_bytes"]
        real_bytes = memory.get("device_allocated_bytes", held_bytes)
        if server in self.largest and real_bytes <= self.largest[server]["real_bytes"]:
            return
        n_blocks = status.last_block - status.first_block
        model_bytes = self._problem.model.block_bytes * n_blocks + status.cache_used_bytes
        self.largest[server] = {"real_bytes": real_bytes, "model_bytes": model_bytes, **memory}

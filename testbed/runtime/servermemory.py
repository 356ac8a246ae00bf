"""Measures the memory of servers with real blocks, beside the memory that the model counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from nodes import control
from nodes.messages import GetStatus, ServerStatus
from policies.problem import BlockRange, Problem

_PERIOD_S, _PATIENCE_S = 0.5, 2.0


class ServerMemory:
    """Records the largest memory use of every server.

    ``largest`` has, by server, its memory at the moment of most ``real_bytes``: bytes of blocks and caches
    (on a GPU all that its allocator has handed out). ``model_bytes`` are ``s_m m_j + s_c sum k`` at that
    moment. The other keys are as the server reports them; ``n_recorded`` is that of the last report.
    """

    def __init__(self, problem: Problem) -> None:
        self.largest: dict[str, dict[str, float]] = {}
        self._problem = problem

    async def watch(self, peers: Mapping[str, control.Peer]) -> None:
        """Ask all servers among ``peers`` twice a second until cancelled.

        Servers that have ended or do not answer are left out.
        """
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
        """Store a server's memory if it uses more than ever before."""
        memory = status.memory
        held_bytes = memory["blocks_bytes"] + memory["cache_bytes"]
        real_bytes = memory.get("device_allocated_bytes", held_bytes)
        if server in self.largest and real_bytes <= self.largest[server]["real_bytes"]:
            self.largest[server] |= {key: memory[key] for key in ("n_recorded",) if key in memory}
            return
        held = BlockRange(status.first_block, status.last_block)
        model_bytes = self._problem.model.range_bytes(held) + status.cache_used_bytes
        self.largest[server] = {"real_bytes": real_bytes, "model_bytes": model_bytes, **memory}

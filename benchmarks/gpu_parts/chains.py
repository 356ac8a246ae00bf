"""Servers of one model in this process, and sessions on chains of them. Imports torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nodes.blocks.compute import BlocksCompute
from nodes.blocks.hub import BlocksHub
from nodes.blocks.spec import BlocksSpec
from nodes.request import Generation, Request

Hop = tuple[BlocksCompute, int, int]
"""(server, first block, last + 1): a server and the blocks that a session uses on it."""


@dataclass(frozen=True)
class Servers:
    """Servers whose blocks overlap. ``held``: (first, last + 1) block of each server."""

    computes: tuple[BlocksCompute, ...]
    held: tuple[tuple[int, int], ...]
    n_blocks: int

    def chain(self, chance: random.Random) -> list[Hop]:
        """Returns a random chain: each hop is on a random server that holds its first block, and has a random
        length.
        """
        hops = []
        first = 0
        while first < self.n_blocks:
            usable = [j for j, (start, end) in enumerate(self.held) if start <= first < end]
            server = chance.choice(usable)
            last = chance.randint(first + 1, self.held[server][1])
            hops.append((self.computes[server], first, last))
            first = last
        return hops

    def close(self) -> None:
        for compute in self.computes:
            compute.close()


async def start_servers(spec: BlocksSpec, n_blocks: int) -> Servers:
    """Starts four servers whose ranges of blocks overlap by up to two blocks."""
    cuts = [n_blocks * i // 4 for i in range(5)]
    held = tuple((max(0, cuts[i] - 1), min(n_blocks, cuts[i + 1] + 1)) for i in range(4))
    computes = tuple(BlocksCompute(spec) for _ in held)
    for compute, (first, last) in zip(computes, held, strict=True):
        await compute.host(first, last)
    return Servers(computes, held, n_blocks)


class Walk:
    """One session: its tokens so far, and the inputs of its first hop, which are replayed when it moves."""

    def __init__(self, hub: BlocksHub, chain: Sequence[Hop], prompt: Sequence[int], n_tokens: int) -> None:
        self.tokens: list[int] = []
        self._hub = hub
        self._max_tokens = len(prompt) + n_tokens
        self._sequence = hub.sequence(Request(0, 0.0, len(prompt), n_tokens, Generation(tuple(prompt))))
        self._memory = bytearray()
        self._hops: list[tuple[BlocksCompute, Any]] = []
        self._open(chain)

    def _open(self, chain: Sequence[Hop]) -> None:
        self._position = 0
        for compute, first, last in chain:
            self._hops.append((compute, compute.new_session("benchmark", first, last, self._max_tokens)))

    async def go(self, n_tokens: int) -> None:
        """Generate ``n_tokens`` more tokens."""
        for _ in range(n_tokens):
            states = await self._sequence.embed()
            self._memory += self._hub.remember(states)
            self.tokens += await self._sequence.take((await self.forward(states))[-1])

    async def forward(self, states: bytes) -> list[bytes]:
        """Computes the next hidden states on all hops. Returns the result of each hop."""
        n_tokens = len(states) // self._hub.token_bytes
        answers = []
        for compute, session in self._hops:
            states = (await compute.step(session, self._position, n_tokens, states, 0.0)).payload
            answers.append(states)
        self._position += n_tokens
        return answers

    async def move(self, chain: Sequence[Hop]) -> None:
        """Moves the session to another chain: the remembered inputs are replayed there to fill the caches."""
        self.close()
        self._open(chain)
        await self.forward(self._hub.recall(bytes(self._memory)))

    def close(self) -> None:
        for compute, session in self._hops:
            compute.close_session(session)
        self._hops.clear()

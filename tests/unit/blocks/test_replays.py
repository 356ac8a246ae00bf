"""A session on real blocks whose server fails: its caches after the replay, in dtypes of 16 bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from nodes.compute import Computed, ComputeError
from nodes.hub import TokenSequence
from nodes.records import AnyRecord, Plan, Replayed, Token
from nodes.request import Generation, Request
from nodes.session import HubSession, SessionRules
from policies.problem import Hop
from tests.support.blocks import (
    BLOOM,
    LLAMA,
    N_LAYERS,
    Models,
    generated,
    hub_of,
    models,
    need_blocks,
    served,
)
from tests.support.data_plane import PATIENT, JumpClock, connected, make_server

need_blocks()

__all__ = ["models"]

PROMPT = [7, 3, 250, 91, 18, 44, 5]
N_TOKENS = 14
FAILS_AT = 17
"""Position of the step that the second server does not survive."""
CHAIN = [Hop(0, 0, 2), Hop(1, 2, 5), Hop(2, 5, N_LAYERS)]
REPLACEMENT = [Hop(3, 2, 4), Hop(4, 4, 5)]


class _Fails:
    """A backend that fails in the steps from one position on."""

    def __init__(self, compute: Any) -> None:
        self._compute = compute

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compute, name)

    async def step(
        self, session: Any, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        if position >= FAILS_AT:
            raise ComputeError("it is meant to fail")
        computed: Computed = await self._compute.step(session, position, n_tokens, payload, arrived_at_s)
        return computed


class _Hub:
    """The client's part, which keeps the results of the last block."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self.outputs: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hub, name)

    def sequence(self, request: Request) -> TokenSequence:
        sequence = self._hub.sequence(request)
        take = sequence.take

        async def kept(payload: bytes) -> list[int]:
            self.outputs.append(payload)
            tokens: list[int] = await take(payload)
            return tokens

        sequence.take = kept
        answer: TokenSequence = sequence
        return answer


class _Ignores:
    """An observer that keeps tokens and replays."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.replays: list[Replayed] = []

    def observe(self, record: AnyRecord) -> None:
        if isinstance(record, Token):
            self.token_ids.append(record.token_id)
        elif isinstance(record, Replayed):
            self.replays.append(record)


async def talk(
    models: Models, name: str, dtype: str, prompt: list[int], replay: Any
) -> tuple[list[int], list[bytes], int]:
    """Returns (tokens, results of the last block, replays); without ``replay`` nothing fails."""
    source, clock = models.source(name), JumpClock()
    computes = [await served(source, first, last, dtype=dtype) for _, first, last in (*CHAIN, *REPLACEMENT)]
    hub, log = _Hub(hub_of(source, dtype=dtype)), _Ignores()
    backends: list[Any] = [_Fails(c) if i == 1 and replay else c for i, c in enumerate(computes)]
    servers = [
        make_server(first, last, name=f"s{i}", compute=backend)
        for i, ((_, first, last), backend) in enumerate(zip((*CHAIN, *REPLACEMENT), backends, strict=True))
    ]

    async def route(*_: Any) -> Plan:
        return Plan(CHAIN, 0.0, 0.0)

    async def reroute(*_: Any) -> Plan:
        return Plan(REPLACEMENT, 0.0, 0.0)

    # Without limits, since the clock jumps while blocks are computed.
    rules = SessionRules(recovery=replace(PATIENT, replay=replay or "at_once"))
    request = Request(0, 0.0, len(prompt), N_TOKENS, Generation(tuple(prompt)))
    async with connected(servers, clock) as connections:
        await HubSession(
            request,
            "0",
            "c",
            connections,
            route,
            hub,
            rules,
            clock,
            log.observe,
            reroute,  # type: ignore[arg-type]
        ).run()
    for compute in (*computes, hub):
        compute.close()
    return log.token_ids, hub.outputs, len(log.replays)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_a_replay_step_by_step_leaves_every_bit_as_it_was_where_one_prefill_rounds_otherwise(
    models: Models, dtype: str
) -> None:
    differ = 0
    for name, shift in itertools.product((BLOOM, LLAMA), (0, 2)):
        prompt = [(token + 31 * shift) % 300 for token in PROMPT]
        tokens, outputs, n = await talk(models, name, dtype, prompt, None)
        assert (tokens, n) == (generated(models.whole(name, dtype), prompt, N_TOKENS), 0)
        assert await talk(models, name, dtype, prompt, "step_by_step") == (tokens, outputs, 1)
        _, others, n = await talk(models, name, dtype, prompt, "at_once")
        differ += others != outputs
        assert n == 1
    assert differ, "else this does not show that the steps matter"

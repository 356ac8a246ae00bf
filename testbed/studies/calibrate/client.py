"""Measures the client's own time per output token: embedding, final norm, head, and the choice of the token.

A client of the timing stub computes next to nothing, so scenarios set this time with ``[compute] hub_token``.
The paper's model does not have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nodes.clock import Clock
from nodes.compute import Compute, open_session
from nodes.hub import HubModel
from nodes.request import Request
from testbed.studies.calibrate.measure import CLIENT
from testbed.studies.calibrate.plan import N_STEPS, Plan

SESSIONS_PER_ROUND = 2


@dataclass(frozen=True)
class ClientSample:
    """One output token. ``embed_s``: time to make the hidden states of ``n_tokens`` tokens; ``take_s``: time
    from the result of the last block to the chosen token.

    ``n_tokens`` is the prompt's length for the first token and 1 for every other. ``round`` is negative in
    warm-up, whose samples are not used.
    """

    round: int
    n_tokens: int
    embed_s: float
    take_s: float

    @property
    def time_s(self) -> float:
        return self.embed_s + self.take_s

    @property
    def is_used(self) -> bool:
        return self.round >= 0


@dataclass(frozen=True)
class ClientTime:
    """Median and quartiles of the client's time over ``n_samples`` output tokens for which it sent
    ``n_tokens``.
    """

    n_tokens: int
    n_samples: int
    time_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class ClientFit:
    """``token``: the time of output tokens after the first. ``prompts``: times of first tokens, by prompt
    length.

    A prompt of one token counts under ``token``, since it takes the same time.
    """

    token: ClientTime
    prompts: tuple[ClientTime, ...]


async def measure_client(plan: Plan, hub: HubModel, compute: Compute, clock: Clock) -> list[ClientSample]:
    """Generates texts with the plan's shortest and longest prompts, in its rounds, and returns all samples.

    Between a token's embedding and its choice, ``compute`` computes all ``plan.max_blocks`` blocks, and then
    ``plan.pause_s`` seconds pass. So the CPU's caches are as cold as those of a client that waits for
    servers.
    """
    lengths = sorted({case.n_input_tokens for case in plan.cases})
    samples: list[ClientSample] = []
    for number in range(-plan.n_warm_up, plan.rounds):
        for length in sorted({lengths[0], lengths[-1]}):
            for _ in range(SESSIONS_PER_ROUND):
                samples += await _text(number, length, plan, hub, compute, clock)
    return samples


async def _text(
    number: int, length: int, plan: Plan, hub: HubModel, compute: Compute, clock: Clock
) -> list[ClientSample]:
    session: Any = await open_session(compute, CLIENT, 0, plan.max_blocks, length + N_STEPS)
    samples, position = [], 0
    try:
        sequence = hub.sequence(Request(0, 0.0, length, N_STEPS))
        for _ in range(N_STEPS):
            began_at_s = clock.now_s()
            payload = await sequence.embed()
            embed_s = clock.now_s() - began_at_s
            n_tokens = len(payload) // hub.token_bytes
            answer = await compute.step(session, position, n_tokens, payload, clock.now_s())
            position += n_tokens
            await clock.sleep_until_s(clock.now_s() + plan.pause_s)
            began_at_s = clock.now_s()
            await sequence.take(answer.payload)
            samples.append(ClientSample(number, n_tokens, embed_s, clock.now_s() - began_at_s))
    finally:
        compute.close_session(session)
    return samples


def fit_client(samples: Sequence[ClientSample]) -> ClientFit:
    """Returns medians of the used samples. There must be at least one sample with ``n_tokens`` 1."""
    times_s: dict[int, list[float]] = {}
    for sample in samples:
        if sample.is_used:
            times_s.setdefault(sample.n_tokens, []).append(sample.time_s)
    known = {n_tokens: _median(n_tokens, some) for n_tokens, some in sorted(times_s.items())}
    return ClientFit(known[1], tuple(time for n_tokens, time in known.items() if n_tokens > 1))


def _median(n_tokens: int, times_s: Sequence[float]) -> ClientTime:
    low_s, time_s, high_s = (float(value) for value in np.percentile(times_s, [25, 50, 75]))
    return ClientTime(n_tokens, len(times_s), time_s, low_s, high_s)

"""The plan of a calibration: the measurements of the paper's validation figures 2 and 3 and its appendix.

A case is a number of equal sessions. Each prefills ``n_input_tokens`` and decodes ``n_steps`` tokens on a
chain, which is the model's blocks in ranges of ``n_blocks``. The ranges are computed one after the other,
with a pause before each. So before a step the CPU's caches are as they are when the testbed serves a model;
if a step were repeated at once, few blocks would stay in the cache and seem faster.

Cases vary one thing at a time, and blocks and input length also together. Only so can the cost per step be
separated from the cost per block, and the cost of a block from that of a cached token. Several sessions at
once do not pause, and are compared with one session that does not pause either.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from testbed.errors import UserError

N_STEPS = 8
"""Decode steps of a case that measures blocks or input length; the context grows by as many tokens."""
N_CONCURRENT_STEPS = 16
DEFAULT_LENGTHS = (16, 64, 128, 256, 512)
MAX_BLOCKS_TAKEN = 5
SESSIONS = (1, 2, 4, 8)
OUTPUT_TOKENS = 128
ROUNDS = 5
PAUSE_S = 0.01
"""Idle time before a step, about as long as a short round trip to another server."""


@dataclass(frozen=True, order=True)
class Case:
    """``n_sessions`` sessions on ranges of ``n_blocks`` blocks. Each has a prompt; then all decode
    ``n_steps`` tokens at the same time.
    """

    n_blocks: int
    n_input_tokens: int
    n_steps: int = N_STEPS
    n_sessions: int = 1
    is_paced: bool = True
    """Whether the backend idles before every step, as a server does while a token is on the network."""

    @property
    def max_tokens(self) -> int:
        return self.n_input_tokens + self.n_steps

    def ranges(self, n_blocks: int) -> list[tuple[int, int]]:
        """Returns the chain over a model of ``n_blocks`` as (first block, end). Blocks left over at the end
        are unused.
        """
        starts = range(0, n_blocks - self.n_blocks + 1, self.n_blocks)
        return [(first, first + self.n_blocks) for first in starts]


@dataclass(frozen=True)
class Plan:
    """All ``cases``, ``rounds`` times, after ``n_warm_up`` rounds that do not count.

    ``pause_s``: idle time before each step of a paced case, in which caches become cold and the CPU's clock
    rate drops. ``memory_blocks``: numbers of blocks with which memory is measured. ``memory_sessions``:
    numbers of sessions of ``memory_tokens`` tokens with which it is measured on ``max_blocks`` blocks.
    """

    cases: tuple[Case, ...]
    rounds: int
    n_warm_up: int
    memory_blocks: tuple[int, ...]
    memory_sessions: tuple[int, ...]
    memory_tokens: int
    pause_s: float = 0.0

    @property
    def max_blocks(self) -> int:
        return max(case.n_blocks for case in self.cases)

    def ordered(self, seed: int) -> Iterator[tuple[int, Case]]:
        """Yields (round, case). Warm-up rounds have negative numbers.

        Each round has all cases in another random order: a machine that becomes slower with time then slows
        all cases alike and distorts no comparison.
        """
        for number in range(-self.n_warm_up, self.rounds):
            cases = list(self.cases)
            random.Random(f"{seed}:{number}").shuffle(cases)
            for case in cases:
                yield number, case


def block_counts(n_blocks: int, at_most: int = MAX_BLOCKS_TAKEN) -> tuple[int, ...]:
    """Returns 1, ``n_blocks`` and the powers of two between; if they are too many, evenly chosen ones of
    these.
    """
    counts = {1, n_blocks}
    power = 2
    while power < n_blocks:
        counts.add(power)
        power *= 2
    ordered = sorted(counts)
    n_gaps = min(at_most, len(ordered)) - 1
    return (
        tuple(ordered[round(i * (len(ordered) - 1) / n_gaps)] for i in range(n_gaps + 1)) if n_gaps else (1,)
    )


def lengths_within(lengths: Iterable[int], n_steps: int, max_tokens: int | None) -> tuple[int, ...]:
    """Returns those ``lengths`` that leave room for ``n_steps`` more tokens in a session of ``max_tokens``,
    sorted.
    """
    return tuple(sorted({n for n in lengths if max_tokens is None or n + n_steps <= max_tokens}))


def make_plan(
    n_blocks: int,
    max_tokens: int | None = None,
    *,
    lengths: Sequence[int] | None = None,
    sessions: Sequence[int] = SESSIONS,
    n_output_tokens: int = OUTPUT_TOKENS,
    rounds: int = ROUNDS,
    pause_s: float = PAUSE_S,
) -> Plan:
    """Returns the plan for a backend of ``n_blocks`` blocks whose sessions hold up to ``max_tokens`` tokens.

    Raises ``UserError`` for numbers below 1, and for lengths that do not fit into a session.
    """
    if rounds < 1:
        raise UserError(f"--rounds must be at least 1, not {rounds}")
    wrong = [n for n in (*(lengths or ()), *sessions, n_output_tokens) if n < 1]
    if wrong:
        raise UserError(f"lengths and numbers of sessions must be at least 1, not {wrong[0]}")
    fitting = lengths_within(lengths or DEFAULT_LENGTHS, N_STEPS, max_tokens)
    if lengths and len(fitting) < len(set(lengths)):
        raise UserError(
            f"an input of {max(lengths)} tokens and {N_STEPS} to decode are more than the {max_tokens} tokens "
            "of the model's longest session; give shorter --lengths"
        )
    if not fitting:
        room = max(1, (max_tokens or 0) - N_STEPS)
        if max_tokens is None or room + N_STEPS > max_tokens:
            raise UserError(
                f"the model's longest session has {max_tokens} tokens; a calibration needs at least "
                f"{N_STEPS + 1}"
            )
        fitting = (room,)
    counts = block_counts(n_blocks)
    middle = fitting[len(fitting) // 2]
    cases = {Case(k, length) for k in counts for length in fitting}
    room = n_output_tokens if max_tokens is None else min(n_output_tokens, max_tokens - fitting[0])
    if room > N_STEPS:
        cases.add(Case(n_blocks, fitting[0], room))
    concurrent = N_CONCURRENT_STEPS if max_tokens is None else min(N_CONCURRENT_STEPS, max_tokens - middle)
    cases |= {Case(n_blocks, middle, concurrent, n, is_paced=False) for n in {1, *sessions}}
    return Plan(
        tuple(sorted(cases)),
        rounds,
        1,
        counts,
        tuple(sorted({0, *sessions})),
        fitting[-1] + N_STEPS,
        pause_s,
    )

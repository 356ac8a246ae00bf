"""Draws conversations: further messages come after answers, and each repeats all that was said before."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from testbed.experiments.limits import MAX_TOKENS
from testbed.experiments.problems import KeyedError


class Message(NamedTuple):
    """A request of a conversation: its place, and its tokens with the whole history before its message."""

    conversation: int
    number: int
    think_s: float
    n_input_tokens: int
    n_output_tokens: int

    @property
    def lengths(self) -> tuple[int, int]:
        return self.n_input_tokens, self.n_output_tokens


class Draws(NamedTuple):
    """Functions that draw the number of messages, lengths in tokens, and seconds of thinking before a further message."""

    turns: Callable[[], int]
    first: Callable[[], int]
    further: Callable[[], int]
    output: Callable[[], int]
    think_s: Callable[[], float]


def draw_conversations(draws: Draws, n: int) -> list[Message]:
    """Return ``n`` messages, conversation by conversation; the last one may have fewer than it would have.

    Raises ``KeyedError`` for a conversation that has too many tokens.
    """
    messages: list[Message] = []
    conversation = 0
    while len(messages) < n:
        n_history = 0
        for number in range(min(draws.turns(), n - len(messages))):
            n_input = n_history + (draws.further() if number else draws.first())
            think_s = draws.think_s() if number else 0.0
            messages.append(Message(conversation, number, think_s, n_input, draws.output()))
            n_history = n_input + messages[-1].n_output_tokens
            if n_history > MAX_TOKENS:
                raise KeyedError(
                    ("workload", "turns"),
                    f"makes a conversation of {n_history:,} tokens, and at most {MAX_TOKENS:,} are allowed; make "
                    "conversations or their messages shorter",
                )
        conversation += 1
    return messages


def some_of(arrivals_s: list[float], n: int, rng: random.Random) -> list[float]:
    """Return ``n`` of the arrivals, the first one and others that are chosen at random: of a Poisson process one at a lower rate."""
    return [arrivals_s[0], *sorted(rng.sample(arrivals_s[1:], n - 1))]

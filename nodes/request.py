"""Requests that clients serve, and the errors with which they fail."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nodes.blocks.spec import Sampling
from policies.workload import RequestPlan, Turn


class Generation(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a request that only real blocks use.

    ``prompt`` holds the input tokens' ids. If it is empty, the hub makes up as many as the request has,
    always the same for the same request. ``sampling`` ``None``: always the most probable token. ``stops``:
    the model's end token ends the output, but not before ``min_tokens`` tokens.
    """

    prompt: tuple[int, ...] = ()
    sampling: Sampling | None = None
    stops: bool = False
    min_tokens: int = 0


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request as its client gets it: a ``RequestPlan``, with what only real blocks use.

    ``arrival_at_s`` is its intended start, in scenario seconds. Servers reserve cache for ``max_new_tokens`` output tokens; ``None``: for ``n_output_tokens``.

    ``block_ids``, ``block_tokens`` and ``answer_ids`` are those of the plan. ``history`` has the ids of the conversation so far, with which its prompt begins. Servers reserve cache for at least
    ``held_tokens``, since its chain stays open for further turns.
    """

    index: int
    arrival_at_s: float
    n_input_tokens: int
    n_output_tokens: int
    generation: Generation = Generation()
    max_new_tokens: int | None = None
    turn: Turn | None = None
    history: tuple[int, ...] = ()
    held_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    answer_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, plan: RequestPlan, generation: Generation, held_tokens: int = 0) -> Request:
        lengths = plan.n_input_tokens, plan.n_output_tokens
        held_tokens = 0 if plan.turn is None else held_tokens
        return cls(
            plan.index,
            plan.arrival_at_s,
            *lengths,
            generation,
            plan.max_new_tokens,
            plan.turn,
            held_tokens=held_tokens,
            block_ids=plan.block_ids,
            block_tokens=plan.block_tokens,
            answer_ids=plan.answer_ids,
        )

    @property
    def n_reserved_tokens(self) -> int:
        """The number of prompt and output tokens that servers reserve cache for."""
        most = self.n_output_tokens if self.max_new_tokens is None else self.max_new_tokens
        return max(self.n_input_tokens + most, self.held_tokens)


def made_up_prompt(request: Request | RequestPlan, history: Sequence[int]) -> list[int]:
    """Returns the tokens of a prompt: the conversation so far, blocks by their ids, and what only this request has."""
    known = [*history, *_in_blocks(request)][: request.n_input_tokens]
    return [*known, *(request.index + i for i in range(request.n_input_tokens - len(known)))]


def known_answer(request: Request | RequestPlan) -> list[int]:
    """Returns the first tokens of the answer, as far as blocks say what they were."""
    n_input = request.n_input_tokens
    return _in_blocks(request)[n_input : n_input + request.n_output_tokens] if request.answer_ids else []


def _in_blocks(request: Request | RequestPlan) -> list[int]:
    size, ids = request.block_tokens, (*request.block_ids, *request.answer_ids)
    return [size * number + i for number in ids for i in range(size)]


EARLIER_TURN_FAILED = "an earlier turn of its conversation failed"
"""Why a turn failed that was never asked for."""


class SessionError(Exception):
    """The request has failed; the message is the reason."""


class WrongTokenError(SessionError):
    """The chain's output differs from the whole model's."""

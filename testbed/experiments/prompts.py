"""Prompts as traces record them: blocks of tokens by ids, where equal beginnings have equal ids, and turns of chats."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeGuard

from policies.workload import RequestPlan
from testbed.experiments.limits import MAX_NUMBER
from testbed.experiments.problems import KeyedError, shown

MOONCAKE_TOKENS, BAILIAN_TOKENS = 512, 16
"""Tokens of a block in these traces."""


class Prompt(NamedTuple):
    """What is known of a prompt: its chat and turn, from 0 (-1: it is of none), and ``ids`` of its blocks of
    ``block_tokens``; ``answer_ids``: see ``RequestPlan``."""

    conversation: int
    turn: int
    block_tokens: int
    ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()


def check_ids(n_ids: int, n_tokens: int, block_tokens: int) -> None:
    """Raises ``ValueError`` unless so many blocks are a prompt of ``n_tokens``; the last one may be left out if it is not
    whole."""
    whole, all_blocks = n_tokens // block_tokens, -(-n_tokens // block_tokens)
    if n_ids not in (whole, all_blocks):
        raise ValueError(
            f"hash_ids has {n_ids} blocks, but a prompt of {n_tokens} tokens has {all_blocks} of {block_tokens}"
        )


def listed(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return prompts as rows of a resolved scenario: [chat, turn, ids of blocks ...]."""
    return [[prompt.conversation, prompt.turn, *prompt.ids] for prompt in prompts]


def with_answers(
    prompts: Sequence[Prompt], rows: Sequence[object], lengths: Sequence[tuple[int, int]]
) -> list[Prompt]:
    """Return prompts with the blocks after them: ``rows`` of ids. ``lengths``: of prompts and answers. Raises ``KeyedError``."""
    _check_rows("answers", rows, len(prompts))
    found = []
    for index, (prompt, row, (n_input, n_output)) in enumerate(zip(prompts, rows, lengths, strict=True)):
        size, place = prompt.block_tokens, ("workload", "answers", index)
        n_most = (n_input + n_output - 1) // size - n_input // size
        if not _are_ids(row) or len(row) > n_most:
            raise KeyedError(
                place, f"must be at most {n_most} ids of blocks, whole numbers, not {shown(row)}"
            )
        if row and len(prompt.ids) != n_input // size:
            raise KeyedError(place, "comes after a prompt that does not end with its last whole block")
        found.append(prompt._replace(answer_ids=tuple(row)))
    return found


def _check_rows(key: str, rows: Sequence[object], n_requests: int) -> None:
    if len(rows) != n_requests:
        raise KeyedError(
            ("workload", key),
            f"has {len(rows)} rows, and there are {n_requests} requests; give one for each",
        )


def _are_ids(row: object) -> TypeGuard[list[int]]:
    return isinstance(row, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and abs(each) < MAX_NUMBER for each in row
    )


def of_rows(rows: Sequence[object], lengths: Sequence[int], block_tokens: int) -> list[Prompt]:
    """Return the prompts of ``listed`` rows, whose tokens are ``lengths``. Raises ``KeyedError``."""
    _check_rows("prompts", rows, len(lengths))
    found = []
    for index, (row, n_tokens) in enumerate(zip(rows, lengths, strict=True)):
        place = ("workload", "prompts", index)
        if not _are_ids(row) or len(row) < 2:
            raise KeyedError(
                place, f"must be [chat, turn, ids of blocks ...], whole numbers, not {shown(row)}"
            )
        try:
            check_ids(len(row) - 2, n_tokens, block_tokens)
        except ValueError as error:
            raise KeyedError(place, f"is no prompt of its request: {error}") from None
        found.append(Prompt(row[0], row[1], block_tokens, tuple(row[2:])))
    return found


def implied_reuse(requests: Iterable[RequestPlan], page_tokens: int) -> list[int]:
    """Return how many tokens of each prompt, in order, are whole pages of what an earlier prompt began with.

    That is what servers with unlimited room reuse if every request ends before the next one comes. A prompt's last token is
    always computed.
    """
    reached: dict[tuple[int, int], tuple[int, int]] = {}
    """By (node before, id of a block): the node, and the most tokens up to its end that a prompt has."""
    found = []
    for request in requests:
        n_tokens, size, node, n_common, is_known = request.n_input_tokens, request.block_tokens, 0, 0, True
        for number, block in enumerate(request.block_ids, 1):
            key, n_here = (node, block), min(number * size, n_tokens)
            known = reached.get(key)
            is_known &= known is not None
            if known is not None and is_known:
                n_common = min(known[1], n_here)
            node = len(reached) + 1 if known is None else known[0]
            reached[key] = node, max(n_here, 0 if known is None else known[1])
        n_pages = min(n_common // page_tokens, (n_tokens - 1) // page_tokens)
        found.append(n_pages * page_tokens)
    return found

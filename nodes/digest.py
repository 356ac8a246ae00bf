"""A toy transformer for the stub: its hidden states are values of eight bytes.

A token's value after block b depends on its value before b, on b, and on all earlier tokens that b has
seen in the session (as attention does). So the last value of a chain is right only if every block was
applied exactly once and in order, with the session's whole history in its cache. The client compares it
with the same computation on one machine.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

DIGEST_BYTES = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ODD = 0xD1342543DE82EF95
_INVERSE = pow(_ODD, -1, 1 << 64)
_FEW = 40
"""Fewer tokens than this are computed faster one by one than with numpy."""


def embed(token_id: int, position: int) -> int:
    """Returns the value that enters block 0."""
    return ((token_id + 1) * _GOLDEN + position * _ODD) & _MASK


def token_of(value: int, vocabulary: int = 250_880) -> int:
    """Returns the id of the token that the last block's value stands for."""
    return (value >> 20) % vocabulary


def apply_blocks(value: int, first: int, caches: MutableSequence[int]) -> int:
    """Runs one token through blocks ``first, first + 1, …``, one per entry of ``caches``.

    Returns its new value. ``caches[i]`` is the cache of block ``first + i`` for the session. It is updated in
    place.
    """
    for i in range(len(caches)):
        memory = caches[i] = (caches[i] * _ODD + value) & _MASK
        value = ((value ^ (memory >> 29)) * _GOLDEN + first + i) & _MASK
    return value


def apply_to_rows(
    values: Sequence[int],
    first: int,
    caches: MutableSequence[int],
    marks: range = range(0),
    at_marks: list[list[int]] | None = None,
) -> list[int]:
    """As ``apply_blocks`` for one token after the other; returns their new values.

    The caches after each token (its number in ``values``) of ``marks`` are appended to ``at_marks``.
    """
    if len(values) < _FEW:
        results = []
        for number, value in enumerate(values):
            results.append(apply_blocks(value, first, caches))
            if at_marks is not None and number in marks:
                at_marks.append(list(caches))
        return results
    import numpy as np  # here, so that other commands start faster; nodes are forked with numpy loaded

    rows = np.array(values, dtype=np.uint64)
    odds = np.cumprod(np.full(len(rows), _ODD, dtype=np.uint64), dtype=np.uint64)
    inverses = np.cumprod(np.full(len(rows), _INVERSE, dtype=np.uint64), dtype=np.uint64)
    columns: list[list[int]] = []
    for i in range(len(caches)):
        # memory_t = memory_(t-1) ODD + value_t (mod 2^64) in closed form: ODD is odd, so it has an inverse.
        memory = (np.cumsum(rows * inverses, dtype=np.uint64) + np.uint64(caches[i])) * odds
        rows = (rows ^ (memory >> np.uint64(29))) * np.uint64(_GOLDEN) + np.uint64(first + i)
        caches[i] = int(memory[-1])
        columns.append(memory[marks.start : marks.stop : marks.step or 1].tolist())
    if at_marks is not None:
        at_marks += map(list, zip(*columns, strict=True))
    return [int(row) for row in rows]


def read_rows(payload: bytes, token_bytes: int) -> list[int]:
    """Returns the values carried by a payload of hidden states of ``token_bytes`` each."""
    return [
        int.from_bytes(payload[start : start + DIGEST_BYTES], "little")
        for start in range(0, len(payload), token_bytes)
    ]


def write_rows(values: list[int], token_bytes: int) -> bytes:
    """Returns a payload of hidden states of ``token_bytes`` each that carry ``values``."""
    rest = bytes(token_bytes - DIGEST_BYTES)
    return b"".join(part for value in values for part in (value.to_bytes(DIGEST_BYTES, "little"), rest))

"""Attention of the next single tokens of several sessions, as one Triton kernel.

By transformers' own functions each session's attention takes some launches of its own in each block: with 64 sessions
they take several times as long as the matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from nodes.blocks.cache import SessionCache
from nodes.blocks.kernels import works

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's builds for CPUs come without it
    triton = None

_ALIGNMENT = 16
"""Bytes that a thread can load at once, where they begin at a multiple of as many."""
_TILE, _LONG_TILE = {"tile": 32, "num_warps": 2}, {"tile": 64, "num_warps": 4}
"""Cached tokens that a program reads at a time: the fastest on an H200 of those tried."""
_LONG_TOKENS = 1024
"""From so many cached tokens of a session on the long tile is used."""


class Singles:
    """Sessions with one new token each. ``caches``: their caches; ``rows``: the tokens' places in the row of all tokens.

    Valid until the caches' blocks below ``last`` have the token.
    """

    def __init__(
        self, caches: Sequence[SessionCache], rows: Sequence[int], first: int, last: int, device: torch.device
    ) -> None:
        self._caches = caches
        self._first = first
        addresses = zip(*(cache.addresses(first, last) for cache in caches), strict=True)
        lengths = [cache.of_block(first).length for cache in caches]
        self._tile = _TILE if max(lengths) < _LONG_TOKENS else _LONG_TILE
        table = [*addresses, rows, lengths, [cache.room for cache in caches]]
        on_device = torch.tensor(table, dtype=torch.int64).to(device)
        self._addresses, self._others = on_device[:-3], on_device[-3:]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        number: int,
        scale: float,
        *,
        window: int | None = None,
        biases: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the tokens' keys and values in block ``number``. Returns ``[1, n, heads, head size]`` for the row of
        all n tokens, of which only those of these sessions are set.

        ``query`` ``[1, heads, n, head size]``; ``key`` and ``value`` have as many heads or a divisor of them. Scores are
        ``scale`` times the products of queries and keys, plus ``biases`` ``[heads, 1, tokens]`` by a key's position. A
        token attends to itself and all before it, in all to ``window`` at most.
        """
        _, n_heads, n_tokens, head_size = query.shape
        answer = query.new_empty((1, n_tokens, n_heads, head_size))
        rows, lengths, rooms = self._others
        _attend[len(self._caches), n_heads](
            query,
            key,
            value,
            answer,
            query if biases is None else biases,
            self._addresses[number - self._first],
            rows,
            lengths,
            rooms,
            scale,
            *(stride for tensor in (query, key, value) for stride in (tensor.stride(2), tensor.stride(1))),
            0 if biases is None else biases.stride(0),
            window or 0,
            n_heads // key.shape[1],
            key.shape[1],
            head_size,
            triton.next_power_of_2(head_size),
            biases is not None,
            math.gcd(head_size * query.itemsize, _ALIGNMENT),
            **self._tile,
        )
        for cache in self._caches:
            cache.of_block(number).length += 1
        return answer


@functools.cache
def usable(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernel works on this device: tried once, with a session of one token and another."""

    def is_right() -> bool:
        ones = torch.ones((1, 2, 1, 16), dtype=dtype, device=device)
        cache = SessionCache(0, 1, (2, 16), 2, dtype, device)
        cache.update(ones, ones, 0)
        answer = Singles([cache], [0], 0, 1, device).attend(ones, ones, 3 * ones, 0, 1.0)
        return bool((answer == 2).all())

    return works(device, is_right, "attention is computed session by session,")


if triton is not None:
    _LEAST = tl.constexpr(-1e30)
    """The score of a place without a token."""

    @triton.jit
    def _attend(  # type: ignore[no-untyped-def] # Triton would look an annotation's name up
        query,
        key,
        value,
        answer,
        biases,
        addresses,
        rows,
        lengths,
        rooms,
        scale,
        query_row,
        query_head,
        key_row,
        key_head,
        value_row,
        value_head,
        biases_head,
        window,
        group: tl.constexpr,
        n_kv_heads: tl.constexpr,
        head_size: tl.constexpr,
        padded_size: tl.constexpr,
        has_biases: tl.constexpr,
        alignment: tl.constexpr,
        tile: tl.constexpr,
    ) -> None:
        """One head of one session's token. Each of ``tile`` places has a softmax of its own over the tokens that it reads,
        whose largest score so far is kept: they are joined at the end, so that nothing waits in between."""
        session, head = tl.program_id(0), tl.program_id(1)
        row = tl.load(rows + session)
        length = tl.load(lengths + session)
        room = tl.load(rooms + session)
        keys = tl.load(addresses + session).to(tl.pointer_type(query.dtype.element_ty))
        keys = tl.multiple_of(keys, alignment)  # else single values would be loaded
        values = keys + n_kv_heads * room * head_size
        own = (head // group) * room * head_size
        each = tl.arange(0, padded_size)
        is_each = each < head_size
        q = tl.load(query + row * query_row + head * query_head + each, mask=is_each, other=0.0).to(
            tl.float32
        )
        new_key = tl.load(key + row * key_row + (head // group) * key_head + each, mask=is_each, other=0.0)
        new_value = tl.load(
            value + row * value_row + (head // group) * value_head + each, mask=is_each, other=0.0
        )
        if head % group == 0:
            tl.store(keys + own + length * head_size + each, new_key, mask=is_each)
            tl.store(values + own + length * head_size + each, new_value, mask=is_each)
        largest = tl.full((tile,), _LEAST, tl.float32)
        total = tl.zeros((tile,), tl.float32)
        mixed = tl.zeros((tile, padded_size), tl.float32)
        first = length * 0
        if window > 0:
            first = tl.maximum(first, length + 1 - window)
        for start in range(first, length, tile):
            places = start + tl.arange(0, tile)
            is_place = places < length
            at = own + places[:, None] * head_size + each[None, :]
            is_there = is_place[:, None] & is_each[None, :]
            old_keys = tl.load(keys + at, mask=is_there, other=0.0).to(tl.float32)
            scores = tl.sum(old_keys * q[None, :], 1) * scale
            if has_biases:
                scores += tl.load(biases + head * biases_head + places, mask=is_place, other=0.0).to(
                    tl.float32
                )
            scores = tl.where(is_place, scores, _LEAST)
            before, largest = largest, tl.maximum(largest, scores)
            shrink = tl.exp(before - largest)
            weights = tl.where(is_place, tl.exp(scores - largest), 0.0)
            old_values = tl.load(values + at, mask=is_there, other=0.0).to(tl.float32)
            mixed = mixed * shrink[:, None] + weights[:, None] * old_values
            total = total * shrink + weights
        score = tl.sum(q * new_key.to(tl.float32), 0) * scale
        if has_biases:
            score += tl.load(biases + head * biases_head + length).to(tl.float32)
        overall = tl.maximum(tl.max(largest, 0), score)
        shares = tl.exp(largest - overall)
        share = tl.exp(score - overall)
        sums = tl.sum(mixed * shares[:, None], 0) + share * new_value.to(tl.float32)
        whole = tl.sum(total * shares, 0) + share
        n_heads: tl.constexpr = group * n_kv_heads
        at = answer + (row * n_heads + head) * head_size + each
        tl.store(at, (sums / whole).to(answer.dtype.element_ty), mask=is_each)

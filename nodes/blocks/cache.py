"""A session's keys and values, in one allocation for all tokens that it has room for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class _Layer(CacheLayerMixin):
    """Keys and values of one block, each ``[1, kv heads, max tokens, head size]``."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        raise AssertionError("allocated already")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class SessionCache(Cache):
    """Keys and values of blocks ``[first, last)``. Blocks find theirs by their number in the whole model.

    ``layout`` is that of ``family.cache_layout``. ``store`` is ``[blocks, 2, 1, kv heads, max tokens, head
    size]``.
    """

    def __init__(
        self,
        first: int,
        last: int,
        layout: tuple[int, int],
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        n_heads, head_size = layout
        # One allocation, because a device rounds every allocation up.
        store = torch.empty((last - first, 2, 1, n_heads, max_tokens, head_size), dtype=dtype, device=device)
        super().__init__(layers=[_Layer(block[0], block[1]) for block in store])
        self._first = first
        self.store = store

    def grow(self, max_tokens: int) -> None:
        """Allocates room for ``max_tokens`` in total, and copies the present tokens there."""
        n_blocks, _, _, n_heads, _, head_size = self.store.shape
        store = self.store.new_empty((n_blocks, 2, 1, n_heads, max_tokens, head_size))
        for layer, block in zip(self.layers, store, strict=True):
            block[:, :, :, : layer.length] = torch.stack([layer.keys, layer.values])[:, :, :, : layer.length]
            layer.keys, layer.values = block[0], block[1]
        if store.is_cuda:  # else another stream could get the old memory while it is still being copied
            torch.cuda.current_stream(store.device).synchronize()
        self.store = store

    def page(self, tokens: range) -> torch.Tensor:
        """Returns a copy of the keys and values of ``tokens``."""
        page = self.store[:, :, :, :, tokens.start : tokens.stop].clone()
        if page.is_cuda:  # else another stream could get the session's memory while it is still being copied
            torch.cuda.current_stream(page.device).synchronize()
        return page

    def begin_with(self, pages: Sequence[torch.Tensor]) -> None:
        """Copies ``pages``, as ``page`` has returned them, to the first tokens of a cache without tokens."""
        n_tokens = sum(page.shape[4] for page in pages)
        self.store[:, :, :, :, :n_tokens] = torch.cat(list(pages), dim=4)
        self.set_length(n_tokens)

    def set_length(self, n_tokens: int) -> None:
        """Sets how many tokens are cached. Every block must have them already."""
        for layer in self.layers:
            layer.length = n_tokens

    @property
    def room(self) -> int:
        """The number of tokens that there is room for."""
        return int(self.store.shape[4])

    def clear_room(self) -> None:
        """Fills the room without tokens with zeros: fresh memory may contain values that are not numbers."""
        self.store[:, :, :, :, self.get_seq_length() :] = 0

    def of_block(self, number: int) -> _Layer:
        layer = self.layers[number - self._first]
        assert isinstance(layer, _Layer)
        return layer

    def addresses(self, first: int, last: int) -> range:
        """Returns where the keys of blocks ``[first, last)`` begin; values follow all the room of a block's keys."""
        step = self.store.stride(0) * self.store.itemsize
        start = self.store.data_ptr() + (first - self._first) * step
        return range(start, start + (last - first) * step, step)

    @property
    def held_bytes(self) -> int:
        """The bytes that the allocator gave for it."""
        return self.store.untyped_storage().nbytes()

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(key_states, value_states, layer_idx - self._first, *args, **kwargs)


def cache_bytes(n_blocks: int, layout: tuple[int, int], max_tokens: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a session's cache: ``s_c k`` for k blocks."""
    n_heads, head_size = layout
    return 2 * n_blocks * n_heads * head_size * max_tokens * dtype.itemsize

"""One forward for several sessions: all hidden states in one row, attention for each with its own cache.

Norms, projections and feed-forward layers do not depend on sessions, so all sessions share their matrix
products. Attention does what the model's own block does. Its positions and masks come from the family's own
model class, once for each session. For a single token, positions come from a table that is made once; it
needs no mask, because it attends to all tokens before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, eager_attention_forward

from nodes.blocks.cache import SessionCache
from nodes.blocks.family import Family

Given = Mapping[str, Any]
"""A block's arguments besides hidden states: positions and the mask."""


_LEAST_PLACES = 256
"""Least number of positions in a table. Larger tables have a power of two."""


class Cached(Protocol):
    def update(
        self, keys: torch.Tensor, values: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a part's new keys and values in block ``number``; returns all those that it attends to."""
        ...


class Table(Protocol):
    """A block's arguments for one token, except for the mask, by the token's position."""

    def at(self, position: int) -> Given:
        """Returns the arguments of a token that attends to the tokens before it and to itself."""
        ...

    def wherever(self, position: torch.Tensor) -> Given:
        """Returns the arguments of a token whose ``position`` ``[1]`` may change later.

        The token attends to all positions of the table, so a mask must exclude those without a token.
        """
        ...


@dataclass(eq=False)
class Part:
    """A session's next tokens: ``states`` ``[1, n, hidden size]`` to run through ``blocks``.

    ``first`` is the number of the first block in the whole model.
    """

    states: torch.Tensor
    cache: Cached
    first: int
    blocks: Sequence[torch.nn.Module]
    given: Mapping[str, Any] = field(default_factory=dict)
    """The blocks' arguments besides hidden states."""
    rows: slice = field(default_factory=lambda: slice(0))
    """The positions of its tokens in the row of all parts."""

    @property
    def last(self) -> int:
        return self.first + len(self.blocks)


class Ragged:
    """Computes parts of sessions together. ``config`` is the whole model's."""

    def __init__(self, family: Family, config: Any, device: torch.device) -> None:
        self._through = _THROUGH[family.model_type]
        self._table_of = _TABLES[family.model_type]
        self._n_places = 0
        self._table: Table | None = None
        """The table for positions below ``_n_places``, once there is one."""
        self._given = _Given()
        self._shell = family.with_blocks(config, [self._given]).to(device)

    def forward(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Returns hidden states ``[1, n, hidden size]`` after each part's blocks, and fills its cache.

        A block computes all parts together whose range includes it. After an exception, caches may have some
        of the tokens in some blocks.
        """
        for part in parts:
            if part.states.shape[1] == 1 and isinstance(part.cache, SessionCache):
                part.given = {**self._at(part.cache.get_seq_length(), part.states), "attention_mask": None}
                continue
            self._shell(inputs_embeds=part.states, past_key_values=part.cache, use_cache=True)
            part.given = self._given.given
        return self.through(parts)

    def _at(self, position: int, states: torch.Tensor) -> Given:
        if self._table is None or position >= self._n_places:
            n_places = max(_LEAST_PLACES, 1 << position.bit_length())
            self._table = self.table(torch.arange(n_places, device=states.device), states)
            self._n_places = n_places
        return self._table.at(position)

    def through(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """As ``forward``, for parts with ``given``."""
        states = {part: part.states for part in parts}
        edges = sorted({edge for part in parts for edge in (part.first, part.last)})
        for start, end in itertools.pairwise(edges):
            here = [part for part in parts if part.first <= start < part.last]
            if not here:
                continue
            n_before = 0
            for part in here:
                part.rows = slice(n_before, n_before + part.states.shape[1])
                n_before = part.rows.stop
            row = torch.cat([states[part] for part in here], dim=1)
            for number in range(start, end):
                row = self._through(here[0].blocks[number - here[0].first], row, here)
            states |= {part: row[:, part.rows] for part in here}
        return [states[part] for part in parts]

    def table(self, places: torch.Tensor, states: torch.Tensor) -> Table:
        """Returns a table for ``places``: 0, 1, ... for all tokens that a token may attend to.

        ``states`` is an example of the hidden states: only its dtype and device matter.
        """
        return self._table_of(self._shell, places, states)


class _Given(torch.nn.Module):
    """In place of blocks: keeps the arguments that the model class passes to them."""

    given: Mapping[str, Any]

    def forward(self, states: torch.Tensor, **given: Any) -> torch.Tensor:
        self.given = given
        return states


def _bloom(block: Any, states: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """As ``BloomBlock.forward``, for several sessions."""
    attention = block.self_attention
    normed = block.input_layernorm(states)
    residual = normed if block.apply_residual_connection_post_layernorm else states
    query, key, value = attention._reshape(attention.query_key_value(normed))
    mixed = [
        _with_alibi(attention, query[:, :, part.rows], key[:, :, part.rows], value[:, :, part.rows], part)
        for part in parts
    ]
    states = residual + attention.dense(torch.cat(mixed, dim=1))
    normed = block.post_attention_layernorm(states)
    answer: torch.Tensor = block.mlp(
        normed, normed if block.apply_residual_connection_post_layernorm else states
    )
    return answer


def _with_alibi(
    attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: Part
) -> torch.Tensor:
    """As the middle of ``BloomAttention.forward``, for one session.

    ``query``, ``key`` and ``value`` are ``[1, heads, n, head size]``. Returns ``[1, n, hidden size]``.
    """
    key, value = part.cache.update(key, value, attention.layer_idx)
    scores = part.given["alibi"].baddbmm(
        query[0], key[0].transpose(-1, -2), beta=attention.beta, alpha=attention.inv_norm_factor
    )
    mask = part.given["attention_mask"]
    if mask is not None:
        scores = scores + mask[0]
    weights = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    merged: torch.Tensor = attention._merge_heads(torch.bmm(weights, value[0]))
    return merged


def _llama(block: Any, states: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """As ``LlamaDecoderLayer.forward``, for several sessions."""
    attention = block.self_attn
    normed = block.input_layernorm(states)
    query, key, value = (
        project(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    angles = (part.given["position_embeddings"] for part in parts)
    cosine, sine = (torch.cat(of_parts, dim=1) for of_parts in zip(*angles, strict=True))
    query, key = apply_rotary_pos_emb(query, key, cosine, sine)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, eager_attention_forward
    )
    mixed = []
    for part in parts:
        keys, values = part.cache.update(key[:, :, part.rows], value[:, :, part.rows], attention.layer_idx)
        mask, scaling = part.given["attention_mask"], attention.scaling
        mixed.append(
            attend(attention, query[:, :, part.rows], keys, values, mask, dropout=0.0, scaling=scaling)[0]
        )
    states = states + attention.o_proj(torch.cat(mixed, dim=1).flatten(2))
    answer: torch.Tensor = states + block.mlp(block.post_attention_layernorm(states))
    return answer


_THROUGH: Mapping[str, Callable[[Any, torch.Tensor, Sequence[Part]], torch.Tensor]] = {
    "bloom": _bloom,
    "llama": _llama,
}


class _Alibi:
    def __init__(self, shell: Any, places: torch.Tensor, states: torch.Tensor) -> None:
        self._alibi = shell.build_alibi_tensor(torch.ones_like(places)[None], shell.num_heads, states.dtype)

    def at(self, position: int) -> Given:
        return {"alibi": self._alibi[:, :, : position + 1]}

    def wherever(self, position: torch.Tensor) -> Given:
        return {"alibi": self._alibi}


class _Angles:
    def __init__(self, shell: Any, places: torch.Tensor, states: torch.Tensor) -> None:
        self._angles = shell.rotary_emb(states, places[None])

    def at(self, position: int) -> Given:
        return {"position_embeddings": tuple(each[:, position : position + 1] for each in self._angles)}

    def wherever(self, position: torch.Tensor) -> Given:
        return {"position_embeddings": tuple(each.index_select(1, position) for each in self._angles)}


_TABLES: Mapping[str, Callable[[Any, torch.Tensor, torch.Tensor], Table]] = {
    "bloom": _Alibi,
    "llama": _Angles,
}

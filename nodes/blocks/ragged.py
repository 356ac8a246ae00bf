"""One forward for several sessions: all hidden states in one row, attention for each with its own cache.

Norms, projections and feed-forward layers do not depend on sessions, so all sessions share their matrix
products. Attention does what the model's own block does. Its positions and masks come from the family's own
model class, once for each session. For a single token, positions come from a table that is made once; it
needs no mask, because it attends to all tokens before it, or to the last ones of them. On a GPU one kernel attends for
all single tokens (``attention``).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from nodes.blocks import attention
from nodes.blocks.cache import SessionCache
from nodes.blocks.family import Family, Together, kinds_of, run_with, window_of

Given = Mapping[str, Any]
"""A block's arguments besides hidden states: positions and the mask."""
GivenByKind = Mapping[str, Given]
"""The arguments by the kind of block (``family.kinds_of``)."""


_LEAST_PLACES = 256
"""Least number of positions in a table. Larger tables have a power of two."""
_NOT_IN_KERNEL = ("softcap", "s_aux")
"""Arguments of attention functions that change scores in ways that the kernel does not know."""


class Cached(Protocol):
    def update(
        self, keys: torch.Tensor, values: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores a part's new keys and values in block ``number``; returns all those that it attends to."""
        ...


class Table(Protocol):
    """Blocks' arguments for one token, except for the mask, by the token's position."""

    @property
    def biases(self) -> torch.Tensor | None:
        """What is added to scores ``[heads, 1, positions]``, by a key's position."""
        ...

    def at(self, position: int) -> GivenByKind:
        """Returns the arguments of a token that attends to the tokens before it and to itself."""
        ...

    def wherever(self, position: torch.Tensor) -> GivenByKind:
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
    given: GivenByKind = field(default_factory=dict)
    """The blocks' arguments besides hidden states. Without a mask, a single token attends to its whole window."""
    rows: slice = field(default_factory=lambda: slice(0))
    """The positions of its tokens in the row of all parts."""

    @property
    def last(self) -> int:
        return self.first + len(self.blocks)

    @property
    def single(self) -> SessionCache | None:
        """Its cache, if it has a single token and is not recorded."""
        return self.cache if self.states.shape[1] == 1 and isinstance(self.cache, SessionCache) else None


Alone = Callable[[Part, Given, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attends for one part: gets its queries, and all keys and values in its cache."""


@dataclass(frozen=True, eq=False)
class _Row:
    """The tokens of ``parts``, one after the other, which some blocks of one kind compute together."""

    parts: Sequence[tuple[Part, Given]]
    longer: Sequence[tuple[Part, Given]]
    """Those of them for which ``singles`` do not attend."""
    angles: tuple[torch.Tensor, ...]
    """The rotary embeddings of all tokens, if the family has them."""
    biases: torch.Tensor | None
    """What ALiBi adds to scores, by head and by a key's position, if the family has it."""
    window: int | None
    singles: attention.Singles | None
    """The sessions with a single token, if a kernel attends for them."""

    def mix(
        self,
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        alone: Alone,
        *,
        has_kernel: bool = True,
    ) -> torch.Tensor:
        """Returns the attention ``[1, n, heads, head size]`` of all parts in block ``number``, and fills their caches.

        ``query``, ``key`` and ``value`` are ``[1, heads, n, head size]``. ``has_kernel``: whether the kernel does what
        ``alone`` does.
        """
        if self.singles is None or not has_kernel:
            return torch.cat(
                [self._alone(one, number, query, key, value, alone) for one in self.parts], dim=1
            )
        mixed = self.singles.attend(query, key, value, number, scale, window=self.window, biases=self.biases)
        for one in self.longer:
            mixed[:, one[0].rows] = self._alone(one, number, query, key, value, alone)
        return mixed

    @staticmethod
    def _alone(
        one: tuple[Part, Given],
        number: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        alone: Alone,
    ) -> torch.Tensor:
        part, given = one
        keys, values = part.cache.update(key[:, :, part.rows], value[:, :, part.rows], number)
        return alone(part, given, query[:, :, part.rows], keys, values)


class Ragged:
    """Computes parts of sessions together. ``config`` is the whole model's; ``check`` is called before each block.

    Several threads may compute a single token each at the same time.
    """

    def __init__(
        self, family: Family, config: Any, device: torch.device, check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self._through = _bloom if family.model_type == "bloom" else _decoder
        self._table_of: Callable[..., Table] = _Alibi if family.model_type == "bloom" else _Angles
        self._kinds = kinds_of(config)
        self.windows = {kind: window_of(config, kind) for kind in dict.fromkeys(self._kinds)}
        """For every kind of block, the number of tokens that it attends to; ``None``: all."""
        self._n_places = 0
        self._table: Table | None = None
        """The table for positions below ``_n_places``, once there is one."""
        self._given = {kind: _Given() for kind in self.windows}
        self._shell = family.with_blocks(config, list(self._given.values()), list(self._given)).to(device)

    def forward(self, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Returns hidden states ``[1, n, hidden size]`` after each part's blocks, and fills its cache.

        A block computes all parts together whose range includes it. After an exception, caches may have some
        of the tokens in some blocks.
        """
        for part in parts:
            if (cache := part.single) is not None:
                part.given = self._at(cache.get_seq_length(), part.states)
                continue
            run_with(part.cache, self._shell, inputs_embeds=part.states)
            part.given = {kind: given.given for kind, given in self._given.items()}
        return self.through(parts)

    def _at(self, position: int, states: torch.Tensor) -> GivenByKind:
        if self._table is None or position >= self._n_places:
            n_places = max(_LEAST_PLACES, 1 << position.bit_length())
            table = self.table(torch.arange(n_places, device=states.device), states)
            if states.is_cuda:  # other threads will read it in their own streams
                torch.cuda.current_stream(states.device).synchronize()
            self._table, self._n_places = table, n_places
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
            together = torch.cat([states[part] for part in here], dim=1)
            rows = self._rows(here, start, end, together)
            for number in range(start, end):
                self._check()
                block = here[0].blocks[number - here[0].first]
                together = self._through(block, together, rows[self._kinds[number]])
            states |= {part: together[:, part.rows] for part in here}
        return [states[part] for part in parts]

    def _rows(self, parts: Sequence[Part], first: int, last: int, states: torch.Tensor) -> dict[str, _Row]:
        """Returns by kind of block how blocks ``[first, last)`` compute ``parts``."""
        single = {part.rows.start: cache for part in parts if (cache := part.single) is not None}
        singles = None
        if len(single) > 1 and attention.usable(states.device, states.dtype):
            singles = attention.Singles([*single.values()], [*single], first, last, states.device)
        biases = self._table.biases if self._table is not None else None
        rows = {}
        for kind in dict.fromkeys(self._kinds[first:last]):
            given = [(part, part.given[kind]) for part in parts]
            longer = [one for one in given if one[0].single is None]
            angles = [own["position_embeddings"] for _, own in given if "position_embeddings" in own]
            joint = tuple(torch.cat(of_parts, dim=1) for of_parts in zip(*angles, strict=True))
            rows[kind] = _Row(given, longer, joint, biases, self.windows[kind], singles)
        return rows

    def table(self, places: torch.Tensor, states: torch.Tensor) -> Table:
        """Returns a table for ``places``: 0, 1, ... for all tokens that a token may attend to.

        ``states`` is an example of the hidden states: only its dtype and device matter.
        """
        return self._table_of(self._shell, places, states, list(self.windows))


class _Given(torch.nn.Module):
    """In place of blocks: keeps the arguments that the model class passes to them."""

    given: Mapping[str, Any]

    def forward(self, states: torch.Tensor, **given: Any) -> torch.Tensor:
        self.given = given
        return states


def _bloom(block: Any, states: torch.Tensor, row: _Row) -> torch.Tensor:
    """As ``BloomBlock.forward``, for several sessions."""
    attention = block.self_attention
    normed = block.input_layernorm(states)
    residual = normed if block.apply_residual_connection_post_layernorm else states
    query, key, value = attention._reshape(attention.query_key_value(normed))
    alone = functools.partial(_with_alibi, attention)
    mixed = row.mix(attention.layer_idx, query, key, value, attention.inv_norm_factor, alone)
    states = residual + attention.dense(mixed.flatten(2))
    normed = block.post_attention_layernorm(states)
    answer: torch.Tensor = block.mlp(
        normed, normed if block.apply_residual_connection_post_layernorm else states
    )
    return answer


def _with_alibi(
    attention: Any, part: Part, given: Given, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """As the middle of ``BloomAttention.forward``, for one session."""
    scores = given["alibi"].baddbmm(
        query[0], keys[0].transpose(-1, -2), beta=attention.beta, alpha=attention.inv_norm_factor
    )
    mask = given.get("attention_mask")
    if mask is not None:
        scores = scores + mask[0]
    weights = torch.nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, values[0]).transpose(0, 1)[None]


def _decoder(block: Any, states: torch.Tensor, row: _Row) -> torch.Tensor:
    """The block's own forward, with attention for each session apart, or by the kernel."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, function: Any, others: Any
    ) -> torch.Tensor:
        def alone(
            part: Part, own: Given, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
        ) -> torch.Tensor:
            mask = own.get("attention_mask")
            if mask is None and row.window is not None and part.states.shape[1] == 1:
                keys, values = keys[:, :, -row.window :], values[:, :, -row.window :]
            answer: torch.Tensor = function(module, query, keys, values, mask, **others)[0]
            return answer

        scale = others.get("scaling") or query.shape[-1] ** -0.5
        is_plain = all(others.get(name) is None for name in _NOT_IN_KERNEL)
        return row.mix(module.layer_idx, query, key, value, scale, alone, has_kernel=is_plain)

    answer = block(states, attention_mask=Together(attend), position_embeddings=row.angles)
    return answer[0] if isinstance(answer, tuple) else answer


class _Alibi:
    def __init__(self, shell: Any, places: torch.Tensor, states: torch.Tensor, kinds: Sequence[str]) -> None:
        self.biases = shell.build_alibi_tensor(torch.ones_like(places)[None], shell.num_heads, states.dtype)
        self._kinds = kinds

    def at(self, position: int) -> GivenByKind:
        return {kind: {"alibi": self.biases[:, :, : position + 1]} for kind in self._kinds}

    def wherever(self, position: torch.Tensor) -> GivenByKind:
        return {kind: {"alibi": self.biases} for kind in self._kinds}


class _Angles:
    biases = None

    def __init__(self, shell: Any, places: torch.Tensor, states: torch.Tensor, kinds: Sequence[str]) -> None:
        rotary = shell.rotary_emb
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        self._angles = {
            kind: rotary(states, places[None], **({"layer_type": kind} if by_kind else {})) for kind in kinds
        }

    def at(self, position: int) -> GivenByKind:
        return {
            kind: {"position_embeddings": tuple(each[:, position : position + 1] for each in angles)}
            for kind, angles in self._angles.items()
        }

    def wherever(self, position: torch.Tensor) -> GivenByKind:
        return {
            kind: {"position_embeddings": tuple(each.index_select(1, position) for each in angles)}
            for kind, angles in self._angles.items()
        }

"""The server's backend with real blocks: one step at a time, in a thread beside the event loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nodes.blocks.cache import SessionCache
from nodes.blocks.checkpoint import Checkpoint
from nodes.blocks.family import DTYPES, family_of
from nodes.blocks.spec import BlocksSpec
from nodes.blocks.tensors import from_bytes, to_bytes
from nodes.compute import ComputeError


@dataclass
class _BlocksSession:
    first: int
    last: int
    cache: SessionCache | None
    n_bytes: int


class BlocksCompute:
    """Blocks of a model of transformers, on one device. Implements ``nodes.compute.Compute``."""

    def __init__(self, spec: BlocksSpec) -> None:
        self._spec = spec
        self._family, self._config = family_of(spec.source.config)
        self._dtype = DTYPES[spec.dtype]
        self._device = torch.device(spec.device)
        torch.set_num_threads(spec.n_threads)
        self.token_bytes: int = self._config.hidden_size * self._dtype.itemsize
        self._skeleton = self._family.skeleton(self._config).to(self._device)
        self._blocks: dict[int, torch.nn.Module] = {}
        self._models: dict[tuple[int, int], Any] = {}
        self._queue = ThreadPoolExecutor(1, "blocks")
        self._cache_bytes = 0
        n_heads = self._config.num_attention_heads
        self._n_kv_heads = getattr(self._config, "num_key_value_heads", None) or n_heads
        self._head_size = getattr(self._config, "head_dim", None) or self._config.hidden_size // n_heads

    async def host(self, first: int, last: int) -> None:
        await self._run(self._host, first, last)

    def _host(self, first: int, last: int) -> None:
        self._models.clear()
        for number in [n for n in self._blocks if not first <= n < last]:
            del self._blocks[number]
        missing = [n for n in range(first, last) if n not in self._blocks]
        if not missing:
            return
        assert self._spec.source.folder is not None
        checkpoint = Checkpoint(Path(self._spec.source.folder), self._family)
        for number in missing:
            with torch.device("meta"):
                block = self._family.block_class(self._skeleton.config, number)
            weights = checkpoint.part(f"{self._family.blocks}.{number}", self._dtype)
            try:
                block.load_state_dict(weights, assign=True)
            except RuntimeError as error:
                raise ComputeError(f"block {number} of {checkpoint.folder} does not fit: {error}") from error
            self._blocks[number] = block.to(self._device).eval()

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> _BlocksSession:
        cache = SessionCache(
            first, last, self._n_kv_heads, self._head_size, max_tokens, self._dtype, self._device
        )
        self._cache_bytes += cache.n_bytes
        return _BlocksSession(first, last, cache, cache.n_bytes)

    def close_session(self, session: _BlocksSession) -> None:
        self._cache_bytes -= session.n_bytes
        session.cache = None

    async def step(
        self, session: _BlocksSession, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> bytes:
        return await self._run(self._step, session, n_tokens, payload)

    @torch.inference_mode()
    def _step(self, session: _BlocksSession, n_tokens: int, payload: bytes) -> bytes:
        if session.cache is None:
            raise ComputeError("the session was closed before its step began")
        model = self._model(session.first, session.last)
        states = from_bytes(payload, n_tokens, self._dtype).to(self._device)[None]
        output = model(inputs_embeds=states, past_key_values=session.cache, use_cache=True)
        return to_bytes(output.last_hidden_state[0])

    def _model(self, first: int, last: int) -> Any:
        key = (first, last)
        if key not in self._models:
            blocks = [self._blocks[n] for n in range(first, last)]
            self._models[key] = self._family.with_blocks(self._skeleton, self._config, blocks)
        return self._models[key]

    async def _run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._queue, function, *arguments)

    def memory(self) -> dict[str, float]:
        blocks = sum(p.nbytes for block in self._blocks.values() for p in block.parameters())
        return {"blocks_bytes": float(blocks), "cache_bytes": float(self._cache_bytes)}

    def close(self) -> None:
        self._queue.shutdown(cancel_futures=True)

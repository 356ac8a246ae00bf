"""The server's backend with real blocks: steps run in threads beside the event loop, loading in another."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from nodes.blocks import quantised
from nodes.blocks.cache import SessionCache, cache_bytes
from nodes.blocks.device import (
    available_bytes,
    from_bytes,
    is_out_of_memory,
    limit_memory,
    memory_in_use,
    open_device,
    to_bytes,
)
from nodes.blocks.family import cache_layout, family_of
from nodes.blocks.loading import empty_block, largest_matrix_bytes, load_block, planned_bytes, real_bytes
from nodes.blocks.memory import MemoryAccount
from nodes.blocks.spec import BlocksSpec
from nodes.blocks.weights import opened
from nodes.compute import Computed, ComputeError

_WORKSPACE_BYTES = 2 * 1024**3 / 14336
"""Per unit of the hidden size: what computing takes beside blocks and caches. PETALS sets as much aside."""


@dataclass(eq=False)
class _BlocksSession:
    """``cache`` and ``model`` go when the session is closed, but never under a step that runs."""

    first: int
    last: int
    max_tokens: int
    n_bytes: int
    cache: SessionCache | None
    model: Any
    closed_by: str = ""
    running: bool = False


class BlocksCompute:
    """Blocks of a model of transformers, on one device. Implements ``nodes.compute.Compute``.

    Raises ``ComputeError`` for a model, device, dtype or kind of weights that cannot be served.
    """

    def __init__(self, spec: BlocksSpec) -> None:
        self._spec = spec
        self._family, self._config = family_of(spec.source.config)
        self._device, self._dtype = open_device(spec.device, spec.dtype)
        quantised.check(spec.weights)
        self.token_bytes: int = self._config.hidden_size * self._dtype.itemsize
        self._block_config = self._family.shell(self._config).config
        self._layout = cache_layout(self._config)
        block = empty_block(self._family, self._block_config, 0)
        self.block_bytes = planned_bytes(block, self._dtype, spec.weights)
        self._account = MemoryAccount(spec.memory_bytes or float("inf"))
        if spec.memory_bytes:
            workspace_bytes = _WORKSPACE_BYTES * self._config.hidden_size
            if spec.weights != "plain":
                workspace_bytes += largest_matrix_bytes(block, self._dtype)
            limit_memory(self._device, spec.memory_bytes + workspace_bytes)
        self._blocks: dict[int, torch.nn.Module] = {}
        self._models: dict[tuple[int, int], Any] = {}
        self._sessions: set[_BlocksSession] = set()
        self._idle = threading.Condition()
        """Guards the above; notified when a step ends."""
        torch.set_num_threads(spec.n_threads)
        self._resident_before_bytes = memory_in_use(self._device).get("resident_bytes", 0.0)
        self._queue = ThreadPoolExecutor(spec.n_streams, "blocks", self._begin_thread)
        self._loader = ThreadPoolExecutor(1, "loading", self._begin_thread)

    def _begin_thread(self) -> None:
        torch.set_num_threads(self._spec.n_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            torch.cuda.set_stream(torch.cuda.Stream(self._device))

    async def host(self, first: int, last: int) -> None:
        """Blocks that stay keep serving meanwhile. What could be loaded before an error is dropped again."""
        n_blocks = self._config.num_hidden_layers
        if not 0 <= first <= last <= n_blocks:
            raise ComputeError(f"the model has blocks 0 to {n_blocks}, not {first} to {last}")
        await asyncio.get_running_loop().run_in_executor(self._loader, self._host, first, last)

    @torch.inference_mode()
    def _host(self, first: int, last: int) -> None:
        self._drop_outside(first, last)
        missing = [number for number in range(first, last) if number not in self._blocks]
        if not missing:
            return
        self._account.take_blocks(len(missing), self.block_bytes, available_bytes(self._device))
        loaded: dict[int, torch.nn.Module] = {}
        try:
            with opened(self._spec.source, self._family, self._config) as weights:
                for number in missing:
                    loaded[number] = load_block(
                        self._family,
                        self._block_config,
                        number,
                        weights,
                        self._dtype,
                        self._device,
                        self._spec.weights,
                    )
            if self._device.type == "cuda":  # the threads that compute have streams of their own
                torch.cuda.synchronize(self._device)
        except BaseException as error:
            n_loaded = len(loaded)
            loaded.clear()
            self._account.give_blocks(len(missing) * self.block_bytes)
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise ComputeError(
                    f"memory ran out while loading: {n_loaded} of {len(missing)} blocks fitted ({error})"
                ) from error
            raise
        planned_bytes_taken = len(missing) * self.block_bytes
        self._account.give_blocks(planned_bytes_taken - sum(map(real_bytes, loaded.values())))
        with self._idle:
            self._blocks.update(loaded)

    def _drop_outside(self, first: int, last: int) -> None:
        """Let other blocks go, once no step uses them, and end the sessions that are left on them."""
        with self._idle:
            numbers = [number for number in self._blocks if not first <= number < last]
            gone = {number: self._blocks.pop(number) for number in numbers}
            ended = [s for s in self._sessions if not first <= s.first < s.last <= last]
            for session in ended:
                self._end(session, "its blocks are no longer here")
            for key in [key for key in self._models if not gone.keys().isdisjoint(range(*key))]:
                del self._models[key]
            self._idle.wait_for(lambda: not any(session.running for session in ended))
            self._account.give_blocks(sum(map(real_bytes, gone.values())))
        if gone and self._device.type == "cuda":
            gone.clear()
            torch.cuda.empty_cache()

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> _BlocksSession:
        n_bytes = cache_bytes(last - first, self._layout, max_tokens, self._dtype)
        with self._idle:
            model = self._model(first, last)
            self._account.take_cache(n_bytes)
            try:
                cache = SessionCache(first, last, self._layout, max_tokens, self._dtype, self._device)
            except RuntimeError as error:
                self._account.give_cache(n_bytes)
                if is_out_of_memory(error):
                    raise ComputeError(f"no memory for a session's cache: {error}") from error
                raise
            session = _BlocksSession(first, last, max_tokens, n_bytes, cache, model)
            self._sessions.add(session)
        return session

    def grow(self, session: _BlocksSession, max_tokens: int) -> None:
        """While it is copied, the cache is there twice."""
        n_bytes = cache_bytes(session.last - session.first, self._layout, max_tokens, self._dtype)
        with self._idle:
            if session.closed_by:
                raise ComputeError(f"the session cannot go on: {session.closed_by}")
            assert session.cache is not None and not session.running, "only a session at rest grows"
            more_bytes = n_bytes - session.n_bytes
            self._account.take_cache(more_bytes)
            try:
                session.cache.grow(max_tokens)
            except RuntimeError as error:
                self._account.give_cache(more_bytes)
                if is_out_of_memory(error):
                    raise ComputeError(f"no memory for a session's cache: {error}") from error
                raise
            session.n_bytes, session.max_tokens = n_bytes, max_tokens
            if self._device.type == "cuda":  # what the threads that compute will read
                torch.cuda.current_stream(self._device).synchronize()

    def _model(self, first: int, last: int) -> Any:
        key = (first, last)
        if key not in self._models:
            missing = [number for number in range(first, last) if number not in self._blocks]
            if missing:
                raise ComputeError(f"block {missing[0]} is not here")
            blocks = [self._blocks[number] for number in range(first, last)]
            self._models[key] = self._family.with_blocks(self._config, blocks).to(self._device)
            if self._device.type == "cuda":  # what the threads that compute will read
                torch.cuda.current_stream(self._device).synchronize()
        return self._models[key]

    def close_session(self, session: _BlocksSession) -> None:
        with self._idle:
            self._end(session, "it was closed")

    def _end(self, session: _BlocksSession, reason: str) -> None:
        """Free what the session holds; a running step does it at its end."""
        session.closed_by = session.closed_by or reason
        if not session.running and session in self._sessions:
            session.cache = session.model = None
            self._account.give_cache(session.n_bytes)
            self._sessions.remove(session)

    async def step(
        self, session: _BlocksSession, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        loop = asyncio.get_running_loop()
        return Computed(
            await loop.run_in_executor(self._queue, self._step, session, position, n_tokens, payload)
        )

    def _step(self, session: _BlocksSession, position: int, n_tokens: int, payload: bytes) -> bytes:
        with self._idle:
            if session.closed_by:
                raise ComputeError(f"the session cannot go on: {session.closed_by}")
            assert session.cache is not None, "an open session has a cache"
            assert not session.running, "a session computes one step at a time"
            cached = session.cache.get_seq_length()
            if position != cached or position + n_tokens > session.max_tokens:
                raise ComputeError(
                    f"{n_tokens} tokens at {position} do not follow the session's {cached} of "
                    f"{session.max_tokens}"
                )
            session.running = True
        failure = "an earlier step failed"
        try:
            answer = self._compute(session, n_tokens, payload)
            failure = ""
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ComputeError(f"memory ran out while computing {n_tokens} tokens: {error}") from error
        finally:
            self._finish(session, failure)
        return answer

    @torch.inference_mode()
    def _compute(self, session: _BlocksSession, n_tokens: int, payload: bytes) -> bytes:
        states = from_bytes(payload, n_tokens, self._dtype, self._device)[None]
        output = session.model(inputs_embeds=states, past_key_values=session.cache, use_cache=True)
        return to_bytes(output.last_hidden_state[0])

    def _finish(self, session: _BlocksSession, failure: str) -> None:
        if failure and self._device.type == "cuda":  # what was launched may still use the cache
            torch.cuda.current_stream(self._device).synchronize()
            torch.cuda.empty_cache()
        with self._idle:
            session.running = False
            if failure or session.closed_by:
                self._end(session, failure)
            self._idle.notify_all()

    def memory(self) -> dict[str, float]:
        """What the tensors that are there hold, not what was set aside for them, and what this process has.

        ``limit_bytes`` only where there is a limit; ``grown_bytes``: how much more is resident than before the first
        block; for the rest see ``nodes.blocks.device``.
        """
        with self._idle:
            blocks_bytes = sum(map(real_bytes, self._blocks.values()))
            caches = [session.cache for session in self._sessions if session.cache is not None]
        answer = {
            "blocks_bytes": float(blocks_bytes),
            "cache_bytes": float(sum(cache.held_bytes for cache in caches)),
        }
        if self._spec.memory_bytes:
            answer["limit_bytes"] = float(self._account.limit_bytes)
        in_use = memory_in_use(self._device)
        if "resident_bytes" in in_use:
            answer["grown_bytes"] = in_use["resident_bytes"] - self._resident_before_bytes
        return answer | in_use

    def close(self) -> None:
        """Let everything go, but under a step that still runs: nobody waits for it."""
        self._queue.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=False, cancel_futures=True)
        with self._idle:
            for session in list(self._sessions):
                self._end(session, "the server has ended")
            self._models.clear()
            self._blocks.clear()

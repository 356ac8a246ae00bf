"""Decode steps as CUDA graphs: their kernel launches are recorded once and then replayed.

A replayed graph uses tensors at fixed addresses. So a step attends to all the room of its session's cache,
and a mask excludes positions without a token. Blocks are computed as for several sessions (``ragged``), with
only one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nodes.blocks.cache import SessionCache
from nodes.blocks.ragged import Part, Ragged

log = logging.getLogger(__name__)

_ONE_AT_A_TIME = threading.Lock()
"""Held while a graph is recorded or dropped: torch allows one recording per process, whichever server it is of."""


class Apart:
    """Keeps recordings apart from other work that allocates on the device, as each would break the other.

    Any number of threads may allocate at once. They wait while a recording is made; none is begun while they
    allocate.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._n_allocating = 0
        self._is_recording = False

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_recording)
            self._n_allocating += 1
        try:
            yield
        finally:
            with self._changed:
                self._n_allocating -= 1

    @contextlib.contextmanager
    def recording(self) -> Iterator[bool]:
        """Yields whether a recording may be made now; does not wait for it."""
        with self._changed:
            may_record = not self._n_allocating and not self._is_recording
            self._is_recording |= may_record
        try:
            yield may_record
        finally:
            if may_record:
                with self._changed:
                    self._is_recording = False
                    self._changed.notify_all()


class Pool:
    """The device memory that all graphs of a server share.

    torch forgets a pool's handle with its last graph and then refuses it, so an almost empty graph is kept
    with the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: torch.cuda.CUDAGraph | None = None
        self._handle: Any = None
        self.is_refused = False
        """Whether a recording failed.

        Then no other is tried: torch may not free all memory of a failed one.
        """
        self.n_recorded = 0
        """The number of sessions whose steps have been recorded."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        """Records ``work``.

        Returns its graph and the tensor that holds the result of each replay; ``None`` on failure.
        """
        try:
            with _ONE_AT_A_TIME:
                recorded = self._capture_if_there_is_memory(work)
                if recorded is None:
                    torch.cuda.empty_cache()  # while it records, the allocator gives up nothing that it only keeps
                    recorded = self._capture_in_pool(work)
        except RuntimeError as error:
            self.is_refused = True
            log.warning(
                "steps are not recorded as CUDA graphs from here on; if memory runs out later, restart this server: %s",
                error,
            )
            return None
        self.n_recorded += 1
        return recorded

    def _capture_if_there_is_memory(
        self, work: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor] | None:
        try:
            return self._capture_in_pool(work)
        except torch.OutOfMemoryError:
            return None  # the error goes, and with it the tensors of the recording that failed

    def _capture_in_pool(self, work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        if self._kept is None:
            torch.zeros(1, device=self._device)  # a kernel's first use may load it, which no recording allows
            self._handle = torch.cuda.graph_pool_handle()
            self._kept, _ = self._capture(lambda: torch.zeros(1, device=self._device))
        return self._capture(work)

    def _capture(self, work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        # cuBLAS keeps a workspace per stream, whose address a graph records, and torch frees it with any graph of the
        # stream. A workspace that is made anew while recording lies in the pool, which stays.
        torch._C._cuda_clearCublasWorkspaces()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._handle, capture_error_mode="thread_local")
        try:
            answer = work()
        finally:
            graph.capture_end()
        return graph, answer


class _FixedCache:
    """A session's cache for graphs: writes at ``position``, a tensor, and returns all its room."""

    def __init__(self, cache: SessionCache, position: torch.Tensor) -> None:
        self._cache, self._position = cache, position

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self._cache.of_block(number)
        layer.keys.index_copy_(2, self._position, keys)
        layer.values.index_copy_(2, self._position, values)
        return layer.keys, layer.values


class Decoder:
    """One session's steps of one token.

    On a GPU, the second step is recorded and then replayed for all later ones.

    On a CPU, steps are computed as they would be recorded. Valid as long as ``fits`` returns True.
    """

    def __init__(
        self,
        ragged: Ragged,
        cache: SessionCache,
        first: int,
        blocks: Sequence[torch.nn.Module],
        states: torch.Tensor,
        apart: Apart,
        pool: Pool | None,
    ) -> None:
        """``states`` is an example of a step's hidden states. Without a ``pool`` nothing is recorded."""
        self._ragged, self._cache = ragged, cache
        self._apart, self._pool = apart, pool
        self._store = cache.store
        self._states = torch.empty_like(states)
        self._position = torch.zeros(1, dtype=torch.int64, device=states.device)
        self._part = Part(self._states, _FixedCache(cache, self._position), first, blocks)
        self._places = torch.arange(cache.room, device=states.device)
        self._table = ragged.table(self._places, states)
        self._unseen = torch.tensor(torch.finfo(states.dtype).min, dtype=states.dtype, device=states.device)
        cache.clear_room()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output = self._states
        self._is_warm = False

    def fits(self, cache: SessionCache) -> bool:
        """Returns whether ``cache`` is still at the same address: False after it has grown."""
        return cache.store is self._store

    def drop(self) -> None:
        """Gives the recording up, if there is one. No step may run or follow."""
        if self._graph is not None:
            with _ONE_AT_A_TIME:
                self._graph = None

    def step(self, states: torch.Tensor) -> torch.Tensor:
        """Returns hidden states ``[1, 1, hidden size]`` after the blocks.

        They are valid until the next step on this device, of any session.
        """
        self._states.copy_(states)
        self._position.fill_(self._cache.get_seq_length())
        if self._graph is None and self._is_warm and self._pool is not None and not self._pool.is_refused:
            with self._apart.recording() as may_record:
                if may_record and (recorded := self._pool.record(self._forward)) is not None:
                    self._graph, self._output = recorded
        if self._graph is None:
            self._output = self._forward()
            self._is_warm = True  # the first step cannot be recorded: libraries initialise themselves in it
        else:
            self._graph.replay()
        self._cache.set_length(self._cache.get_seq_length() + 1)
        return self._output

    def _forward(self) -> torch.Tensor:
        given = self._table.wherever(self._position)
        self._part.given = {
            kind: {**given[kind], "attention_mask": self._mask(window)}
            for kind, window in self._ragged.windows.items()
        }
        (answer,) = self._ragged.through([self._part])
        return answer

    def _mask(self, window: int | None) -> torch.Tensor:
        is_there = self._places <= self._position
        if window is not None:
            is_there &= self._places > self._position - window
        return torch.where(is_there, torch.zeros_like(self._unseen), self._unseen)[None, None, None]

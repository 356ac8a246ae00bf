"""The server's backend with real blocks. Steps, loading and opening run in threads beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from nodes.batching import Batches, Step, Work
from nodes.blocks import quantised
from nodes.blocks.cache import SessionCache, cache_bytes
from nodes.blocks.device import (
    available_bytes,
    explaining_out_of_memory,
    from_bytes,
    is_out_of_memory,
    limit_memory,
    memory_in_use,
    open_device,
    to_bytes,
    to_payloads,
)
from nodes.blocks.family import cache_layout, family_of, kinds_of, run_with
from nodes.blocks.files import check_quantised
from nodes.blocks.graphs import Apart, Decoder, Pool
from nodes.blocks.loading import (
    empty_block,
    largest_matrix_bytes,
    load_block,
    planned_bytes,
    real_bytes,
)
from nodes.blocks.memory import MemoryAccount, prefill_bytes, step_bytes, workspace_bytes
from nodes.blocks.ragged import Part, Ragged
from nodes.blocks.spec import BlocksSpec
from nodes.blocks.weights import opened
from nodes.clock import Clock, ScaledClock
from nodes.compute import Batcher, Computed, ComputeError
from policies.problem import wire_bytes

log = logging.getLogger(__name__)

_NO_CACHE = "no memory for a session's cache"


class _GivenUp(Exception):
    """Nobody waits for the step any more."""


@dataclass(eq=False)
class _BlocksSession:
    """A session.

    ``cache``, ``model`` and ``decoder`` are released when it is closed, or when its running step ends.
    """

    first: int
    last: int
    max_tokens: int
    n_bytes: int
    cache: SessionCache | None
    model: Any
    closed_by: str = ""
    running: bool = False
    wanted_tokens: int = 0
    """If this is more than ``max_tokens``, the cache grows when the session's next step begins."""
    pages: Sequence[torch.Tensor] = ()
    """Kept pages with which the cache begins; its first step copies them."""
    kept_bytes: int = 0
    """Those of its pages that are kept."""
    decoder: Decoder | None = None
    opening: Future[None] = field(default_factory=Future)
    """Done once the session has ``cache`` and ``model``; until then the session counts as running."""


@dataclass(eq=False)
class _Job:
    """A step of ``session`` that is computed in batches: its inputs, and the results so far."""

    session: _BlocksSession
    payload: bytes
    answers: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Portion:
    """The part of a step that one batch computes: ``n_tokens`` at ``position``."""

    step: Step
    job: _Job
    position: int
    n_tokens: int
    payload: bytes


class BlocksCompute:
    """Blocks of a model of transformers, on one device. Implements ``nodes.compute.Compute``.

    ``clock`` is the clock of the steps' arrivals. Raises ``ComputeError`` for a model, device, dtype or kind
    of weights that is not supported.
    """

    def __init__(self, spec: BlocksSpec, clock: Clock | None = None) -> None:
        self._spec = spec
        self._family, self._config = family_of(spec.source.config)
        self._device, self._dtype = open_device(spec.device, spec.dtype)
        quantised.check(spec.weights)
        self.token_bytes: int = wire_bytes(self._config.hidden_size, self._dtype.itemsize, spec.wire)
        self._block_config = self._family.block_config(self._config)
        self._layout = cache_layout(self._config)
        block = empty_block(self._family, self._block_config, 0)
        self.block_bytes = planned_bytes(block, self._dtype, spec.weights)
        """The bytes of the first block; in mixtures of experts others may differ."""
        check_quantised(spec.source.config, spec.weights, has_graphs=spec.has_graphs)
        self._account = MemoryAccount(spec.memory_bytes or float("inf"))
        if spec.memory_bytes:
            matrix_bytes = 0 if spec.weights == "plain" else largest_matrix_bytes(block, self._dtype)
            beside_bytes = workspace_bytes(self._config.hidden_size, matrix_bytes, spec.n_streams)
            limit_memory(self._device, spec.memory_bytes + beside_bytes)
        self._blocks: dict[int, torch.nn.Module] = {}
        self._models: dict[tuple[int, int], Any] = {}
        self._sessions: set[_BlocksSession] = set()
        self._idle = threading.Condition()
        """Guards blocks, models and sessions; notified when a step ends."""
        torch.set_num_threads(spec.n_threads)
        self._prefill_bytes = (
            prefill_bytes(self._config.hidden_size, spec.n_streams)
            if self._device.type == "cuda"
            else float("inf")
        )
        """A step that needs more memory than this is computed in chunks."""
        self._resident_before_bytes = memory_in_use(self._device).get("resident_bytes", 0.0)
        self._queue = ThreadPoolExecutor(spec.n_streams, "blocks", self._begin_thread)
        self._current = threading.local()
        """In a thread that computes a step, whether that was given up (``threading.Event``)."""
        self._clock = clock or ScaledClock()
        self.factor = 1.0
        self._is_closed = threading.Event()
        self._jobs: dict[Step, _Job] = {}
        """The jobs of steps that are computed in batches."""
        self._batcher = None
        assert spec.n_streams == 1 or not (spec.is_batched or spec.has_graphs), (
            "batches, and graphs that share their memory, run one after another"
        )
        self._ragged = Ragged(self._family, self._config, self._device, self._check_given_up)
        if spec.is_batched:
            self._batcher = Batcher(Batches(None, spec.chunk_tokens), self._pass)
        self._apart = Apart()
        self._graphs_pool = Pool(self._device) if spec.has_graphs and self._device.type == "cuda" else None
        """One pool for all graphs: a step's result has left the device before the next step."""
        self._loader = ThreadPoolExecutor(1, "loading", self._begin_thread, (False,))
        self._opener = ThreadPoolExecutor(1, "opening", self._begin_thread, (False,))
        """Loading and opening use the device's default stream: bitsandbytes quantises there in any thread."""

    def _begin_thread(self, has_stream: bool = True) -> None:
        torch.set_num_threads(self._spec.n_threads)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            if has_stream:
                torch.cuda.set_stream(torch.cuda.Stream(self._device))

    async def host(self, first: int, last: int) -> None:
        """As ``Compute.host``. Kept blocks serve meanwhile.

        On an error, blocks loaded before it are dropped again.
        """
        n_blocks = self._config.num_hidden_layers
        if not 0 <= first <= last <= n_blocks:
            raise ComputeError(f"the model has blocks 0 to {n_blocks}, not {first} to {last}")
        await asyncio.get_running_loop().run_in_executor(self._loader, self._host, first, last)

    @torch.inference_mode()
    def _host(self, first: int, last: int) -> None:
        self._drop_outside(first, last)
        with self._apart.allocating():
            self._load(first, last)

    def _load(self, first: int, last: int) -> None:
        missing = [number for number in range(first, last) if number not in self._blocks]
        if not missing:
            return
        planned_total_bytes = sum(map(self._planned_bytes, missing))
        mean_bytes = -(-planned_total_bytes // len(missing))
        self._account.take_blocks(len(missing), mean_bytes, available_bytes(self._device))
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
            self._account.give_blocks(len(missing) * mean_bytes)
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise ComputeError(
                    f"memory ran out while loading: {n_loaded} of {len(missing)} blocks fitted ({error})"
                ) from error
            raise
        finally:
            if self._device.type == "cuda":  # each stream has its own pool: steps could not use this one's
                torch.cuda.empty_cache()
        self._account.give_blocks(len(missing) * mean_bytes - sum(map(real_bytes, loaded.values())))
        for block in loaded.values():
            block.register_forward_pre_hook(self._check_given_up)
        with self._idle:
            self._blocks.update(loaded)

    def _planned_bytes(self, number: int) -> int:
        block = empty_block(self._family, self._block_config, number)
        return planned_bytes(block, self._dtype, self._spec.weights)

    def _drop_outside(self, first: int, last: int) -> None:
        """Drops other blocks and ends the sessions on them; waits for steps that still use them."""
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
            with self._apart.allocating():
                torch.cuda.empty_cache()

    def new_session(self, client: str, first: int, last: int, max_tokens: int) -> _BlocksSession:
        """Reserves a session's memory; the device allocates it in a thread. Raises ``ComputeError``."""
        n_bytes = cache_bytes(last - first, self._layout, max_tokens, self._dtype)
        with self._idle:
            missing = [number for number in range(first, last) if number not in self._blocks]
            if missing:
                raise ComputeError(f"block {missing[0]} is not here")
            blocks = [self._blocks[number] for number in range(first, last)]
            self._account.take_cache(n_bytes)
            session = _BlocksSession(first, last, max_tokens, n_bytes, None, None, running=True)
            self._sessions.add(session)
            session.opening = self._opener.submit(self._open, session, blocks)
        return session

    def opening(self, session: _BlocksSession) -> Awaitable[None] | None:
        opening = session.opening
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            return None
        return asyncio.shield(asyncio.wrap_future(opening))  # cancelling one wait must not end the others

    def _open(self, session: _BlocksSession, blocks: Sequence[torch.nn.Module]) -> None:
        """Makes the session's model and cache.

        If the session was closed meanwhile, they are released again.
        """
        failure = "it could not be opened"
        try:
            with self._apart.allocating(), explaining_out_of_memory(_NO_CACHE):
                session.model = self._model(session.first, session.last, blocks)
                session.cache = SessionCache(
                    session.first, session.last, self._layout, session.max_tokens, self._dtype, self._device
                )
                if self._device.type == "cuda":
                    # The cache may lie where a temporary of the loader was, which this stream still uses. The threads
                    # that compute have streams of their own, which would not wait for that.
                    torch.cuda.current_stream(self._device).synchronize()
            failure = ""
        finally:
            self._finish(session, failure)

    def grow(self, session: _BlocksSession, max_tokens: int) -> None:
        """Reserves memory for a larger cache, which the session's next step allocates in its thread.

        If the memory is not free but closed sessions still compute, it is reserved only when that step
        begins: by then they have released theirs. While the cache is copied, it is in memory twice.
        """
        with self._idle:
            if session.closed_by:
                raise ComputeError(f"the session cannot go on: {session.closed_by}")
            assert not (session.opening.done() and session.running), "only a session at rest grows"
            try:
                self._set_aside(session, max_tokens)
            except ComputeError:
                is_ending = any(other.closed_by and other.running for other in self._sessions)
                if not is_ending or self._spec.n_streams > 1:
                    raise
            session.wanted_tokens = max_tokens

    def _set_aside(self, session: _BlocksSession, max_tokens: int) -> None:
        n_bytes = cache_bytes(session.last - session.first, self._layout, max_tokens, self._dtype)
        self._account.take_cache(n_bytes - session.n_bytes)
        session.n_bytes = n_bytes

    def _model(self, first: int, last: int, blocks: Sequence[torch.nn.Module]) -> Any:
        """Returns a model of ``blocks``, kept for later sessions as long as the server has these blocks."""
        key = (first, last)
        with self._idle:
            model = self._models.get(key)
        if model is None:
            kinds = kinds_of(self._config)[first:last]
            model = self._family.with_blocks(self._config, blocks, kinds).to(self._device)
            if self._device.type == "cuda":  # other threads will read the model in their own streams
                torch.cuda.current_stream(self._device).synchronize()
            with self._idle:
                if all(self._blocks.get(n) is block for n, block in zip(range(*key), blocks, strict=True)):
                    self._models[key] = model
        return model

    @torch.inference_mode()
    def kept(self, session: _BlocksSession, tokens: range) -> torch.Tensor:
        assert session.cache is not None, "an open session"
        page = session.cache.page(tokens)
        session.kept_bytes += page.nbytes
        return page

    def evicted(self, page: torch.Tensor) -> None:
        self._account.give_cache(page.nbytes)

    def reuse(self, session: _BlocksSession, pages: Sequence[torch.Tensor]) -> None:
        session.pages = tuple(pages)

    @torch.inference_mode()
    def fill(self, session: _BlocksSession, n_tokens: int) -> None:
        """Gives an open session without tokens so many, with random keys and values: to time what follows them."""
        assert session.cache is not None, "an open session"
        session.cache.store.normal_()
        if self._device.type == "cuda":  # steps are in another stream, which does not wait for this one
            torch.cuda.current_stream(self._device).synchronize()
        session.cache.set_length(n_tokens)

    def close_session(self, session: _BlocksSession) -> None:
        with self._idle:
            self._end(session, "it was closed")

    def _end(self, session: _BlocksSession, reason: str) -> None:
        """Ends a session and frees its memory; if its opening or a step is running, only at the end of that."""
        session.closed_by = session.closed_by or reason
        if not session.running and session in self._sessions:
            if session.decoder is not None:
                session.decoder.drop()
            session.cache = session.model = session.decoder = None
            self._account.give_cache(session.n_bytes - session.kept_bytes)
            self._sessions.remove(session)

    async def step(
        self, session: _BlocksSession, position: int, n_tokens: int, payload: bytes, arrived_at_s: float
    ) -> Computed:
        if (opening := self.opening(session)) is not None:
            await opening
        if self._batcher is None:
            loop, is_given_up = asyncio.get_running_loop(), threading.Event()
            what = session, position, n_tokens, payload, is_given_up
            try:
                return Computed(await loop.run_in_executor(self._queue, self._step, *what))
            except asyncio.CancelledError:
                is_given_up.set()
                raise
        step = Step(arrived_at_s, position, n_tokens, range(session.first, session.last))
        job = self._jobs[step] = _Job(session, payload)
        try:
            batch = await self._batcher.run(step)
        finally:
            del self._jobs[step]
        return Computed(b"".join(job.answers), batch.together)

    def _step(
        self,
        session: _BlocksSession,
        position: int,
        n_tokens: int,
        payload: bytes,
        is_given_up: threading.Event,
    ) -> bytes:
        """Computes a step; one that is given up ends before its next block."""
        self._begin(session, position, n_tokens)
        failure, self._current.is_given_up = "an earlier step failed", is_given_up
        try:
            text = f"memory ran out while computing {n_tokens} tokens"
            with explaining_out_of_memory(text), self._slowly(is_given_up):
                answer = self._compute(session, n_tokens, payload)
            failure = ""
        except _GivenUp:
            failure = ""
            raise
        finally:
            self._current.is_given_up = None
            self._finish(session, failure)
        return answer

    @contextlib.contextmanager
    def _slowly(self, is_over: threading.Event) -> Iterator[None]:
        """Keeps this thread for ``factor`` times as long as the body takes, but not longer than until ``is_over``."""
        factor, began_at = self.factor, time.monotonic()
        yield
        is_over.wait((factor - 1.0) * (time.monotonic() - began_at))

    def _check_given_up(self, *_: Any) -> None:
        is_given_up = getattr(self._current, "is_given_up", None)
        if is_given_up is not None and is_given_up.is_set():
            raise _GivenUp

    def _begin(self, session: _BlocksSession, position: int, n_tokens: int) -> None:
        """Begins a step, and grows the session's cache if necessary.

        Until ``_finish`` the session keeps its memory, even if it is closed. A step in place of one that is still computed
        waits for its end. Raises ``ComputeError`` if the session is closed, if the step begins after its end, or without
        memory. One that begins before makes the rest of the cache void.
        """
        with self._idle:
            self._idle.wait_for(lambda: not session.running)
            if session.closed_by:
                raise ComputeError(f"the session cannot go on: {session.closed_by}")
            assert session.cache is not None, "an open session has a cache"
            room = max(session.wanted_tokens, session.max_tokens)
            if room > session.max_tokens:
                self._set_aside(session, room)
            if session.pages:
                session.cache.begin_with(session.pages)
                session.pages = ()
            cached = session.cache.get_seq_length()
            if position > cached or position + n_tokens > room:
                raise ComputeError(
                    f"{n_tokens} tokens at {position} do not follow the session's {cached} of {room}"
                )
            session.running = True
        if position < cached:
            session.cache.set_length(position)
        if room > session.max_tokens:
            try:
                with explaining_out_of_memory(_NO_CACHE):
                    session.cache.grow(room)
            except BaseException:
                self._finish(session, "its cache could not grow")
                raise
            session.max_tokens = room

    @torch.inference_mode()
    def _compute(self, session: _BlocksSession, n_tokens: int, payload: bytes) -> bytes:
        states = from_bytes([payload], n_tokens, self._dtype, self._device, self._spec.wire)[None]
        assert session.cache is not None, "kept while it runs"
        if n_tokens == 1 and session.cache.get_seq_length():
            compute = self._decode if self._spec.has_graphs else self._next
            return to_bytes(compute(session, states)[0], self._spec.wire)
        chunk_tokens = self._chunk_tokens(session.cache.get_seq_length() + n_tokens)
        outputs = [
            run_with(session.cache, session.model, inputs_embeds=chunk).last_hidden_state
            for chunk in states.split(min(n_tokens, chunk_tokens), dim=1)
        ]
        return to_bytes(torch.cat(outputs, dim=1)[0], self._spec.wire)

    def _next(self, session: _BlocksSession, states: torch.Tensor) -> torch.Tensor:
        """Returns the hidden states ``[1, 1, hidden size]`` after the blocks for the session's next token.

        The family's own model would make a mask and positions anew in each step, which takes longer than some blocks.
        """
        assert session.cache is not None
        blocks = getattr(session.model, self._family.blocks)
        return self._ragged.forward([Part(states, session.cache, session.first, blocks)])[0]

    def _decode(self, session: _BlocksSession, states: torch.Tensor) -> torch.Tensor:
        """As ``_next``, by a recorded graph."""
        assert session.cache is not None
        if session.decoder is None or not session.decoder.fits(session.cache):
            if session.decoder is not None:
                session.decoder.drop()
            blocks = getattr(session.model, self._family.blocks)
            session.decoder = Decoder(
                self._ragged,
                session.cache,
                session.first,
                blocks,
                states,
                self._apart,
                self._graphs_pool,
            )
        return session.decoder.step(states)

    def _chunk_tokens(self, context: int) -> int:
        """Returns how many tokens of a step to compute at once. After the step, ``context`` are cached."""
        config = self._config
        feed_forward = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        token_bytes = step_bytes(
            config.num_attention_heads, config.hidden_size, feed_forward, context, self._dtype.itemsize
        )
        return int(max(1, min(context, self._prefill_bytes // token_bytes)))

    async def _pass(self, work: Work) -> float:
        portions = [
            _Portion(s, job := self._jobs[s], s.position, s.n_tokens, job.payload) for s in work.decodes
        ]
        if work.prompt is not None:
            job, start = self._jobs[work.prompt], work.chunk.start - work.prompt.position
            n_bytes = self.token_bytes
            payload = job.payload[start * n_bytes : (start + len(work.chunk)) * n_bytes]
            portions.append(_Portion(work.prompt, job, work.chunk.start, len(work.chunk), payload))
        loop = asyncio.get_running_loop()
        answers: Sequence[tuple[_Portion, bytes | Exception]]
        try:
            answers = await loop.run_in_executor(self._queue, self._batch, portions)
        except Exception as error:  # not of one session, but for example of the device
            answers = [(portion, error) for portion in portions]
        for portion, answer in answers:
            if isinstance(answer, bytes):
                portion.job.answers.append(answer)
            else:
                assert self._batcher is not None
                self._batcher.fail(portion.step, answer)
        return self._clock.now_s()

    def _batch(self, portions: Sequence[_Portion]) -> list[tuple[_Portion, bytes | Exception]]:
        """Computes ``portions`` in one forward; returns each with its result or its error.

        If the forward fails, every portion is computed on its own, so that only those with an error fail.
        """
        with self._slowly(self._is_closed):
            return self._computed(portions)

    def _computed(self, portions: Sequence[_Portion]) -> list[tuple[_Portion, bytes | Exception]]:
        answers: dict[_Portion, bytes | Exception] = {}
        begun = []
        for portion in portions:
            try:
                self._begin(portion.job.session, portion.position, portion.n_tokens)
                begun.append(portion)
            except Exception as error:
                answers[portion] = error
        together = [p for p in begun if p.n_tokens <= self._chunk_tokens(p.position + p.n_tokens)]
        if len(together) > 1:
            try:
                answers |= zip(together, self._compute_together(together), strict=True)
            except Exception as error:
                log.warning(
                    "computing %d sessions one by one, because together they failed: %s", len(together), error
                )
                for portion in together:
                    assert portion.job.session.cache is not None
                    portion.job.session.cache.set_length(portion.position)
        for portion in begun:
            if portion not in answers:
                answers[portion] = self._alone(portion)
            answer = answers[portion]
            failure = "" if isinstance(answer, bytes) else "an earlier step failed"
            self._finish(portion.job.session, failure)
        return list(answers.items())

    def _alone(self, portion: _Portion) -> bytes | Exception:
        try:
            return self._compute(portion.job.session, portion.n_tokens, portion.payload)
        except Exception as error:
            if not (isinstance(error, RuntimeError) and is_out_of_memory(error)):
                return error
            failed = ComputeError(f"memory ran out while computing {portion.n_tokens} tokens: {error}")
            failed.__cause__ = error
            return failed

    @torch.inference_mode()
    def _compute_together(self, portions: Sequence[_Portion]) -> list[bytes]:
        sizes = [portion.n_tokens for portion in portions]
        payloads = [portion.payload for portion in portions]
        states = from_bytes(payloads, sum(sizes), self._dtype, self._device, self._spec.wire)[None]
        parts = []
        for portion, own in zip(portions, states.split(sizes, dim=1), strict=True):
            session = portion.job.session
            assert session.cache is not None, "kept while it runs"
            blocks = getattr(session.model, self._family.blocks)
            parts.append(Part(own, session.cache, session.first, blocks))
        return to_payloads(torch.cat(self._ragged.forward(parts), dim=1)[0], sizes, self._spec.wire)

    def _finish(self, session: _BlocksSession, failure: str) -> None:
        try:
            if failure and self._device.type == "cuda":  # launched kernels may still use the cache
                torch.cuda.current_stream(self._device).synchronize()
                with self._apart.allocating():
                    torch.cuda.empty_cache()
        finally:  # after some errors the device refuses everything, and nobody must wait for this session
            with self._idle:
                session.running = False
                if failure or session.closed_by:
                    self._end(session, failure)
                self._idle.notify_all()

    @property
    def n_recorded(self) -> int:
        """The number of sessions whose steps have been recorded as CUDA graphs so far."""
        return self._graphs_pool.n_recorded if self._graphs_pool is not None else 0

    def memory(self) -> dict[str, float]:
        """Returns the bytes that blocks and caches really take, and those that this process uses.

        ``limit_bytes`` is there only if there is a limit, ``n_recorded`` only with CUDA graphs. ``grown_bytes`` is how much the resident set has
        grown since before the first block. For the rest see ``nodes.blocks.device.memory_in_use``.
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
        if self._spec.has_graphs:
            answer["n_recorded"] = float(self.n_recorded)
        in_use = memory_in_use(self._device)
        if "resident_bytes" in in_use:
            answer["grown_bytes"] = in_use["resident_bytes"] - self._resident_before_bytes
        return answer | in_use

    def close(self) -> None:
        """Releases everything. A step that still runs keeps its memory until its end; nobody waits for it."""
        self._is_closed.set()
        if self._batcher is not None:
            self._batcher.close()
        self._queue.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._opener.shutdown(wait=False, cancel_futures=True)
        with self._idle:
            for session in list(self._sessions):
                self._end(session, "the server has ended")
            self._models.clear()
            self._blocks.clear()

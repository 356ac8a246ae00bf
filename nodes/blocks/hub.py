"""The client's part of a real model: embeddings, final norm, head, and the choice of the next token."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nodes.blocks.checkpoint import Checkpoint
from nodes.blocks.family import DTYPES, family_of
from nodes.blocks.spec import HubSpec, Sampling
from nodes.blocks.tensors import from_bytes, to_bytes
from nodes.request import Request


def prompt_of(request: Request, vocabulary: int) -> list[int]:
    """The request's input tokens; made-up ones are drawn from the request's own stream."""
    if request.prompt:
        return list(request.prompt)
    chance = random.Random(f"prompt:{request.index}")
    return [chance.randrange(vocabulary) for _ in range(request.n_input_tokens)]


def processors(sampling: Sampling) -> LogitsProcessorList:
    """The processors that ``generate`` of transformers would use, in its order."""
    chain = LogitsProcessorList()
    if sampling.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    return chain


class BlocksHub:
    """Implements ``nodes.hub.HubModel`` for a model of transformers."""

    def __init__(self, spec: HubSpec) -> None:
        self.spec = spec
        family, config = family_of(spec.source.config)
        self.config = config
        self.dtype = DTYPES[spec.dtype]
        self.token_bytes: int = config.hidden_size * self.dtype.itemsize
        torch.set_num_threads(spec.n_threads)
        self._queue = ThreadPoolExecutor(1, "hub")
        self._device = torch.device(spec.device)
        assert spec.source.folder is not None
        checkpoint = Checkpoint(Path(spec.source.folder), family)
        full = family.config_class.from_dict({**config.to_dict(), "num_hidden_layers": 0})
        with torch.device("meta"):
            model = family.model_class(full)
        parts = [family.embeddings, family.embeddings_norm, family.final_norm]
        for name in filter(None, parts):
            part = getattr(model, name)
            part.load_state_dict(checkpoint.part(name, self.dtype), assign=True)
            part.to(self._device).eval()
        embeddings = getattr(model, family.embeddings)
        norm = getattr(model, family.embeddings_norm) if family.embeddings_norm else torch.nn.Identity()
        self._embeddings = torch.nn.Sequential(embeddings, norm)
        self._final_norm = getattr(model, family.final_norm)
        if checkpoint.has("lm_head.weight"):
            self._head = checkpoint.tensor("lm_head.weight", self.dtype).to(self._device)
        else:
            self._head = embeddings.weight

    def sequence(self, request: Request) -> _Sequence:
        return _Sequence(self, prompt_of(request, self.config.vocab_size))

    def remember(self, payload: bytes) -> bytes:
        return payload

    def recall(self, memory: bytes) -> bytes:
        return memory

    @torch.inference_mode()
    def embed(self, tokens: list[int]) -> bytes:
        """Hidden states that enter block 0."""
        return to_bytes(self._embeddings(torch.tensor(tokens, device=self._device)))

    @torch.inference_mode()
    def logits(self, payload: bytes) -> torch.Tensor:
        """Logits ``[1, vocabulary]`` after the last of the hidden states that left the last block."""
        n_tokens = len(payload) // self.token_bytes
        last = from_bytes(payload, n_tokens, self.dtype)[-1:].to(self._device)
        return torch.nn.functional.linear(self._final_norm(last), self._head).float()

    async def run(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._queue, function, *arguments)

    def close(self) -> None:
        self._queue.shutdown(cancel_futures=True)


class _Sequence:
    def __init__(self, hub: BlocksHub, prompt: list[int]) -> None:
        self.ended = False
        self._hub = hub
        self._tokens = prompt
        self._n_sent = 0
        sampling = hub.spec.sampling
        self._processors = processors(sampling) if sampling else None
        self._generator = torch.Generator(hub.spec.device).manual_seed(sampling.seed) if sampling else None
        ends = hub.config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])

    async def embed(self) -> bytes:
        tokens, self._n_sent = self._tokens[self._n_sent :], len(self._tokens)
        answer: bytes = await self._hub.run(self._hub.embed, tokens)
        return answer

    async def take(self, payload: bytes) -> int:
        token: int = await self._hub.run(self._choose, payload)
        self._tokens.append(token)
        self.ended = self._hub.spec.stops and token in self._ends
        return token

    @torch.inference_mode()
    def _choose(self, payload: bytes) -> int:
        logits = self._hub.logits(payload)
        if self._processors is None:
            return int(logits.argmax(dim=-1))
        scores = self._processors(torch.tensor([self._tokens], device=logits.device), logits)
        odds = torch.nn.functional.softmax(scores, dim=-1)
        return int(torch.multinomial(odds, 1, generator=self._generator))

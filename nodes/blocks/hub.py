"""The client's part of a real model: embeddings, final norm, head, and the choice of the next token."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nodes.blocks.device import from_bytes, open_device, to_bytes
from nodes.blocks.drafts import DraftModel
from nodes.blocks.family import family_of
from nodes.blocks.loading import fill
from nodes.blocks.spec import HubSpec, Sampling
from nodes.blocks.text import end_tokens
from nodes.blocks.weights import opened
from nodes.compute import ComputeError
from nodes.drafting import continued
from nodes.request import Generation, Request, SessionError
from policies.problem import wire_bytes


def prompt_of(request: Request, vocabulary: int) -> list[int]:
    """Returns the ids of the request's input tokens.

    Made-up ones are drawn at random: those of blocks by the blocks' ids, the rest by the request's number. They come after
    the conversation's so far.
    """
    if request.generation.prompt:
        return list(request.generation.prompt)
    chance = random.Random(f"prompt:{request.index}")
    known = list(request.history)
    for number in request.block_ids:
        of_block = random.Random(f"block:{number}")
        known += (of_block.randrange(vocabulary) for _ in range(request.block_tokens))
    del known[request.n_input_tokens :]
    return [*known, *(chance.randrange(vocabulary) for _ in range(request.n_input_tokens - len(known)))]


def processors(
    sampling: Sampling | None, n_prompt: int = 0, min_tokens: int = 0, ends: Collection[int] = ()
) -> LogitsProcessorList:
    """Returns the processors that ``generate`` of transformers would use, in its order.

    Raises ``ComputeError``.

    They exclude the tokens ``ends`` from the first ``min_tokens`` after the prompt.
    """
    chain = LogitsProcessorList()
    if min_tokens and ends:
        chain.append(MinNewTokensLengthLogitsProcessor(n_prompt, min_tokens, sorted(ends)))
    if sampling is None:
        return chain
    try:
        if sampling.temperature != 1.0:
            chain.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            chain.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p != 1.0:
            chain.append(TopPLogitsWarper(sampling.top_p))
    except ValueError as error:
        raise ComputeError(" ".join(str(error).split())) from error
    return chain


class BlocksHub:
    """Implements ``nodes.hub.HubModel`` for a model of transformers. Raises ``ComputeError``."""

    def __init__(self, spec: HubSpec) -> None:
        self.spec = spec
        family, self.config = family_of(spec.source.config)
        self.device, self.dtype = open_device(spec.device, spec.dtype)
        self.token_bytes: int = wire_bytes(self.config.hidden_size, self.dtype.itemsize, spec.wire)
        self.token_limit: int | None = getattr(self.config, family.token_limit, None)
        """Tokens of the longest sequence that the model is made for; ``None`` if that is unknown."""
        self.end_tokens = end_tokens(spec.source)
        with torch.device("meta"):
            model = family.model_class(family.without_blocks(self.config))
        with opened(spec.source, family, self.config) as weights:
            parts = [name for name in (family.embeddings, family.embeddings_norm) if name]
            loaded = [fill(getattr(model, n), n, weights, self.dtype, self.device) for n in parts]
            self._embeddings = torch.nn.Sequential(*loaded)
            norm = family.final_norm
            self._final_norm = fill(getattr(model, norm), norm, weights, self.dtype, self.device)
            embeddings: torch.Tensor = getattr(model, family.embeddings).weight
            tied = embeddings if self.config.tie_word_embeddings else None
            self._head = weights.head(embeddings.shape, self.dtype, self.device, tied)
            self._bias = (
                weights.head_bias(embeddings.shape[:1], self.dtype, self.device)
                if family.has_head_bias
                else None
            )
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        torch.set_num_threads(spec.n_threads)
        self._queue = ThreadPoolExecutor(1, "hub")
        self.decoding = spec.decoding
        self.drafter: DraftModel | None = None
        if spec.draft_folder is not None:
            self.drafter = DraftModel(spec.draft_folder, self.config.vocab_size, self.dtype, self.device)

    def sequence(self, request: Request) -> _Sequence:
        """Returns the token sequence of a request.

        Raises ``SessionError`` if the prompt has an unknown token, or is too long with its output.
        """
        prompt = prompt_of(request, self.config.vocab_size)
        unknown = [token for token in prompt if not 0 <= token < self.config.vocab_size]
        if unknown:
            raise SessionError(
                f"the prompt has token {unknown[0]}, but the model's are 0 to {self.config.vocab_size - 1}"
            )
        n_tokens = len(prompt) + request.n_output_tokens
        if self.token_limit is not None and n_tokens > self.token_limit:
            raise SessionError(
                f"a prompt of {len(prompt)} tokens and {request.n_output_tokens} more exceed the model's "
                f"limit of {self.token_limit}"
            )
        try:
            return _Sequence(self, prompt, request.generation, n_tokens)
        except ComputeError as error:
            raise SessionError(str(error)) from error

    def remember(self, payload: bytes) -> bytes:
        return payload

    def recall(self, memory: bytes) -> bytes:
        return memory

    @torch.inference_mode()
    def embed(self, tokens: list[int]) -> bytes:
        """Returns the hidden states of tokens that enter block 0, as a payload."""
        return to_bytes(self._embeddings(torch.tensor(tokens, device=self.device)), self.spec.wire)

    @torch.inference_mode()
    def logits(self, payload: bytes) -> torch.Tensor:
        """Returns the logits ``[1, vocabulary]`` for one of the hidden states from the last block."""
        state = from_bytes([payload], 1, self.dtype, self.device, self.spec.wire)
        logits = torch.nn.functional.linear(self._final_norm(state), self._head, self._bias)
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits.float()

    async def run(self, function: Any, *arguments: Any) -> Any:
        """Runs ``function`` in the hub's thread, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._queue, function, *arguments)

    def close(self) -> None:
        self._queue.shutdown(cancel_futures=True)


class _Step(NamedTuple):
    """Drafted tokens of a step that is away; ``guess`` is its first token, if that was drafted, too."""

    drafts: list[int]
    guess: int | None


class _Sequence:
    def __init__(self, hub: BlocksHub, prompt: list[int], generation: Generation, most_tokens: int) -> None:
        self.ended = False
        self.n_accepted = 0
        self._hub = hub
        self.tokens = prompt
        self._n_sent = 0
        self._draft = _Step([], None)
        self._away: deque[_Step] = deque()
        self._drafter = None if hub.drafter is None else hub.drafter.begin(most_tokens)
        self._ends = hub.end_tokens if generation.stops else frozenset()
        sampling = generation.sampling
        self._processors = processors(sampling, len(prompt), generation.min_tokens, self._ends)
        self._samples = sampling is not None
        self._generator = torch.Generator(hub.device).manual_seed(sampling.seed) if sampling else None

    async def draft(self, n_tokens: int) -> int:
        drafts = await self._hub.run(self._drafted, list(self.tokens), n_tokens) if n_tokens else []
        self._draft = _Step(drafts, None)
        return len(drafts)

    async def draft_ahead(self, n_tokens: int) -> int | None:
        tokens = list(self.tokens)
        for drafts, guess in self._away:
            tokens += [*([] if guess is None else [guess]), *drafts]
        found = await self._hub.run(self._drafted, tokens, n_tokens + 1)
        if not found:
            return None
        self._draft = _Step(found[1:], found[0])
        return len(found) - 1

    def _drafted(self, tokens: list[int], n_tokens: int) -> list[int]:
        if self._drafter is not None:
            return self._drafter.after(tokens, n_tokens)
        return continued(tokens, n_tokens)

    async def embed(self) -> bytes:
        drafts, guess = self._draft
        tokens = self.tokens[self._n_sent :] if guess is None else [guess]
        if drafts:
            assert self._hub.decoding is not None, "only then it drafts"
            tokens = [*tokens, *drafts][: self._hub.decoding.n_sent(len(drafts))]
        self._away.append(self._draft)
        answer: bytes = await self._hub.run(self._hub.embed, tokens)
        return answer

    async def take(self, payload: bytes) -> list[int]:
        tokens: list[int] = await self._hub.run(self._take, payload, self._away.popleft().drafts)
        self._draft = _Step([], None)
        self.ended = tokens[-1] in self._ends
        return tokens

    def goes_on(self) -> bool:
        return bool(self._away) and self._away[0].guess == self.tokens[-1]

    def forget(self, n_kept: int) -> None:
        while len(self._away) > n_kept:
            self._away.pop()

    def _take(self, payload: bytes, drafts: list[int]) -> list[int]:
        """Returns the new tokens: each as without drafts, for as long as the one before it agrees with its draft.

        So a sampled draft that disagrees is replaced by a token of the model's distribution without the drafted one, as
        rejection sampling has it, and the tokens are those that would be sampled without drafts.
        """
        decoding, n_bytes = self._hub.decoding, self._hub.token_bytes
        n_sent = 1 if decoding is None else decoding.n_sent(len(drafts))
        begin, self.n_accepted = len(payload) - n_sent * n_bytes, 0
        new: list[int] = []
        while begin < len(payload):
            chosen = self._choose(payload[begin : begin + n_bytes])
            self.tokens.append(chosen)
            new.append(chosen)
            begin += n_bytes
            if self.n_accepted == len(drafts) or chosen != drafts[self.n_accepted]:
                break
            self.n_accepted += 1
            if chosen in self._ends:
                break
        if decoding is not None and drafts and not self._samples:  # PETALS' rule is for greedy decoding only
            n_void = len(new) - decoding.n_made(self.n_accepted)
            if n_void > 0:
                del new[-n_void:], self.tokens[-n_void:]
        self._n_sent = len(self.tokens) - 1
        return new

    @torch.inference_mode()
    def _choose(self, payload: bytes) -> int:
        logits = self._hub.logits(payload)
        scores = self._processors(torch.tensor([self.tokens], device=logits.device), logits)
        if not self._samples:
            return int(scores.argmax(dim=-1))
        odds = torch.nn.functional.softmax(scores, dim=-1)
        return int(torch.multinomial(odds, 1, generator=self._generator))

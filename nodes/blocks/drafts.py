"""Drafting with a small model at the client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from nodes.blocks.cache import SessionCache
from nodes.blocks.checkpoint import by
from nodes.blocks.family import cache_layout, family_of, run_with
from nodes.blocks.files import read_config
from nodes.compute import ComputeError


class DraftModel:
    """A whole model in ``folder`` that drafts the tokens it finds most probable.

    ``vocabulary`` is the number of tokens of the model it drafts for. Raises ``ComputeError`` if it has another one.
    """

    def __init__(self, folder: str, vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
        _, config = family_of(read_config(Path(folder)))
        if config.vocab_size != vocabulary:
            raise ComputeError(
                f"the draft model {folder} has a vocabulary of {config.vocab_size:,} tokens, the model of {vocabulary:,}; "
                "give one with the same tokens"
            )
        try:
            # What differs is looked for below: transformers fills it with random values, or has no one sentence for it.
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        except (
            Exception
        ) as error:  # a file that is cut short or of another kind can cause any error in the loader
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise ComputeError(f"the draft model {folder} cannot be loaded: {reason}") from error
        for name in sorted(found["missing_keys"]):
            raise ComputeError(f"the draft model {folder} has no tensor {name}")
        for name, stored, shape in sorted(found["mismatched_keys"]):
            raise ComputeError(
                f"{name} in the draft model {folder} is {by(stored)}, but {by(shape)} by config.json"
            )
        self.model = model.to(device).eval()
        self.n_blocks: int = config.num_hidden_layers
        self.layout = cache_layout(config)
        self.dtype, self.device = dtype, device

    def begin(self, most_tokens: int) -> Drafts:
        """Returns the drafts of one request of at most ``most_tokens`` tokens, prompt and output."""
        return Drafts(self, most_tokens)


class Drafts:
    """One request's drafts. Its cache goes back to where the request's tokens differ from those drafted before."""

    def __init__(self, drafter: DraftModel, most_tokens: int) -> None:
        self._model = drafter.model
        self._cache = SessionCache(
            0, drafter.n_blocks, drafter.layout, most_tokens, drafter.dtype, drafter.device
        )
        self._seen: list[int] = []

    @torch.inference_mode()
    def after(self, tokens: Sequence[int], n_tokens: int) -> list[int]:
        """Returns ``n_tokens`` tokens that may follow ``tokens``."""
        n_same = 0
        while n_same < min(len(self._seen), len(tokens) - 1) and self._seen[n_same] == tokens[n_same]:
            n_same += 1
        self._cache.set_length(n_same)
        found: list[int] = []
        fresh = list(tokens[n_same:])
        self._seen = list(tokens)
        while len(found) < n_tokens:
            inputs = torch.tensor([fresh], device=self._model.device)
            logits = run_with(self._cache, self._model, input_ids=inputs).logits
            fresh = [int(logits[0, -1].argmax())]
            found += fresh
        self._seen += found[:-1]  # the last one has not been put in
        return found

"""Writes a small checkpoint with random weights and a tokenizer, in the layout of real ones.

Equal arguments result in equal files, byte for byte.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from nodes.blocks.family import family_of
from nodes.compute import ComputeError

SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
"""In the order of their ids. A vocabulary is these, the 256 bytes, and merged sequences of bytes."""

_GAIN, _EMBEDDING_NORM, _BIAS = 2.0, 0.2, 0.01
"""Sizes of weights, of the norm after an embedding, and of biases.

Chosen so that a model's output has many different tokens. Its blocks must outweigh the token that came in: a
head that shares its matrix with the embedding would else repeat that token for ever. And its biases must not
outweigh everything else.
"""
_DEEP_EMBEDDING = 0.05
"""Size of an embedding, or of the norm after it, beside blocks that do not enlarge what they multiply."""


def make_tiny(
    folder: Path, config: Mapping[str, Any], seed: int, n_shards: int = 1, *, is_deep: bool = False
) -> None:
    """Writes weights, ``config.json``, ``generation_config.json`` and a tokenizer to the empty ``folder``.

    ``config`` is the content of ``config.json``; token ids and dtype are added. ``is_deep``: blocks do not enlarge
    what they multiply, since over many of them the rounding errors of 16 bits would else alter tokens. Raises
    ``ComputeError`` for a family that is not supported, and for more shards than there are tensors.
    """
    _, parsed = family_of(config)
    parsed.bos_token_id, parsed.eos_token_id, parsed.pad_token_id = 1, 2, 3
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(parsed)
    parsed.architectures = [type(model).__name__]
    parsed.dtype = torch.float32
    generator = torch.Generator().manual_seed(seed)
    tied = set(model.all_tied_weights_keys) if parsed.tie_word_embeddings else set()
    weights = {
        name: _random(name, parameter.shape, generator, is_deep)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in tied
    }
    if n_shards > len(weights):
        raise ComputeError(f"{len(weights)} tensors cannot be split into {n_shards} shards")
    folder.mkdir(parents=True, exist_ok=True)
    _save(folder, weights, n_shards)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # the library lets only the owner read them
    parsed.save_pretrained(folder)
    GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=3).save_pretrained(folder)
    _tokenizer(parsed.vocab_size).save_pretrained(folder)


def _random(name: str, shape: torch.Size, generator: torch.Generator, is_deep: bool) -> torch.Tensor:
    """Returns random values: most norms are about 1, matrices scale their inputs by about ``_GAIN``, or 1."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return _BIAS * noise
    if len(shape) == 1:
        norm = _DEEP_EMBEDDING if is_deep else _EMBEDDING_NORM
        return (norm if "embed" in name else 1.0) * (1 + 0.1 * noise)
    if "embed" in name:
        return _DEEP_EMBEDDING * noise if is_deep else noise
    return noise * ((1.0 if is_deep else _GAIN) / math.sqrt(shape[1]))


def _save(folder: Path, weights: dict[str, torch.Tensor], n_shards: int) -> None:
    """Writes one file, or ``n_shards`` of about equal size and an index."""
    whole = sum(weight.nbytes for weight in weights.values())
    if n_shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    shards: list[dict[str, torch.Tensor]] = [{}]
    before, left = 0, len(weights)
    for name, weight in weights.items():
        needed = n_shards - len(shards)
        if shards[-1] and needed and (before >= whole * len(shards) / n_shards or left <= needed):
            shards.append({})
        shards[-1][name] = weight
        before, left = before + weight.nbytes, left - 1
    names = [f"model-{i + 1:05}-of-{n_shards:05}.safetensors" for i in range(n_shards)]
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": whole},
        "weight_map": {name: file for file, shard in zip(names, shards, strict=True) for name in shard},
    }
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _tokenizer(n_tokens: int) -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE of exactly ``n_tokens`` tokens, so that every output token has a text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *letters])}
    merges: list[tuple[str, str]] = []
    for left, right in _pairs(letters):
        if len(vocabulary) >= n_tokens:
            break
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    model = Tokenizer(models.BPE(vocabulary, merges))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    unknown, begin, end, padding = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=model, unk_token=unknown, bos_token=begin, eos_token=end, pad_token=padding
    )


def _pairs(letters: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the merges: pairs of frequent letters, then any two bytes, then one more byte after those."""
    frequent = "Ġetaoinshrdlu"
    yield from itertools.product(frequent, frequent)
    yield from itertools.product(letters, letters)
    for left, middle, right in itertools.product(letters, letters, letters):
        yield left + middle, right

"""Tiny models for tests of real blocks, what transformers makes of them, and chains of servers.

A test module calls ``need_blocks`` before it imports what needs torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from nodes.blocks.spec import BlocksSpec, HubSpec, Sampling, WeightSource
from nodes.request import Generation, Request
from tests.support.runs import require

DEVICE = os.environ.get("TESTBED_BLOCKS_DEVICE", "cpu")
"""The device of blocks whose test names none: ``cuda`` runs tests on a GPU that were written for any device."""
N_LAYERS = 6
_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
_BLOOM = {"model_type": "bloom", "hidden_size": 64, "n_layer": N_LAYERS, "n_head": 4, "vocab_size": 300}
_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bloom": _BLOOM | {"seq_length": 64},
    "bloom, six heads, other residuals, own head": _BLOOM
    | {
        "hidden_size": 48,
        "n_head": 6,
        "apply_residual_connection_post_layernorm": True,
        "tie_word_embeddings": False,
    },
    "llama, grouped heads": _LLAMA,
    "llama, scaled positions, tied head, biases": _LLAMA
    | {
        "rope_theta": 5000.0,
        "rope_scaling": _ROPE,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "num_key_value_heads": 1,
    },
}
BLOOM, LLAMA = "bloom", "llama, grouped heads"
DTYPES = ("float32", "bfloat16", "float16")
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.0125}
"""Of hidden states of about 1 to 10: some roundings of the dtype."""


def need_blocks(library: str = "torch", capability: str = "blocks") -> None:
    """Skips the module, by name, where ``library`` is not installed; fails where it has to be."""
    missing = [name for name in ("torch", "transformers", library) if importlib.util.find_spec(name) is None]
    require(capability, f"{missing[0]} is not installed" if missing else None)


class Models:
    """Checkpoints by the names of ``CONFIGS``, each made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._whole: dict[tuple[str, str], Any] = {}

    def folder(self, name: str) -> Path:
        from nodes.blocks.tiny import make_tiny

        folder = self._folder / name
        if not folder.exists():
            make_tiny(folder, CONFIGS[name], seed=4, n_shards=3)
        return folder

    def source(self, name: str) -> WeightSource:
        return source_of(self.folder(name))

    def whole(self, name: str, dtype: str) -> Any:
        """The model of transformers, not to be changed."""
        import torch
        from transformers import AutoModelForCausalLM

        if (name, dtype) not in self._whole:
            model = AutoModelForCausalLM.from_pretrained(self.folder(name), dtype=getattr(torch, dtype))
            model.generation_config.eos_token_id = None  # as many tokens as are asked for
            self._whole[name, dtype] = model.eval()
        return self._whole[name, dtype]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from transformers.utils import logging

    logging.disable_progress_bar()
    return Models(tmp_path_factory.mktemp("models"))


def source_of(folder: Path) -> WeightSource:
    return WeightSource(json.loads((folder / "config.json").read_text(encoding="utf-8")), str(folder))


_GENERATED: MutableMapping[Any, dict[Any, list[int]]] = WeakKeyDictionary()


def generated(
    whole: Any, prompt: Sequence[int], n_tokens: int, sampling: Sampling | None = None
) -> list[int]:
    """What ``generate`` of transformers says after ``prompt``: asked once, as the model is not to be changed."""
    known = _GENERATED.setdefault(whole, {})
    asked = (tuple(prompt), n_tokens, sampling)
    if asked not in known:
        known[asked] = _generate(whole, prompt, n_tokens, sampling)
    return list(known[asked])


def _generate(whole: Any, prompt: Sequence[int], n_tokens: int, sampling: Sampling | None) -> list[int]:
    import torch

    how: dict[str, Any] = {"do_sample": False}
    if sampling:
        torch.manual_seed(sampling.seed)
        how = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    tokens = whole.generate(
        torch.tensor([list(prompt)], device=whole.device),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=whole.device),
        max_new_tokens=n_tokens,
        **how,
    )
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


async def served(source: WeightSource, first: int, last: int, **spec: Any) -> Any:
    """A server's backend that holds blocks ``[first, last)``."""
    from nodes.blocks.compute import BlocksCompute

    compute = BlocksCompute(BlocksSpec(source, **{"device": DEVICE, **spec}))
    await compute.host(first, last)
    return compute


def hub_of(source: WeightSource, **spec: Any) -> Any:
    from nodes.blocks.hub import BlocksHub

    return BlocksHub(HubSpec(source, **{"device": DEVICE, **spec}))


class Walk:
    """One request through a chain: ``(compute, first, last)`` per hop."""

    def __init__(
        self,
        hub: Any,
        chain: Sequence[tuple[Any, int, int]],
        prompt: Sequence[int],
        n_tokens: int,
        how: Generation | None = None,
    ) -> None:
        self.hub = hub
        self.tokens: list[int] = []
        self._max_tokens = len(prompt) + n_tokens
        self._sequence = hub.sequence(
            Request(0, 0.0, len(prompt), n_tokens, how or Generation(tuple(prompt)))
        )
        self._position = 0
        self._steps: list[int] = []
        self._open(chain)

    def _open(self, chain: Sequence[tuple[Any, int, int]]) -> None:
        self.hops = [(c, c.new_session("c", first, last, self._max_tokens)) for c, first, last in chain]
        self.memory = [bytearray() for _ in chain]

    @property
    def ended(self) -> bool:
        return bool(self._sequence.ended)

    async def go(self, n_tokens: int) -> list[int]:
        """Generate so many tokens more; answers all so far."""
        for _ in range(n_tokens):
            states = await self._sequence.embed()
            self.tokens += await self._sequence.take(await self.forward(states))
        return self.tokens

    async def forward(self, states: bytes) -> bytes:
        n = len(states) // self.hub.token_bytes
        for (compute, session), memory in zip(self.hops, self.memory, strict=True):
            memory += self.hub.remember(states)
            states = (await compute.step(session, self._position, n, states, 0.0)).payload
        self._position += n
        self._steps.append(n)
        return states

    async def move(self, chain: Sequence[tuple[Any, int, int]], at_once: bool) -> None:
        """To other servers, which get the first hop's remembered inputs: as one prefill, or as they came."""
        states = self.hub.recall(bytes(self.memory[0]))
        steps = [sum(self._steps)] if at_once and self._steps else self._steps
        self.close()
        self._open(chain)
        self._position, self._steps = 0, []
        for n in steps:
            n_bytes = n * self.hub.token_bytes
            await self.forward(states[:n_bytes])
            states = states[n_bytes:]

    def close(self) -> None:
        for compute, session in self.hops:
            compute.close_session(session)

"""The kernel that attends for many sessions against each session's own attention, by Triton's interpreter on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.blocks import need_blocks

need_blocks("triton", "triton")

_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
MODELS = {
    "bloom": {"model_type": "bloom", "hidden_size": 48, "n_layer": 3, "n_head": 2, "vocab_size": 300},
    "llama": {**_LLAMA, "num_key_value_heads": 1},
    "windows": {
        **{**_LLAMA, "model_type": "gemma3_text", "num_key_value_heads": 2, "head_dim": 16},
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "softcap": {
        **_LLAMA,
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 9,
    },
}

STATES = """
import asyncio, json, sys, tempfile, torch
from pathlib import Path
from triton.runtime import interpreter
from nodes.blocks import attention
from nodes.blocks.compute import BlocksCompute
from nodes.blocks.ragged import Part, Ragged
from nodes.blocks.spec import BlocksSpec, WeightSource
from nodes.blocks.tiny import make_tiny
from nodes.compute import open_session

# (first, last + 1 block, tokens before, new tokens): more than a tile's, fewer, none, and a prompt among them.
SESSIONS = ((0, 3, 70, 1), (1, 3, 64, 1), (0, 2, 3, 4), (0, 3, 0, 1), (0, 3, 33, 1), (2, 3, 5, 1))

patch = interpreter._patch_lang_tensor

def patched(tensor, scope):  # the interpreter's numbers are arrays of one value, which newer numpy takes for no index
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

interpreter._patch_lang_tensor = patched

def bytes_of(states):
    return states.contiguous().view(torch.uint8).numpy().tobytes()

async def forward(source, dtype):
    compute = BlocksCompute(BlocksSpec(source, "cpu", dtype))
    await compute.host(0, 3)
    chance = torch.Generator().manual_seed(0)
    parts = []
    for first, last, before, n_tokens in SESSIONS:
        session = await open_session(compute, "c", first, last, 80 - before % 5)
        session.cache.store.fill_(float("nan"))  # what lies in the room that no token has yet
        states = torch.randn(before + n_tokens, compute._config.hidden_size, generator=chance).to(getattr(torch, dtype))
        if before:
            await compute.step(session, 0, before, bytes_of(states[:before]), 0.0)
        parts.append(Part(states[None, before:], session.cache, first, getattr(session.model, compute._family.blocks)))
    ragged = Ragged(compute._family, compute._config, torch.device("cpu"))
    with torch.inference_mode():
        answers = ragged.forward(parts)
    caches = [part.cache.store[..., : part.cache.get_seq_length(), :].float() for part in parts]
    lengths = [[layer.length for layer in part.cache.layers] for part in parts]
    compute.close()
    return [answer.float() for answer in answers], caches, lengths

def apart(ours, theirs):
    return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(ours, theirs, strict=True)]).max())  # or nan

n_launches = 0
really = attention.Singles.attend

def counted(*arguments, **options):
    global n_launches
    n_launches += 1
    return really(*arguments, **options)

attention.Singles.attend = counted
found = {}
for name, config in json.loads(sys.argv[1]).items():
    with tempfile.TemporaryDirectory() as folder:
        make_tiny(Path(folder) / "m", config, seed=4)
        source = WeightSource(json.loads((Path(folder) / "m/config.json").read_text()), str(Path(folder) / "m"))
        for dtype in ("float32", "float16", "bfloat16"):
            theirs, n_launches = asyncio.run(forward(source, dtype)), 0
            attention.usable = lambda *_: True
            attention._LONG_TOKENS = 1024 if dtype == "float32" else 0  # both tiles
            ours = asyncio.run(forward(source, dtype))
            attention.usable = lambda *_: False
            assert ours[2] == theirs[2]
            eps = torch.finfo(getattr(torch, dtype)).eps
            found[f"{name} {dtype}"] = (apart(ours[0], theirs[0]) / eps, apart(ours[1], theirs[1]) / eps, n_launches)
print(json.dumps(found))
"""


def test_attention_of_many_sessions_is_that_of_each() -> None:
    """In a process of its own: Triton decides when it is imported whether kernels are interpreted."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", STATES, json.dumps(MODELS)]
    found = json.loads(subprocess.check_output(command, text=True, env=env, cwd=Path(__file__).parents[3]))
    assert {name: n for name, (_, _, n) in found.items()} == {
        f"{model} {dtype}": 0 if model == "softcap" else 3
        for model in MODELS
        for dtype in ("float32", "float16", "bfloat16")
    }, "a launch per block, but none for scores that the kernel does not know"
    assert all(states <= 16 and cache <= 16 for states, cache, _ in found.values()), found

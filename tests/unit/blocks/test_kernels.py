"""Triton's kernels against products with the restored matrix, by Triton's interpreter on the CPU."""

# ruff: noqa: E402 - what needs torch is imported once it is known to be there
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.blocks import need_blocks

need_blocks("triton", "triton")

import torch

from nodes.blocks import kernels

PRODUCTS = """
import json, sys, torch
from nodes.blocks import kernels
from nodes.blocks.quantised import Int8Linear, Nf4Linear

def apart(ours, theirs):
    return float((ours.double() - theirs).norm() / theirs.norm()) / torch.finfo(ours.dtype).eps

found = {}
chance = torch.Generator().manual_seed(0)
# Rows and columns fewer and more than a tile's, and no multiples of it. Several tokens in bfloat16 are left out:
# the interpreter's products of matrices take its bits for integers.
for n_rows, n_columns in ((40, 200), (6, 2112)):
    for n_tokens, dtype in (
        (1, torch.float32), (1, torch.float16), (1, torch.bfloat16), (3, torch.float32), (70, torch.float16)
    ):
        if n_tokens * n_columns > 2**15:
            continue
        weight = torch.randn(n_rows, n_columns, generator=chance).to(dtype)
        tokens = torch.randn(n_tokens, n_columns, generator=chance).to(dtype)
        int8 = Int8Linear(weight)
        product = kernels.int8_product(tokens, int8.codes, int8.scales)
        assert product.dtype == dtype
        case = f"{n_rows}x{n_columns} {n_tokens} {dtype}"
        found[f"int8 {case}"] = apart(product, tokens.double() @ int8.matrix(torch.float64).T)
        if n_columns % kernels.NF4_BLOCK == 0 and n_tokens <= 3:
            nf4 = Nf4Linear(weight)
            product = nf4.by_triton(tokens)
            nf4._state.dtype = torch.float32  # a matrix that is not rounded
            found[f"nf4 {case}"] = apart(product, tokens.double() @ nf4.matrix(torch.float32).double().T)
assert "torch._inductor.compile_fx" not in sys.modules, "torch's compiler takes seconds to import"
print(json.dumps(found))
"""


def test_products_are_those_of_the_restored_matrix() -> None:
    """In a process of its own: Triton decides when it is imported whether kernels are interpreted."""
    need_blocks("bitsandbytes", "quantised")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    found = json.loads(subprocess.check_output([sys.executable, "-c", PRODUCTS], text=True, env=env))
    assert len(found) == 13
    assert max(found.values()) <= 4, found


def test_kernels_that_do_not_work_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise FileNotFoundError("no C compiler")

    class Device:
        type = "cuda"

    monkeypatch.setattr(torch, "ones", lambda *_, **__: None)
    monkeypatch.setattr(kernels, "int8_product", broken)
    assert not kernels.usable.__wrapped__(Device())

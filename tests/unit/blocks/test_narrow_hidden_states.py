"""Hidden states of real blocks that are narrower on the wire than where they are computed."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.blocks import BLOOM, Models, hub_of, need_blocks, served

need_blocks()

import torch  # noqa: E402

from nodes.blocks.device import from_bytes, to_bytes  # noqa: E402
from policies.problem import wire_bytes  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_rows_are_restored_to_half_a_step_of_their_own_scale(dtype: torch.dtype) -> None:
    states = (
        torch.randn(5, 64, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 5)[:, None]
    )
    states[2] = 0.0
    states = states.to(dtype)
    payload = to_bytes(states, "int8")
    assert len(payload) == 5 * wire_bytes(64, dtype.itemsize, "int8") == 5 * 68
    found = from_bytes([payload], 5, dtype, CPU, "int8")
    assert found.dtype == dtype
    scales = states.float().abs().amax(dim=1, keepdim=True) / 127
    rounding = torch.finfo(dtype).eps * states.float().abs()
    assert ((found.float() - states.float()).abs() <= scales / 2 * (1 + 1e-5) + rounding).all()


def test_fp16_keeps_what_it_can_hold_and_cuts_what_is_larger() -> None:
    states = torch.tensor([[1.5, -0.25, 1e6, -1e6]])
    assert from_bytes([to_bytes(states, "fp16")], 1, torch.float32, CPU, "fp16").tolist() == [
        [1.5, -0.25, 65504.0, -65504.0]
    ]
    half = torch.randn(3, 8).half()
    assert to_bytes(half, "fp16") == to_bytes(half)


@pytest.mark.parametrize("wire", ["fp16", "int8"])
async def test_a_chain_computes_with_what_was_sent(models: Models, wire: Literal["fp16", "int8"]) -> None:
    """Two servers of three blocks: the result is near the full-width one, and the payloads are narrower."""
    source, tokens = models.source(BLOOM), [5, 9, 200, 11, 7]
    results = []
    for each in (None, wire):
        hub = hub_of(source, wire=each)
        states = hub.embed(tokens)
        assert len(states) == 5 * hub.token_bytes == 5 * wire_bytes(hub.config.hidden_size, 4, each)
        for first, last in ((0, 3), (3, 6)):
            compute = await served(source, first, last, wire=each)
            session = compute.new_session("c", first, last, 8)
            states = (await compute.step(session, 0, 5, states, 0.0)).payload
            compute.close()
        results.append(from_bytes([states], 5, torch.float32, CPU, each))
        hub.close()
    difference = (results[0] - results[1]).norm() / results[0].norm()
    assert 0 < difference < (1e-3 if wire == "fp16" else 0.05)

"""Products of a few tokens with quantised matrices on a GPU, as Triton kernels.

A decode step is bound by reading the matrices. These kernels read each code once and restore it in registers.
Triton comes with torch's builds for CUDA and needs a C compiler; ``usable`` says whether it works.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's builds for CPUs come without it
    triton = None

log = logging.getLogger(__name__)

NF4_BLOCK, NF4_OUTER_BLOCK = 64, 256
"""Values per scale, and scales per scale of scales, in nf4."""
MOST_TOKENS = 256
"""Most tokens for which ``int8_product`` is faster than a restored matrix and a large product."""
_INT8_TILE = {"tile_rows": 2, "tile_columns": 2048, "num_warps": 4}
_INT8_FEW_TILE = {"tile_tokens": 16, "tile_rows": 64, "tile_columns": 256, "num_warps": 8}
_INT8_MANY_TILE = {"tile_tokens": 64, "tile_rows": 64, "tile_columns": 128, "num_warps": 4}
_NF4_TILE = {"tile_rows": 4, "tile_blocks": 32, "num_warps": 4}
"""What one program of a kernel computes at a time: the fastest of those tried on an H100."""


@functools.cache
def usable(device: torch.device) -> bool:
    """Returns whether the kernels work on this device: tried once, with a small product."""

    def is_right() -> bool:
        codes = torch.ones((16, 64), dtype=torch.int8, device=device)
        product = int8_product(torch.ones((1, 64), device=device), codes, torch.ones((16, 1), device=device))
        return bool(product.tolist() == [[64.0] * 16])

    return works(device, is_right, "quantised products are computed")


def works(device: torch.device, is_right: Callable[[], bool], otherwise: str) -> bool:
    """Returns whether Triton works on this device, as ``is_right`` tries it; ``otherwise``: what is done else, for the log."""
    if triton is None or device.type != "cuda":
        return False
    try:
        return is_right()
    except Exception as error:  # of a compiler or its tools: whatever it is, there are other ways to compute
        log.warning("%s without Triton, which does not work here: %s", otherwise, error)
        return False


def int8_product(tokens: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns ``tokens (codes * scales)^T`` ``[n, rows]`` in the dtype of ``tokens``.

    ``tokens`` ``[n, columns]`` with n up to ``MOST_TOKENS``, ``codes`` int8 ``[rows, columns]``, ``scales`` float32
    ``[rows, 1]``.
    """
    tokens = tokens.contiguous()
    n_rows, n_columns = codes.shape
    answer = torch.empty((len(tokens), n_rows), dtype=tokens.dtype, device=tokens.device)
    if len(tokens) == 1:
        grid = (triton.cdiv(n_rows, _INT8_TILE["tile_rows"]), 1)
        _int8[grid](tokens, codes, scales, answer, n_rows, n_columns, **_INT8_TILE)
    else:
        tile = _INT8_FEW_TILE if len(tokens) <= _INT8_FEW_TILE["tile_tokens"] else _INT8_MANY_TILE
        grid = (triton.cdiv(n_rows, tile["tile_rows"]), triton.cdiv(len(tokens), tile["tile_tokens"]))
        n_stages = 2 if tokens.dtype == torch.float32 else 3  # what the memory of a multiprocessor holds
        _int8_batch[grid](
            tokens, codes, scales, answer, len(tokens), n_rows, n_columns, num_stages=n_stages, **tile
        )
    return answer


def nf4_product(
    tokens: torch.Tensor,
    codes: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor,
    scale_values: torch.Tensor,
    outer_scales: torch.Tensor,
    offset: torch.Tensor,
    n_rows: int,
) -> torch.Tensor:
    """Returns ``tokens W^T`` ``[n, rows]`` for a matrix in nf4 of bitsandbytes, in the dtype of ``tokens``.

    ``tokens`` ``[n, columns]``, with columns a multiple of ``NF4_BLOCK``. ``codes``: two values per byte, the
    first in the upper four bits; they index ``values`` ``[16]``. Each ``NF4_BLOCK`` values have a scale
    ``scale_values[scales[i]] * outer_scales[i // NF4_OUTER_BLOCK] + offset``.
    """
    n_columns = tokens.shape[1]
    # The first values of all bytes, then the second ones: so that threads read neighbours.
    apart = tokens.view(len(tokens), n_columns // 2, 2).transpose(1, 2).contiguous()
    answer = torch.empty((len(tokens), n_rows), dtype=tokens.dtype, device=tokens.device)
    grid = (triton.cdiv(n_rows, _NF4_TILE["tile_rows"]), len(tokens))
    _nf4[grid](
        apart, codes, values, scales, scale_values, outer_scales, offset, answer, n_rows, n_columns,
        block=NF4_BLOCK, outer_block=NF4_OUTER_BLOCK,
        has_halves=tokens.is_cuda and tokens.dtype != torch.float32, **_NF4_TILE,
    )  # fmt: skip
    return answer


if triton is not None:
    _NF4_VALUES = tl.constexpr(
        "{ .reg .b32 w, s, t, a, b, l, h; .reg .b16 x, y; "
        + "".join(
            f"shr.b32 w, $8, {shift}; and.b32 s, w, 0x7777; "
            # bytes of the values 0 to 7 and 8 to 15, and which of both: by the upper bit of each code
            "shr.b32 t, w, 1; and.b32 t, t, 0x4444; or.b32 t, t, 0x3210; "
            "prmt.b32 a, 0x52339200, 0x00d4ea8d, s; prmt.b32 b, 0x68e02618, 0x00c9800d, s; prmt.b32 l, a, b, t; "
            "prmt.b32 a, 0xb6b8b9bc, 0x00adb1b4, s; prmt.b32 b, 0x3533312d, 0x3c393837, s; prmt.b32 h, a, b, t; "
            f"prmt.b32 w, l, h, 0x5140; mov.b32 {{x, y}}, w; cvt.f32.f16 ${at + 4}, x; cvt.f32.f16 ${at}, y; "
            f"prmt.b32 w, l, h, 0x7362; mov.b32 {{x, y}}, w; cvt.f32.f16 ${at + 5}, x; cvt.f32.f16 ${at + 1}, y; "
            for shift, at in ((0, 0), (16, 2))
        )
        + "}"
    )
    """Restores the values of four bytes of codes in registers: the low and high bytes of the 16 values in float16
    lie in four constants each, of which ``prmt`` picks by the codes.
    """

    @triton.jit
    def _int8(  # type: ignore[no-untyped-def] # Triton would look an annotation's name up
        tokens,
        codes,
        scales,
        answer,
        n_rows,
        n_columns: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_columns: tl.constexpr,
    ) -> None:
        """``tile_rows`` rows of the product, of one token, ``tile_columns`` columns at a time."""
        rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
        is_row = rows < n_rows
        starts = rows.to(tl.int64) * n_columns
        total = tl.zeros((tile_rows, tile_columns), tl.float32)
        for start in range(0, n_columns, tile_columns):
            columns = start + tl.arange(0, tile_columns)
            is_column = columns < n_columns
            is_there = is_row[:, None] & is_column[None, :]
            code = tl.load(codes + starts[:, None] + columns[None, :], mask=is_there, other=0)
            x = tl.load(tokens + columns, mask=is_column, other=0.0).to(tl.float32)
            total += code.to(tl.float32) * x[None, :]
        product = tl.sum(total, 1) * tl.load(scales + rows, mask=is_row, other=0.0)
        tl.store(answer + rows, product.to(answer.dtype.element_ty), mask=is_row)

    @triton.jit
    def _int8_batch(  # type: ignore[no-untyped-def]
        tokens,
        codes,
        scales,
        answer,
        n_tokens,
        n_rows,
        n_columns: tl.constexpr,
        tile_tokens: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_columns: tl.constexpr,
    ) -> None:
        """``tile_rows`` rows of the product, of ``tile_tokens`` tokens, ``tile_columns`` columns at a time."""
        rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
        batch = tl.program_id(1) * tile_tokens + tl.arange(0, tile_tokens)
        is_row, is_token = rows < n_rows, batch < n_tokens
        starts = rows.to(tl.int64) * n_columns
        total = tl.zeros((tile_tokens, tile_rows), tl.float32)
        for start in range(0, n_columns, tile_columns):
            columns = start + tl.arange(0, tile_columns)
            is_column = columns < n_columns
            code = tl.load(
                codes + starts[None, :] + columns[:, None],
                mask=is_column[:, None] & is_row[None, :],
                other=0,
            )
            x = tl.load(
                tokens + batch[:, None] * n_columns + columns[None, :],
                mask=is_token[:, None] & is_column[None, :],
                other=0.0,
            )
            total = tl.dot(x, code.to(x.dtype), total, input_precision="ieee")
        product = total * tl.load(scales + rows, mask=is_row, other=0.0)[None, :]
        places = answer + batch[:, None] * n_rows + rows[None, :]
        tl.store(places, product.to(answer.dtype.element_ty), mask=is_token[:, None] & is_row[None, :])

    @triton.jit
    def _nf4(  # type: ignore[no-untyped-def]
        tokens,
        codes,
        values,
        scales,
        scale_values,
        outer_scales,
        offset,
        answer,
        n_rows,
        n_columns: tl.constexpr,
        tile_rows: tl.constexpr,
        tile_blocks: tl.constexpr,
        block: tl.constexpr,
        outer_block: tl.constexpr,
        has_halves: tl.constexpr,
    ) -> None:
        """``tile_rows`` rows of the product, of one token, ``tile_blocks`` blocks of values at a time."""
        half: tl.constexpr = block // 2
        rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
        token = tl.program_id(1)
        is_row = rows < n_rows
        n_blocks: tl.constexpr = n_columns // block
        first_blocks = rows.to(tl.int64) * n_blocks
        shift = tl.load(offset)
        total = tl.zeros((tile_rows, tile_blocks), tl.float32)
        for start in range(0, n_blocks, tile_blocks):
            places = tl.arange(0, tile_blocks * half)
            is_place = start * half + places < n_blocks * half
            is_there = is_row[:, None] & is_place[None, :]
            packed = tl.load(
                codes + first_blocks[:, None] * half + start * half + places[None, :], mask=is_there, other=0
            )
            x = tokens + token * n_columns + start * half + places
            x_first = tl.load(x, mask=is_place, other=0.0).to(tl.float32)
            x_second = tl.load(x + n_columns // 2, mask=is_place, other=0.0).to(tl.float32)
            if has_halves:
                first, second = tl.inline_asm_elementwise(
                    _NF4_VALUES,
                    "=r,=r,=r,=r,=r,=r,=r,=r,r",
                    [packed],
                    (tl.float32, tl.float32),
                    is_pure=True,
                    pack=4,
                )
            else:
                first = tl.load(values + (packed.to(tl.int32) >> 4))
                second = tl.load(values + (packed.to(tl.int32) & 15))
            products = first * x_first[None, :] + second * x_second[None, :]
            sums = tl.sum(tl.reshape(products, (tile_rows, tile_blocks, half)), 2)
            blocks = start + tl.arange(0, tile_blocks)
            is_block = is_row[:, None] & (blocks < n_blocks)[None, :]
            numbers = first_blocks[:, None] + blocks[None, :]
            scale = tl.load(scales + numbers, mask=is_block, other=0).to(tl.int32)
            outer = tl.load(outer_scales + numbers // outer_block, mask=is_block, other=0.0)
            total += sums * (tl.load(scale_values + scale) * outer + shift)
        product = tl.sum(total, 1)
        tl.store(answer + token * n_rows + rows, product.to(answer.dtype.element_ty), mask=is_row)

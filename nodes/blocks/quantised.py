"""Linear layers that hold their matrix in 8 or about 4 bits per value.

``int8``: a scale per output channel, and the matrix is made again for every call, some rows at a time.
``nf4``: bitsandbytes' NF4 as PETALS uses it: a scale per 64 values, itself in 8 bits; 4.127 bits per value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from nodes.compute import ComputeError

_SLICE_VALUES = 1 << 25
"""At most so many values of an int8 matrix exist in full at a time: 64 MiB in a 16-bit dtype."""
_NF4_BLOCK, _NF4_OUTER_BLOCK = 64, 256


class Int8Linear(torch.nn.Module):
    """``x W^T + b`` with ``W = codes * scales``, one scale per row."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        largest = weight.abs().amax(dim=1, keepdim=True).float()
        scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
        self.register_buffer("codes", (weight.float() / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n_rows = max(1, _SLICE_VALUES // self.codes.shape[1])
        if n_rows >= self.codes.shape[0]:
            return torch.nn.functional.linear(x, self._rows(slice(None), x.dtype), self.bias)
        output = x.new_empty(*x.shape[:-1], self.codes.shape[0])
        for start in range(0, self.codes.shape[0], n_rows):
            rows = slice(start, start + n_rows)
            bias = None if self.bias is None else self.bias[rows]
            output[..., rows] = torch.nn.functional.linear(x, self._rows(rows, x.dtype), bias)
        return output

    def _rows(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        return (self.codes[rows] * self.scales[rows]).to(dtype)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix that this layer computes with."""
        return self._rows(slice(None), dtype)

    @property
    def n_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


class Nf4Linear(torch.nn.Module):
    """``x W^T + b`` with the kernels of bitsandbytes."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._library = _bitsandbytes()
        codes, self._state = self._library.functional.quantize_4bit(
            weight.contiguous(), blocksize=_NF4_BLOCK, quant_type="nf4", compress_statistics=True
        )
        self.register_buffer("codes", codes)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._library.matmul_4bit(x, self.codes.t(), quant_state=self._state, bias=self.bias)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix that this layer computes with."""
        return self._library.functional.dequantize_4bit(self.codes, self._state).to(dtype)

    @property
    def n_bytes(self) -> int:
        inner = self._state.state2
        parts = (self._state.absmax, self._state.code, self._state.offset, inner.absmax, inner.code)
        return self.codes.nbytes + sum(part.nbytes for part in parts)


LAYERS: Mapping[str, Any] = {"int8": Int8Linear, "nf4": Nf4Linear}


def check(weights: str) -> None:
    """Raises ``ComputeError`` if this way to hold weights is unknown, or what it takes not installed."""
    if weights not in ("plain", *LAYERS):
        raise ComputeError(
            f'no weights "{weights}" are known; those of these are: plain, {", ".join(LAYERS)}'
        )
    if weights == "nf4":
        _bitsandbytes()


def matrix_bytes(weights: str, n_rows: int, n_columns: int, dtype: torch.dtype) -> int:
    """What a matrix takes in memory."""
    n_values = n_rows * n_columns
    if weights == "int8":
        return n_values + 4 * n_rows
    if weights == "nf4":
        n_scales = -(-n_values // _NF4_BLOCK)
        tables = 4 * (16 + 256 + 1)  # the 16 values, those of the scales' own code, the scales' mean
        return -(-n_values // 2) + n_scales + 4 * -(-n_scales // _NF4_OUTER_BLOCK) + tables
    return n_values * dtype.itemsize


def _bitsandbytes() -> Any:
    # It reports on import that an optional package is missing, which is nothing to tell anybody.
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        import bitsandbytes
    except ImportError:
        raise ComputeError(
            "weights in nf4 need bitsandbytes, which is not installed: pip install 'testbed[quantised]'"
        ) from None
    finally:
        logger.setLevel(level)
    return bitsandbytes

"""Linear layers that hold their matrix in 8 or about 4 bits per value.

``int8``: a scale per output channel. For a few tokens, a kernel computes with the codes themselves: on a GPU
Triton's (``kernels``), on a CPU torch's. For more, the matrix is restored in every call, some rows at a time.

``nf4``: NF4 of bitsandbytes, as PETALS uses it: a scale per 64 values, itself in 8 bits; 4.127 bits per
value.

Each matrix of each expert of a mixture is quantised by itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from nodes.blocks import kernels
from nodes.compute import ComputeError

_SLICE_VALUES = 1 << 25
"""Most values of an int8 matrix that are restored at a time: 64 MiB in a 16-bit dtype."""
FEW_TOKENS = 4
"""Most tokens for which torch's own int8 kernel is used on a CPU.

It reads the codes once per token, a byte each; a restored matrix costs five bytes per value for any number of
tokens.
"""


class Int8Linear(torch.nn.Module):
    """``x W^T + b`` with ``W = codes * scales``, one scale per row."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        codes = torch.empty_like(weight, dtype=torch.int8)
        scales = torch.empty((weight.shape[0], 1), dtype=torch.float32, device=weight.device)
        for rows in _slices(weight):
            values = weight[rows].to(torch.float32, copy=True)
            largest = values.abs().amax(dim=1, keepdim=True)
            scales[rows] = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
            codes[rows] = values.div_(scales[rows]).round_()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        kernels.usable(
            weight.device
        )  # tried now, since trying waits for the device, which no recording allows
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        if len(tokens) <= kernels.MOST_TOKENS and kernels.usable(x.device):
            output = self.by_triton(tokens)
        elif len(tokens) <= FEW_TOKENS and has_kernel(x.device, x.dtype):
            output = self.from_codes(tokens)
        else:
            output = self.from_matrix(tokens)
        if self.bias is not None:
            output += self.bias
        return output.view(*x.shape[:-1], -1)

    def by_triton(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T`` for x = ``tokens`` ``[n, columns]``. Only where ``kernels.usable`` is true."""
        return kernels.int8_product(tokens, self.codes, self.scales)

    def from_codes(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T`` for x = ``tokens`` ``[n, columns]``. Only where ``has_kernel`` is true."""
        # The kernel reads the tokens row after row, whatever their strides are.
        return torch._weight_int8pack_mm(tokens.contiguous(), self.codes, self.scales[:, 0])

    def from_matrix(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T`` for x = ``tokens`` ``[n, columns]``; restores the codes some rows at a time."""
        # Codes are exact in 16 bits. Scales come after the product, less the factor that keeps float16 in its range.
        small = tokens / 128
        parts = [small @ self.codes[rows].to(tokens.dtype).T for rows in _slices(self.codes)]
        product = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return (product * (128 * self.scales[:, 0])).to(tokens.dtype)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix that this layer computes with."""
        matrix = torch.empty_like(self.codes, dtype=dtype)
        return torch.mul(self.codes, self.scales, out=matrix)

    @property
    def n_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


class Nf4Linear(torch.nn.Module):
    """``x W^T + b`` with the kernels of bitsandbytes."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self._library = _bitsandbytes()
        codes, self._state = self._library.functional.quantize_4bit(
            weight.contiguous(), blocksize=kernels.NF4_BLOCK, quant_type="nf4", compress_statistics=True
        )
        self.register_buffer("codes", codes)
        self.register_parameter("bias", None)
        self._n_rows, n_columns = weight.shape
        is_few_bytes = weight.dtype.itemsize == 2 and n_columns % kernels.NF4_BLOCK == 0
        self._has_kernel = is_few_bytes and kernels.usable(weight.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        if self._has_kernel and len(tokens) == 1:
            output = self.by_triton(tokens)
            if self.bias is not None:
                output += self.bias
            return output.view(*x.shape[:-1], -1)
        return self.from_library(x)

    def by_triton(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T`` for x = ``tokens`` ``[n, columns]``. Only where ``kernels.usable`` is true."""
        state, inner = self._state, self._state.state2
        return kernels.nf4_product(
            tokens, self.codes, state.code, state.absmax, inner.code, inner.absmax, state.offset, self._n_rows
        )

    def from_library(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x W^T + b`` by bitsandbytes."""
        return self._library.matmul_4bit(x, self.codes.t(), quant_state=self._state, bias=self.bias)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Returns the matrix that this layer computes with."""
        return self._library.functional.dequantize_4bit(self.codes, self._state).to(dtype)

    @property
    def n_bytes(self) -> int:
        inner = self._state.state2
        parts = (self._state.absmax, self._state.code, self._state.offset, inner.absmax, inner.code)
        return self.codes.nbytes + sum(part.nbytes for part in parts)


EXPERTS = ("gate_up_proj", "down_proj")
"""The tensors of all experts in transformers' modules of Mixtral and Qwen3-MoE: of each expert one below the other, and one."""


class QuantisedExperts(torch.nn.Module):
    """The experts of a mixture with quantised matrices, in place of transformers' module ``experts``."""

    def __init__(self, experts: torch.nn.Module, layer: Any) -> None:
        super().__init__()
        self._layer, self._activation = layer, experts.act_fn
        self._gates, self._ups, self._downs = (torch.nn.ModuleList() for _ in range(3))

    def hold(self, name: str, tensor: torch.Tensor) -> None:
        """Takes over a tensor of ``EXPERTS``, by its name: [experts, rows, columns]."""
        for matrix in tensor:
            parts = matrix_of(name, matrix)
            for held, part in zip(
                [self._downs] if len(parts) == 1 else [self._gates, self._ups], parts, strict=True
            ):
                held.append(self._layer(part))

    def forward(self, states: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Returns the outputs for ``states`` [n, hidden]: of the experts ``chosen`` [n, k] by their ``shares`` [n, k]."""
        output = torch.zeros_like(states)
        for expert in chosen.unique().tolist():
            rows, places = torch.where(chosen == expert)
            own = states[rows]
            inner = self._activation(self._gates[expert](own)) * self._ups[expert](own)
            part = self._downs[expert](inner) * shares[rows, places, None]
            output.index_add_(0, rows, part.to(output.dtype))
        return output


def matrix_of(name: str, matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the matrices in an expert's part of a tensor of ``EXPERTS``."""
    return tuple(matrix.chunk(2)) if name == EXPERTS[0] else (matrix,)


def _slices(matrix: torch.Tensor) -> list[slice]:
    """Returns the rows of ``matrix`` in parts of at most ``_SLICE_VALUES`` values."""
    n_rows = max(1, _SLICE_VALUES // matrix.shape[1])
    return [slice(start, start + n_rows) for start in range(0, matrix.shape[0], n_rows)]


def has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch's kernel that multiplies by int8 codes is used.

    Not on GPUs, where it is slower than restoring the matrix (17 times slower than Triton's on an H100), nor with
    16-bit numbers on CPUs, where it reads beyond its inputs.
    """
    return device.type == "cpu" and dtype == torch.float32


LAYERS: Mapping[str, Any] = {"int8": Int8Linear, "nf4": Nf4Linear}


def check(weights: str) -> None:
    """Raises ``ComputeError`` if this kind of weights is unknown, or if its library is not installed."""
    if weights not in ("plain", *LAYERS):
        raise ComputeError(f'unknown weights "{weights}"; supported kinds: plain, {", ".join(LAYERS)}')
    if weights == "nf4":
        _bitsandbytes()


def matrix_bytes(weights: str, n_rows: int, n_columns: int, dtype: torch.dtype) -> int:
    """Returns the bytes that a matrix takes in memory."""
    n_values = n_rows * n_columns
    if weights == "int8":
        return n_values + 4 * n_rows
    if weights == "nf4":
        n_scales = -(-n_values // kernels.NF4_BLOCK)
        tables = 4 * (16 + 256 + 1)  # the 16 values, those of the scales' own code, the scales' mean
        return -(-n_values // 2) + n_scales + 4 * -(-n_scales // kernels.NF4_OUTER_BLOCK) + tables
    return n_values * dtype.itemsize


def _bitsandbytes() -> Any:
    # On import it logs that an optional package is missing, which does not matter here.
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with _compiled_later() if "bitsandbytes" not in sys.modules else contextlib.nullcontext():
            import bitsandbytes
    except ImportError:
        raise ComputeError(
            "weights in nf4 need bitsandbytes, which is not installed: pip install '.[quantised]' in the checkout"
        ) from None
    finally:
        logger.setLevel(level)
    return bitsandbytes


@contextlib.contextmanager
def _compiled_later() -> Iterator[None]:
    """What the body has torch compile is compiled when it is first called.

    bitsandbytes has functions compiled on import that are hardly ever called, and to import torch's compiler takes two
    seconds of CPU time.
    """
    compile_now = torch.compile

    def compile_later(function: Any = None, **how: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **how)
        compiled = functools.cache(lambda: compile_now(function, **how))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_now

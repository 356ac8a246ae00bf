"""Limits of a device: bytes and operations per second, from its data sheet and measured with large
operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu_parts.sizes import Model
from nodes.blocks.spec import Weights
from testbed.experiments.catalogue import Gpu, gpus
from testbed.experiments.families import sizes_of

_SHEET_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Limits:
    """Limits of a device. ``sheet_*``: from its data sheet, None if that is not known. ``flops``: operations
    per second.
    """

    measured_bytes_per_s: float
    measured_flops: float
    sheet_bytes_per_s: float | None
    sheet_flops: float | None

    @property
    def bytes_per_s(self) -> float:
        return self.sheet_bytes_per_s or self.measured_bytes_per_s

    @property
    def flops(self) -> float:
        return self.sheet_flops or self.measured_flops

    def roofline_s(self, model: Model, weights: Weights, n_tokens: int, n_cached: int) -> float:
        """Returns the shortest possible time of a block in seconds: matrices and caches are read once, and
        each token needs two operations per value of the matrices.

        ``n_tokens``: tokens that are computed, of all sessions together. ``n_cached``: cached tokens that are
        read.
        """
        n_bytes = model.block_bytes(weights) + model.cache_bytes(n_cached)
        n_values = sum(rows * columns for rows, columns in sizes_of(model.config).matrices)
        return max(n_bytes / self.bytes_per_s, 2 * n_values * n_tokens / self.flops)


def limits_of(device: torch.device, dtype: torch.dtype, *, is_small: bool) -> Limits:
    """Measures the limits of ``device``, and looks up its data sheet. ``flops`` are those of products in
    ``dtype``.
    """
    n_bytes, side = (1 << 24, 512) if is_small else (1 << 31, 8192)
    copied_s, multiplied_s = _copy_s(device, n_bytes), _product_s(device, dtype, side)
    sheet = None
    if device.type == "cuda":
        sheet = sheet_of(torch.cuda.get_device_name(device))
    return Limits(
        2 * n_bytes / copied_s,
        2 * side**3 / multiplied_s,
        sheet.bandwidth_bytes_per_s if sheet else None,
        sheet.flops.get(_SHEET_TYPES[dtype]) if sheet else None,
    )


def sheet_of(device_name: str) -> Gpu | None:
    """Returns the data sheet of a GPU by the name that its driver reports: ``h100-pcie`` for "NVIDIA H100
    PCIe".

    None for a MIG instance, and if there is no data sheet.
    """
    words = set(device_name.lower().split())
    found = [gpu for name, gpu in gpus().items() if "mig" not in words and words.issuperset(name.split("-"))]
    return max(found, key=lambda gpu: len(gpu.name), default=None)


def _copy_s(device: torch.device, n_bytes: int) -> float:
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timed(device, lambda: target.copy_(source))


def _product_s(device: torch.device, dtype: torch.dtype, side: int) -> float:
    matrix = torch.randn(side, side, device=device).to(dtype)
    product = torch.empty_like(matrix)
    return timed(device, lambda: torch.mm(matrix, matrix, out=product))


def timed(device: torch.device, work: Callable[[], object], n_times: int = 10) -> float:
    """Returns the median seconds of ``work`` over ``n_times``, after two that do not count."""
    times = []
    for _ in range(n_times + 2):
        began_at_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began_at_s)
    return float(np.median(times[2:]))

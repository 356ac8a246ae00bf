"""Servers with several GPUs: tensor parallelism, and what its all-reduces cost (docs/hardware.md)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from policies.steps import StepTimes
from testbed.experiments.roofline import BLOCK_OVERHEAD_S, MEMORY_EFFICIENCY

ALL_REDUCES = 2
"""In a block: after the attention and after the feed-forward."""


class Interconnect(NamedTuple):
    """What connects the GPUs of a server: bytes per second out of one GPU, and an all-reduce's own seconds."""

    bytes_per_s: float
    start_s: float


INTERCONNECTS = {
    "nvlink": Interconnect(300e9, 10e-6),  # of an A100, in one direction
    "pcie": Interconnect(32e9, 20e-6),  # 16 lanes of the fourth generation
}
"""Rates are nominal; the seconds are assumed: what collective operations of a few kilobytes take."""


def all_reduce_s(gpus: int, interconnect: str, n_bytes: float) -> float:
    """Return the seconds of an all-reduce of ``n_bytes`` over a ring of ``gpus``."""
    link = INTERCONNECTS[interconnect]
    return link.start_s + 2 * (gpus - 1) / gpus * n_bytes / (MEMORY_EFFICIENCY * link.bytes_per_s)


def parallel(
    times: StepTimes, gpus: int, interconnect: str, token_bytes: float, kv_heads: int | None
) -> StepTimes:
    """Return the times of one GPU's blocks on ``gpus`` of them together.

    Each reads and computes its share of the matrices; starting the kernels takes as long as before. Every
    token's hidden state of ``token_bytes`` goes through two all-reduces per block. A cache is shared out by
    its ``kv_heads``; ``None``: each GPU reads all of it, as with MLA.
    """
    if gpus == 1:
        return times
    start_s = ALL_REDUCES * all_reduce_s(gpus, interconnect, 0)
    token_s = ALL_REDUCES * all_reduce_s(gpus, interconnect, token_bytes) - start_s

    def shared_s(whole_s: float) -> float:
        launch_s = min(whole_s, BLOCK_OVERHEAD_S)
        return launch_s + (whole_s - launch_s) / gpus + start_s

    return replace(
        times,
        decode_s=shared_s(times.decode_s) + token_s,
        prefill_base_s=shared_s(times.prefill_base_s),
        prefill_slope_s=times.prefill_slope_s / gpus,
        prefill_curve_s=times.prefill_curve_s / gpus,
        prefill_least_s=shared_s(times.prefill_least_s) if times.prefill_least_s else 0.0,
        context_slope_s=times.context_slope_s / min(gpus, kv_heads or 1),
        session_slope_s=times.session_slope_s / gpus + token_s,
        experts_s=times.experts_s / gpus,
        exchange_s=token_s,
        others=tuple(parallel(other, gpus, interconnect, token_bytes, kv_heads) for other in times.others),
    )

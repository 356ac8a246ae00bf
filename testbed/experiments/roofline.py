"""Computes block times from GPU data sheets, at an assumed efficiency (docs/hardware.md)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from policies.steps import StepLaw, StepTimes
from testbed.experiments.catalogue import DTYPES, Gpu, sizes_of_table
from testbed.experiments.families import BlockSizes, ModelSizes
from testbed.experiments.model_tables import Dtype, HardwareTable, ModelTable, OtherBlocksTable

MEMORY_EFFICIENCY = 0.8
"""Share of the data sheet's bandwidth that is reached; fitted to one case, Helix' A100 (docs/hardware.md)."""
COMPUTE_EFFICIENCY = 0.8
"""Share of the data sheet's dense throughput that is reached; fitted to the same case."""
BLOCK_OVERHEAD_S = 50e-6
"""Assumed time to launch the kernels of one block: ten of 5 us."""
PETALS_PROMPT_TOKENS = 1024
"""Length of the prompt with which PETALS measures ``forward_rps``."""
PETALS_ASSUMED_BPS = 100e6
"""Rate that PETALS assumes of a connection that it has not measured."""


WRITTEN_OUT: tuple[Dtype, ...] = ("int8", "nf4")
"""Types whose matrices a prefill writes out in 16 bits first, as bitsandbytes does."""
FUSED: tuple[Dtype, ...] = ("fp8", "mxfp4", "int4")
"""Types whose kernels multiply in 16 bits as they read."""


class RooflineError(Exception):
    """Times cannot be computed. The message is one sentence."""


@dataclass(frozen=True)
class Block:
    """One transformer block of a model.

    ``values`` is the number of values in the matrices that a token is multiplied with, ``width`` that of all
    its heads together, ``token_bytes`` the size of a hidden state. ``cache_bytes_per_token`` is for this one
    block. ``experts_bytes`` of a mixture are those of all its experts, with ``experts_values`` in their
    matrices; a token chooses the share ``experts_ratio`` of them. The block attends to the last ``window``
    tokens if that is given. ``others`` are the other kinds of blocks of the model, of which this is the largest.
    """

    model: str
    dtype: Dtype
    values: int
    width: int
    block_bytes: float
    cache_bytes_per_token: float
    token_bytes: int
    experts_bytes: float = 0.0
    experts_values: int = 0
    experts_ratio: float = 0.0
    window: int | None = None
    others: tuple[Block, ...] = ()

    @property
    def active_bytes(self) -> float:
        """The bytes of the weights that one token reads."""
        return self.block_bytes - (1 - self.experts_ratio) * self.experts_bytes

    @property
    def all_values(self) -> float:
        """The number of values in all matrices."""
        return self.values + (1 - self.experts_ratio) * self.experts_values

    @property
    def words(self) -> str:
        return f"{self.model} ({self.dtype})"

    def computes_as(self, other: Block) -> bool:
        """Whether ``other`` takes as long to compute: same size of matrices and heads, same ``dtype``."""
        keys = ("values", "width", "dtype", "experts_values", "experts_ratio", "window")
        if any(getattr(self, key) != getattr(other, key) for key in keys):
            return False
        pairs = zip(self.others, other.others, strict=False)
        return len(self.others) == len(other.others) and all(one.computes_as(two) for one, two in pairs)


def block_of(table: ModelTable) -> Block | None:
    """Return the block of a complete table; ``None`` if the table has only sizes in bytes."""
    sizes = sizes_of_table(table)
    if sizes is None or not (
        table.dtype and table.block_size and table.cache_per_token and table.value_bytes
    ):
        return None
    is_own = not sizes.are_alike and not has_own_bytes(table, sizes)
    first, *others = (_block(table, sizes, one) for one in (sizes.kinds if is_own else (sizes.largest,)))
    cache_bytes = table.cache_per_token if sizes.are_alike else first.cache_bytes_per_token
    return replace(
        first, block_bytes=table.block_size, cache_bytes_per_token=cache_bytes, others=tuple(others)
    )


def has_own_bytes(table: ModelTable, sizes: ModelSizes) -> bool:
    """Whether a complete table's ``block_size`` is not that of the largest block, so that all blocks have it."""
    assert table.dtype and table.value_bytes
    return table.block_size != sizes.block_bytes(DTYPES[table.dtype][1], table.value_bytes)


def _block(table: ModelTable, sizes: ModelSizes, one: BlockSizes) -> Block:
    assert table.dtype and table.value_bytes
    stored = DTYPES[table.dtype][1]
    expert_bytes = one.expert_bytes(stored, table.value_bytes) if one.n_experts else 0.0
    return Block(
        model=table.name or sizes.family,
        dtype=table.dtype,
        values=one.active_values,
        # Keys and values of MLA differ in size.
        width=sizes.n_heads * (one.head_size or (sizes.head_size + sizes.value_size) // 2),
        block_bytes=one.n_bytes(stored, table.value_bytes),
        cache_bytes_per_token=float(one.cache_values * table.value_bytes),
        token_bytes=sizes.hidden_size * table.value_bytes,
        experts_bytes=one.n_experts * expert_bytes,
        experts_values=one.n_experts * sum(rows * columns for rows, columns in one.expert),
        experts_ratio=one.n_chosen / one.n_experts if one.n_experts else 0.0,
        window=one.window,
    )


def roofline(gpu: Gpu, block: Block) -> StepTimes:
    """Return the times of a block on a GPU.

    Raises ``RooflineError`` if the GPU does not support its ``dtype``.

    A decode step reads the weights and the caches once. A prefill takes the larger of the time to read the
    weights and the time to compute (2 operations per value and token, and 2 x width per squared token for
    causal attention). Before a prefill, matrices in int8 and nf4 are written out in 16 bits; the kernels of
    fp8, mxfp4 and int4 multiply in 16 bits as they read. Each further decode in one step adds its arithmetic.
    Of a mixture, a step reads the experts that its tokens choose, and a token is multiplied with its own.
    """
    memory = gpu.bandwidth_bytes_per_s * MEMORY_EFFICIENCY
    compute = _flops(gpu, block.dtype) * COMPUTE_EFFICIENCY
    base_s, read_bytes = BLOCK_OVERHEAD_S, block.block_bytes
    if block.dtype in WRITTEN_OUT:
        base_s += (block.block_bytes + 2 * block.all_values) / memory
        read_bytes = 2 * block.all_values
    return StepTimes(
        decode_s=_rounded(BLOCK_OVERHEAD_S + block.active_bytes / memory),
        prefill_base_s=_rounded(base_s),
        prefill_slope_s=_rounded(2 * block.values / compute),
        prefill_curve_s=_rounded(2 * block.width / compute),
        prefill_least_s=_rounded(base_s + read_bytes / memory),
        context_slope_s=_rounded(block.cache_bytes_per_token / memory),
        session_slope_s=_rounded(2 * block.values / compute),
        experts_s=_rounded(block.experts_bytes / memory),
        experts_ratio=block.experts_ratio,
        window_tokens=block.window or 0,
        others=tuple(roofline(gpu, other) for other in block.others),
    )


def _flops(gpu: Gpu, dtype: Dtype) -> float:
    known = gpu.flops
    if dtype in (*WRITTEN_OUT, *FUSED):
        return known["bf16"] if "bf16" in known else known["fp16"]
    if dtype not in known:
        raise RooflineError(
            f"{gpu.name} does not support {dtype}; use one of {', '.join((*known, *WRITTEN_OUT, *FUSED))}"
        )
    return known[dtype]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def derived(gpu: Gpu, block: Block) -> HardwareTable:
    """Return a hardware profile with the roofline's times. Raises ``RooflineError``."""
    times = roofline(gpu, block)
    return HardwareTable.model_construct(
        memory=gpu.memory_bytes,
        petals_forward_rps=forward_rps(times),
        petals_network_rps=network_rps(block.token_bytes),
        other_blocks=[_other_blocks(other) for other in times.others] or None,
        **_law_keys(times),
    )


def _other_blocks(times: StepLaw) -> OtherBlocksTable:
    return OtherBlocksTable.model_construct(**_law_keys(times))


def _law_keys(times: StepLaw) -> dict[str, Any]:
    """Return the keys that a profile and each row of its ``other_blocks`` have in common."""
    return {
        "decode": times.decode_s,
        "prefill_base": times.prefill_base_s,
        "prefill_per_token": times.prefill_slope_s,
        "context_slope": times.context_slope_s,
        "prefill_curve": times.prefill_curve_s,
        "session_slope": times.session_slope_s,
        "prefill_least": times.prefill_least_s,
        "experts_read": times.experts_s or None,
        "experts_share": times.experts_ratio or None,
        "window": times.window_tokens or None,
    }


def forward_rps(times: StepTimes) -> float:
    """Return tokens per second of one block, as PETALS measures it."""
    return PETALS_PROMPT_TOKENS / times.step_s(0, PETALS_PROMPT_TOKENS, 1)


def network_rps(token_bytes: float) -> float:
    """Return tokens per second over a connection that PETALS has not measured."""
    return PETALS_ASSUMED_BPS / (8 * token_bytes)


def times_of(table: HardwareTable) -> StepTimes:
    """Return the step times of a complete profile."""
    return replace(
        _times_of(table),
        step_base_s=table.step_base or 0.0,
        contention_ratio=table.contention or 0.0,
        others=tuple(_times_of(other) for other in table.other_blocks or ()),
    )


def _times_of(table: HardwareTable | OtherBlocksTable) -> StepTimes:
    """Return the times of one kind of block."""
    assert table.decode is not None
    assert table.prefill_base is not None and table.prefill_per_token is not None
    return StepTimes(
        decode_s=table.decode,
        prefill_base_s=table.prefill_base,
        prefill_slope_s=table.prefill_per_token,
        context_slope_s=table.context_slope or 0.0,
        prefill_curve_s=table.prefill_curve or 0.0,
        session_slope_s=table.session_slope or 0.0,
        prefill_least_s=table.prefill_least or 0.0,
        experts_s=table.experts_read or 0.0,
        experts_ratio=table.experts_share or 0.0,
        window_tokens=table.window or 0,
    )


def rescaled(table: HardwareTable, gpu: Gpu, measured: Block, block: Block) -> HardwareTable:
    """Return a profile that was measured on ``gpu`` with the block ``measured``, scaled to another ``block``.

    Each time is multiplied by the ratio of the two blocks' roofline times. A limit on the number of blocks
    was for the measured model, and is removed. Raises ``RooflineError``.
    """
    old, new = roofline(gpu, measured), roofline(gpu, block)
    ratios = {
        "decode": new.decode_s / old.decode_s,
        "prefill_base": new.prefill_least_s / old.prefill_least_s,
        "prefill_per_token": new.prefill_slope_s / old.prefill_slope_s,
        "prefill_curve": new.prefill_curve_s / old.prefill_curve_s,
        "context_slope": new.context_slope_s / old.context_slope_s,
        "session_slope": new.session_slope_s / old.session_slope_s,
        "petals_forward_rps": forward_rps(new) / forward_rps(old),
        "petals_network_rps": measured.token_bytes / block.token_bytes,
    }
    given = {key: value for key in ratios if (value := getattr(table, key)) is not None}
    update: dict[str, object] = {key: _rounded(value * ratios[key]) for key, value in given.items()}
    experts_s = _rounded(new.experts_s * (table.decode or 0.0) / old.decode_s)
    others = [_other_blocks(times_of(rescaled(table, gpu, measured, other))) for other in block.others]
    update |= {
        "experts_read": experts_s or None,
        "experts_share": new.experts_ratio or None,
        "window": block.window,
        "other_blocks": others or None,
        "block_cap": "none" if table.block_cap else None,
    }
    return table.model_copy(update=update)

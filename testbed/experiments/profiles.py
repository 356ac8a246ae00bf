"""Looks up profiles by name: those shipped in ``scenarios/profiles``, and a scenario's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from policies.interfaces import SessionSetup
from policies.problem import ModelSpec, ServerSpec, Wire, mean_cached_tokens
from policies.steps import StepTimes
from testbed.experiments.catalogue import (
    DTYPES,
    OF_REPRESENTATION,
    Gpu,
    filled,
    gpu_named,
    gpus,
    models,
    shipped,
    sizes_of_table,
)
from testbed.experiments.compute_tables import CalibrationTable
from testbed.experiments.experiment import Calibration
from testbed.experiments.fields import Table
from testbed.experiments.model_tables import HardwareTable, MeasuredTable, ModelTable
from testbed.experiments.problems import Key, KeyedError, unknown
from testbed.experiments.roofline import (
    Block,
    RooflineError,
    block_of,
    derived,
    forward_rps,
    has_own_bytes,
    network_rps,
    rescaled,
    times_of,
)

_log = logging.getLogger(__name__)


def _lookup(kind: str, name: str, key: Key, what: str) -> dict[str, Any]:
    profiles = shipped(kind)
    if name not in profiles:
        raise KeyedError(key, unknown(what, name, profiles))
    return profiles[name]


def _over(base: Table, top: Table) -> dict[str, Any]:
    """Return the values of ``base``, replaced by those that ``top`` has."""
    return {**base.model_dump(exclude_none=True), **top.model_dump(exclude_none=True)}


def _require(table: Table, names: tuple[str, ...], key: Key, remedy: str) -> None:
    """Raise ``KeyedError`` with those of ``names`` that ``table`` leaves out, if any."""
    missing = [name for name in names if getattr(table, name) is None]
    if len(missing) == 1:
        raise KeyedError((*key, missing[0]), f"is missing; give it, or {remedy}")
    if missing:
        listed = f"{', '.join(missing[:-1])} and {missing[-1]}"
        raise KeyedError(key, f"{listed} are missing; give them, or {remedy}")


def profiled(table: ModelTable) -> ModelTable:
    """Return ``table`` with missing keys from the profile that it names.

    Raises ``KeyedError`` for an unknown name.

    If ``table`` has another ``dtype`` than the profile, the profile's sizes that depend on it are dropped.
    """
    name = table.profile
    if name is None:
        return table
    own = shipped("models")
    if name in own:
        base = ModelTable.model_validate(own[name])
    elif name in models():
        base = models()[name]
    else:
        raise KeyedError(("model", "profile"), unknown("model", name, model_names()))
    if table.dtype not in (None, base.dtype):
        base = base.model_copy(update=dict.fromkeys(OF_REPRESENTATION))
    merged = {**base.model_dump(exclude_none=True), **table.model_dump(exclude_none=True)}
    return ModelTable.model_validate({"name": name, **merged})


def model_names() -> list[str]:
    """Return the names that ``model.profile`` can have."""
    return sorted({*shipped("models"), *models()})


@cache
def named_model(name: str, dtype: str | None = None) -> ModelTable:
    """Return all sizes of a model by name, in ``dtype`` (default: its profile's). Raises ``KeyedError``."""
    given = {"profile": name} if dtype is None else {"profile": name, "dtype": dtype}
    table = profiled(ModelTable.model_validate(given))
    sizes = sizes_of_table(table)
    assert sizes is not None and table.dtype is not None
    return filled(table, sizes, *DTYPES[table.dtype], name)


def resolve_model(table: ModelTable, wire: Wire | None = None) -> tuple[ModelTable, ModelSpec]:
    """Return ``[model]`` with all numbers, and as a ``ModelSpec``. Raises ``KeyedError`` for missing sizes.

    The attention cache of a token in a block defaults to 2 x hidden_size values. ``wire``: how hidden states are sent.
    """
    values = profiled(table)
    remedy = f"a profile ({', '.join(model_names())})"
    _require(values, ("name", "n_blocks", "hidden_size", "block_size"), ("model",), remedy)
    assert values.name and values.n_blocks and values.hidden_size and values.block_size
    value_bytes = values.value_bytes or 2
    sizes = sizes_of_table(values) if values.dtype and values.value_bytes else None
    blocks_bytes: tuple[float, ...] = ()
    if sizes is not None and values.dtype and not (sizes.are_alike or has_own_bytes(values, sizes)):
        blocks_bytes = sizes.blocks_bytes(DTYPES[values.dtype][1], value_bytes)
    spec = ModelSpec(
        name=values.name,
        n_blocks=values.n_blocks,
        hidden_size=values.hidden_size,
        block_bytes=values.block_size,
        cache_bytes_per_token=values.cache_per_token or 2.0 * values.hidden_size * value_bytes,
        value_bytes=value_bytes,
        petals_cache_tokens=values.petals_cache_tokens or 4096,
        blocks_bytes=blocks_bytes if len(set(blocks_bytes)) > 1 else (),
        wire=wire,
    )
    update = {
        "profile": None,
        "value_bytes": spec.value_bytes,
        "cache_per_token": spec.cache_bytes_per_token,
        "petals_cache_tokens": spec.petals_cache_tokens,
    }
    return values.model_copy(update=update), spec


_NEEDED = ("memory", "decode", "prefill_base", "prefill_per_token")
_TIMES = (
    "decode",
    "prefill_base",
    "prefill_per_token",
    "prefill_curve",
    "prefill_least",
    "step_base",
    "context_slope",
)
_OF_PETALS = ("petals_forward_rps", "petals_network_rps")
"""The keys of a complete hardware profile; those of PETALS only where its measurements are needed."""


@dataclass(frozen=True)
class Measured:
    """A shipped profile, with the GPU and the model's block that were measured.

    Its prefill times hold for prompts of ``shortest_prompt`` tokens or more.
    """

    table: HardwareTable
    gpu: Gpu
    block: Block
    shortest_prompt: int


@cache
def measured_profiles(calibration_set: str = "none") -> Mapping[str, Measured]:
    """Return the shipped hardware profiles by name, complete, with the changes of a calibration set."""
    calibrated = shipped("calibrations")[calibration_set].get("hardware", {})
    rows = {name: {**row, **calibrated.get(name, {})} for name, row in shipped("hardware").items()}
    found = {}
    for name in rows:
        row = rows[name]
        while "base" in row:
            row = {**rows[row["base"]], **{key: value for key, value in row.items() if key != "base"}}
        about = {key: row[key] for key in ("model", "dtype", "gpu", "shortest_prompt")}
        block = block_of(named_model(about["model"], about["dtype"]))
        assert block is not None
        table = HardwareTable.model_validate({k: v for k, v in row.items() if k not in about})
        found[name] = Measured(table, gpus()[about["gpu"]], block, about["shortest_prompt"])
    return found


class HardwareShelf:
    """Finds the hardware of one scenario by name: its own profiles, shipped profiles, and GPUs.

    ``block`` is the scenario's transformer block, ``None`` if ``[model]`` has too few sizes. A shipped
    profile that was measured with another block is scaled to this one, with a warning. A GPU has measured
    times if there are any for the block, else those of the roofline. With ``is_resolved`` the scenario's own
    tables are final.
    """

    def __init__(
        self,
        own: Mapping[str, HardwareTable],
        calibration_set: str,
        block: Block | None,
        *,
        is_resolved: bool = False,
    ) -> None:
        self._own = own
        self._measured = measured_profiles(calibration_set)
        self._block = block
        self._is_resolved = is_resolved

    def get(self, name: str, key: Key, *, for_petals: bool = False) -> HardwareTable:
        """Return the complete profile ``name``; ``for_petals``: PETALS' measurements are required, too.

        It has ``measured`` only if that was the scenario's block.

        Raises ``KeyedError``, at ``key`` if no hardware has that name.
        """
        is_final = self._is_resolved and name in self._own
        table = self._own[name] if is_final else self._get(name, key, ())
        remedy = f'copy the rest from another profile with base = "{name if gpu_named(name) else "..."}"'
        _require(table, _NEEDED + (_OF_PETALS if for_petals else ()), ("hardware", name), remedy)
        if table.measured is None or self._is_of_block(name, table.measured):
            return table
        return table.model_copy(update={"measured": None})

    def card(self, name: str) -> Gpu | None:
        """Return the GPU whose data sheet says what memory ``name`` has; ``None`` for a profile's own memory."""
        return None if name in self._own or name in self._measured else gpu_named(name)

    def sold_as(self, name: str) -> Gpu | None:
        """Return the GPU that ``name`` is, or that was measured under that name; ``None`` for the scenario's own hardware."""
        if name in self._own:
            return None
        measured = self._measured.get(name)
        return gpu_named(name) if measured is None else measured.gpu

    def _is_of_block(self, name: str, measured: MeasuredTable) -> bool:
        """Return whether a calibrated profile was measured with the scenario's block; warn if not, or if unknown."""
        block = self._block
        of = measured.block_values, measured.heads_width, measured.dtype
        if block is None:
            which = "whether that is the scenario's model is unknown, since [model] has only sizes in bytes"
        elif (block.values, block.width, block.dtype) != of:
            which = f"not for {block.words}"
        else:
            return True
        _log.warning(
            'hardware "%s" was measured for %s (%s), and its times are used unchanged: %s',
            name,
            measured.model,
            measured.dtype,
            which,
        )
        return False

    def _get(self, name: str, key: Key, seen: tuple[str, ...]) -> HardwareTable:
        if name in self._own and name not in seen:
            table = self._own[name]
            # A table with a shipped profile's name changes that profile.
            base = table.base or (name if name in self._measured else None)
            key = ("hardware", name, "base")
        elif name in self._measured:
            return self._shipped(name, key)
        elif (gpu := gpu_named(name)) is not None:
            return self._of_gpu(gpu, key)
        elif name in seen:
            raise KeyedError(key, f'"{name}" is based on itself ({" -> ".join([*seen, name])})')
        else:
            names = dict.fromkeys([*self._own, *self._measured, *gpus()])
            raise KeyedError(key, unknown("hardware", name, names))
        if base is None:
            return table
        merged = _over(self._get(base, key, (*seen, name)), table)
        merged.pop("base", None)
        if table.measured is None and any(getattr(table, time) is not None for time in _TIMES):
            merged.pop("measured", None)
        return HardwareTable.model_validate(merged)

    def _shipped(self, name: str, key: Key) -> HardwareTable:
        """Return a shipped profile, scaled to the scenario's block if it was measured with another."""
        measured, block = self._measured[name], self._block
        if block is not None and block.computes_as(measured.block):
            about = {"model": block.model, "dtype": block.dtype}
            sizes = {"block_values": block.values, "heads_width": block.width}
            of = MeasuredTable.model_validate(about | sizes)
            return measured.table.model_copy(update={"measured": of})
        if block is None:
            _log.warning(
                'hardware "%s" was measured for %s, and its times are used unchanged, since [model] has only '
                "sizes in bytes; to scale them, give [model] a profile, or a family with its sizes",
                name,
                measured.block.words,
            )
            return measured.table
        try:
            table = rescaled(measured.table, measured.gpu, measured.block, block)
        except RooflineError as error:
            raise KeyedError(key, f'"{name}" was measured for {measured.block.words}, and {error}') from None
        assert table.decode is not None and measured.table.decode
        _log.warning(
            'hardware "%s" was measured for %s: its times are scaled to %s by the roofline (decode x %.3g)',
            name,
            measured.block.words,
            block.words,
            table.decode / measured.table.decode,
        )
        return table

    def _of_gpu(self, gpu: Gpu, key: Key) -> HardwareTable:
        if self._block is None:
            raise KeyedError(
                key,
                f'"{gpu.name}" is a GPU, whose times are computed from the sizes of the model; give [model] '
                f"a profile ({', '.join(model_names())}), or family, heads, vocab and dtype",
            )
        try:
            return of_gpu(gpu, self._block, self._measured)
        except RooflineError as error:
            raise KeyedError(key, f"{error} as model.dtype") from None


def of_gpu(gpu: Gpu, block: Block, measured: Mapping[str, Measured]) -> HardwareTable:
    """Return a GPU's profile: times measured on it for such a block, else the roofline's.

    The memory is that of the data sheet. Raises ``RooflineError`` if the GPU does not support the block's
    ``dtype``.
    """
    table = derived(gpu, block)
    found = next((m for m in measured.values() if m.gpu is gpu and m.block.computes_as(block)), None)
    if found is None:
        return table
    times = times_of(found.table)
    return found.table.model_copy(
        update={
            "memory": gpu.memory_bytes,
            "block_cap": None,
            "petals_forward_rps": found.table.petals_forward_rps or forward_rps(times),
            "petals_network_rps": found.table.petals_network_rps or network_rps(block.token_bytes),
        }
    )


def server_spec(
    name: str,
    hardware: str,
    table: HardwareTable,
    memory_bytes: float | None,
    lengths: tuple[int, int],
    token_bytes: int,
    pattern: tuple[int, ...] = (),
    times: StepTimes | None = None,
    stored: ModelSpec | None = None,
) -> ServerSpec:
    """Return a server with a complete hardware profile, and with its own memory if given.

    ``decode_s`` (tau_j) is the time at the mean context of a request of ``lengths``, the (input, output)
    tokens that the placement is designed for. If the profile lacks PETALS' measurements, they are computed: a
    forward of 1,024 tokens with the profile's times, and a connection that PETALS has not measured, for
    hidden states of ``token_bytes``. ``pattern`` has the kinds of the model's blocks, if they differ.
    ``times`` are the server's, if they are not the profile's, and ``stored`` is the model as it stores it.
    """
    assert table.memory
    profile = times_of(table)
    times = profile if times is None else times
    forward = table.petals_forward_rps or forward_rps(profile)
    context = mean_cached_tokens(*lengths) if times.context_slope_s else 0.0
    if times.window_tokens:
        context = min(context, times.window_tokens)
    return ServerSpec(
        name=name,
        hardware=hardware,
        memory_bytes=memory_bytes or table.memory,
        petals_forward_rps=forward
        if times == profile
        else forward * forward_rps(times) / forward_rps(profile),
        petals_network_rps=table.petals_network_rps or network_rps(token_bytes),
        block_cap=table.block_cap if isinstance(table.block_cap, int) else None,
        stored=stored,
        **{
            **vars(times),
            "decode_s": times.decode_s + times.context_slope_s * context,
            "decode_context_tokens": context,
            "pattern": pattern if times.others else (),
        },
    )


def resolve_calibration(
    table: CalibrationTable, session_setup: SessionSetup
) -> tuple[CalibrationTable, Calibration]:
    """Return ``[calibration]`` with all numbers; ``session_setup`` is which of the two constants holds.

    Raises ``KeyedError`` for an unknown set, and if only tokens or only prompts have overheads.
    """
    shipped = dict(_lookup("calibrations", table.set, ("calibration", "set"), "calibration set"))
    shipped.pop("hardware", None)
    values = CalibrationTable.model_validate({**shipped, **table.model_dump(exclude_none=True)})
    inputs = bool(values.input_overhead_base or values.input_overhead_per_token)
    if bool(values.token_overhead) != inputs:
        given, other = (
            ("input_overhead_base", "token_overhead") if inputs else ("token_overhead", "input_overhead_base")
        )
        raise KeyedError(
            ("calibration", given),
            f"is given without {other}; overheads replace the transmission on the links, so give both",
        )
    setup = values.session_setup_petals if session_setup == "petals" else values.session_setup_proposed
    return values, Calibration(
        name=values.set,
        token_overhead_s=values.token_overhead or 0.0,
        input_overhead_base_s=values.input_overhead_base or 0.0,
        input_overhead_slope_s=values.input_overhead_per_token or 0.0,
        initial_delay_s=values.initial_delay or 0.0,
        session_setup_s=(setup or 0.0) if values.session_setup else 0.0,
    )

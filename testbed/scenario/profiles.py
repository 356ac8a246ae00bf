"""Profiles by name: the shipped ones in ``scenarios/profiles``, and those that a scenario defines."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from policies.problem import ModelSpec, ServerSpec, mean_cached_tokens
from testbed.scenario.experiment import Calibration
from testbed.scenario.fields import Table
from testbed.scenario.problems import Key, KeyedError, unknown
from testbed.scenario.schema import CalibrationTable, HardwareTable, ModelTable


@cache
def _shipped(kind: str) -> dict[str, dict[str, Any]]:
    text = (resources.files("scenarios") / "profiles" / f"{kind}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _lookup(kind: str, name: str, key: Key, what: str) -> dict[str, Any]:
    profiles = _shipped(kind)
    if name not in profiles:
        raise KeyedError(key, unknown(what, name, profiles))
    return profiles[name]


def _over(base: Table, top: Table) -> dict[str, Any]:
    """Values of ``base`` with those that ``top`` gives on top."""
    return {**base.model_dump(exclude_none=True), **top.model_dump(exclude_none=True)}


def _require(table: Table, names: tuple[str, ...], key: Key, remedy: str) -> None:
    for name in names:
        if getattr(table, name) is None:
            raise KeyedError((*key, name), f"is missing; {remedy}")


def profiled(table: ModelTable) -> ModelTable:
    """``table`` over the profile that it names. Raises ``KeyedError`` if there is none of that name."""
    if table.profile is None:
        return table
    shipped = ModelTable.model_validate(_lookup("models", table.profile, ("model", "profile"), "model"))
    return ModelTable.model_validate({"name": table.profile, **_over(shipped, table)})


def resolve_model(table: ModelTable) -> tuple[ModelTable, ModelSpec]:
    """All numbers of ``[model]``. The attention cache of a token defaults to 2 x hidden_size values."""
    values = profiled(table)
    remedy = f"give it, or a profile ({', '.join(_shipped('models'))})"
    _require(values, ("name", "n_blocks", "hidden_size", "block_size"), ("model",), remedy)
    assert values.name and values.n_blocks and values.hidden_size and values.block_size
    value_bytes = values.value_bytes or 2
    spec = ModelSpec(
        name=values.name,
        n_blocks=values.n_blocks,
        hidden_size=values.hidden_size,
        block_bytes=values.block_size,
        cache_bytes_per_token=values.cache_per_token or 2.0 * values.hidden_size * value_bytes,
        value_bytes=value_bytes,
        petals_cache_tokens=values.petals_cache_tokens or 4096,
    )
    update = {
        "profile": None,
        "value_bytes": spec.value_bytes,
        "cache_per_token": spec.cache_bytes_per_token,
        "petals_cache_tokens": spec.petals_cache_tokens,
    }
    return values.model_copy(update=update), spec


_OPTIONAL = (
    "base",
    "block_cap",
    "step_base",
    "context_slope",
    "prefill_curve",
    "contention",
    "session_slope",
)
"""What a complete hardware profile may do without."""


class HardwareShelf:
    """Hardware profiles of one scenario: its own first, then the shipped ones as the calibration has them."""

    def __init__(self, own: Mapping[str, HardwareTable], calibration_set: str) -> None:
        self._own = own
        calibrated = _shipped("calibrations")[calibration_set].get("hardware", {})
        self._shipped = {
            name: HardwareTable.model_validate({**profile, **calibrated.get(name, {})})
            for name, profile in _shipped("hardware").items()
        }

    def get(self, name: str, key: Key) -> HardwareTable:
        """The complete profile ``name``. Raises ``KeyedError`` at ``key`` if there is none."""
        if name not in self._own and name not in self._shipped:
            raise KeyedError(key, unknown("hardware", name, dict.fromkeys([*self._own, *self._shipped])))
        table = self._get(name, key, ())
        remedy = 'give it, or take the rest from another profile with base = "..."'
        names = tuple(n for n in HardwareTable.model_fields if n not in _OPTIONAL)
        _require(table, names, ("hardware", name), remedy)
        return table

    def _get(self, name: str, key: Key, seen: tuple[str, ...]) -> HardwareTable:
        if name in self._own and name not in seen:
            table = self._own[name]
            # A table with a shipped profile's name changes that profile.
            base = table.base or (name if name in self._shipped else None)
            key = ("hardware", name, "base")
        elif name in self._shipped:
            table = self._shipped[name]
            base = table.base
        elif name in seen:
            raise KeyedError(key, f'"{name}" is based on itself ({" -> ".join([*seen, name])})')
        else:
            raise KeyedError(key, unknown("hardware", name, dict.fromkeys([*self._own, *self._shipped])))
        if base is None:
            return table
        merged = _over(self._get(base, key, (*seen, name)), table)
        merged.pop("base", None)
        return HardwareTable.model_validate(merged)


def server_spec(
    name: str, hardware: str, table: HardwareTable, memory_bytes: float | None, lengths: tuple[int, int]
) -> ServerSpec:
    """A server of a complete hardware profile, with its own memory if given.

    tau_j is that at the mean context of a request of ``lengths``, the design's (input, output) tokens.
    """
    assert table.memory and table.petals_forward_rps and table.petals_network_rps
    assert table.decode is not None
    assert table.prefill_base is not None and table.prefill_per_token is not None
    return ServerSpec(
        name=name,
        hardware=hardware,
        memory_bytes=memory_bytes or table.memory,
        decode_s=table.decode + (table.context_slope or 0.0) * mean_cached_tokens(*lengths),
        prefill_base_s=table.prefill_base,
        prefill_slope_s=table.prefill_per_token,
        petals_forward_rps=table.petals_forward_rps,
        petals_network_rps=table.petals_network_rps,
        block_cap=table.block_cap if isinstance(table.block_cap, int) else None,
        step_base_s=table.step_base or 0.0,
        context_slope_s=table.context_slope or 0.0,
        decode_context_tokens=mean_cached_tokens(*lengths) if table.context_slope else 0.0,
        prefill_curve_s=table.prefill_curve or 0.0,
        contention_ratio=table.contention or 0.0,
        session_slope_s=table.session_slope or 0.0,
    )


def resolve_calibration(table: CalibrationTable, petals: bool) -> tuple[CalibrationTable, Calibration]:
    """All numbers of ``[calibration]``; ``petals`` chooses PETALS' session setup."""
    shipped = dict(_lookup("calibrations", table.set, ("calibration", "set"), "calibration set"))
    shipped.pop("hardware", None)
    values = CalibrationTable.model_validate({**shipped, **table.model_dump(exclude_none=True)})
    setup = values.session_setup_petals if petals else values.session_setup_proposed
    return values, Calibration(
        name=values.set,
        token_overhead_s=values.token_overhead or 0.0,
        input_overhead_base_s=values.input_overhead_base or 0.0,
        input_overhead_slope_s=values.input_overhead_per_token or 0.0,
        initial_delay_s=values.initial_delay or 0.0,
        session_setup_s=(setup or 0.0) if values.session_setup else 0.0,
    )

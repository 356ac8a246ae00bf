"""``testbed hardware``, and models by name for ``testbed model``: GPUs, models, derived block times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.steps import StepTimes
from testbed.errors import UserError
from testbed.experiments.catalogue import DTYPES, Gpu, gpus, sizes_of_table
from testbed.experiments.problems import KeyedError, unknown
from testbed.experiments.profiles import Measured, measured_profiles, model_names, named_model
from testbed.experiments.roofline import Block, RooflineError, block_of, roofline, times_of
from testbed.experiments.schema import ModelTable
from testbed.experiments.units import counted
from testbed.terminal import columns

PROMPTS = (128, 1024)
"""Prompt lengths in the table of prefill times, in tokens."""
_ERROR_PROMPTS = (20, 250, 1000, 4000)
_CHOSEN_ON = "helix-a100"
"""The only profile on which the roofline's efficiencies were chosen."""


def hardware_command(name: str | None, model: str | None, dtype: str | None) -> tuple[dict[str, Any], str]:
    """Return all GPUs, or those of ``name``, with the times of the model's blocks if a model is named.

    Returns the answer for ``--json`` and the text for people. Raises ``UserError``.
    """
    chosen = _chosen(name)
    if model is None:
        if dtype is not None:
            raise UserError("--dtype is of a model: name one with --model, or leave out --dtype")
        rows = [_sheet(gpu) for gpu in chosen]
        return {"hardware": rows}, _sheets_text(rows)
    table = _model(model, dtype)
    block = block_of(table)
    assert block is not None
    rows = [{**_sheet(gpu), **_times(gpu, block)} for gpu in chosen]
    return {"model": model_answer(table), "hardware": rows}, "\n".join(
        [_model_line(model_answer(table)), "", *_times_text(rows)]
    )


def errors_command() -> tuple[dict[str, Any], str]:
    """Compare the roofline's times with all measured profiles; ``error_ratio`` is roofline / measured - 1."""
    rows = [
        row
        for name, measured in measured_profiles().items()
        if not name.endswith(("-large", "-sweep"))  # these have the times of another profile, and more memory
        for row in _errors(name, measured)
    ]
    cells = [
        (
            row["profile"],
            row["gpu"],
            row["model"],
            row["what"],
            f"{1e3 * row['measured_s']:.4g}",
            f"{1e3 * row['roofline_s']:.4g}",
            f"{100 * row['error_ratio']:+.0f} %",
            "chosen on it" if row["chosen_on"] else "",
        )
        for row in rows
    ]
    titles = ("measured as", "GPU", "model", "per block", "measured ms", "roofline ms", "error", "")
    return {"errors": rows}, "\n".join(columns([titles, *cells]))


def _errors(name: str, measured: Measured) -> list[dict[str, Any]]:
    real, law = times_of(measured.table), roofline(measured.gpu, measured.block)
    pairs = [("decode of a token", real.decode_s, law.decode_s)]
    if real.session_slope_s:
        pairs.append(("each further session", real.session_slope_s, law.session_slope_s))
    pairs += [
        (f"prefill of {n} tokens", real.prefill_s(n), law.prefill_s(n))
        for n in _ERROR_PROMPTS
        if n >= measured.shortest_prompt
    ]
    return [
        {
            "profile": name,
            "gpu": measured.gpu.name,
            "model": measured.block.words,
            "what": what,
            "measured_s": real_s,
            "roofline_s": law_s,
            "error_ratio": law_s / real_s - 1,
            "chosen_on": name == _CHOSEN_ON,
        }
        for what, real_s, law_s in pairs
    ]


def list_command() -> tuple[dict[str, Any], str]:
    """Return the models of the catalogue, for ``--json`` and as a table."""
    rows = [model_answer(named_model(name)) for name in model_names()]
    titles = (
        "model",
        "blocks",
        "hidden",
        "heads",
        "KV heads",
        "feed-forward",
        "vocab",
        "dtype",
        "MB per block",
        "cache B per token",
    )
    keys = (
        "name",
        "n_blocks",
        "hidden_size",
        "n_heads",
        "n_kv_heads",
        "feed_forward",
        "vocabulary",
        "dtype",
        "block_bytes",
        "cache_bytes_per_token",
    )
    cells = [
        (*(f"{row[key]}" for key in keys[:-2]), f"{row[keys[-2]] / 1e6:.1f}", f"{row[keys[-1]]:.0f}")
        for row in rows
    ]
    return {"models": rows}, "\n".join(columns([titles, *cells]))


def model_command(name: str, dtype: str | None) -> tuple[dict[str, Any], str]:
    """Return one model of the catalogue, for ``--json`` and as text. Raises ``UserError``."""
    answer = model_answer(_model(name, dtype))
    return answer, "\n".join(
        [
            _model_line(answer),
            f"all blocks: {answer['n_blocks'] * answer['block_bytes'] / 1e9:.4g} GB; a session of 1,000 "
            f"tokens: {answer['n_blocks'] * answer['cache_bytes_per_token'] / 1e3:.4g} MB of caches",
            f"block times: testbed hardware --model {name} --dtype {answer['dtype']}",
        ]
    )


def model_answer(table: ModelTable) -> dict[str, Any]:
    """Return a model's sizes; ``block_bytes`` and ``cache_bytes_per_token`` are of one block."""
    sizes = sizes_of_table(table)
    assert sizes is not None and table.block_size and table.cache_per_token
    return {
        "name": table.name,
        "family": sizes.family,
        "n_blocks": sizes.n_blocks,
        "hidden_size": sizes.hidden_size,
        "n_heads": sizes.n_heads,
        "n_kv_heads": sizes.n_kv_heads,
        "head_size": sizes.head_size,
        "feed_forward": sizes.feed_forward,
        "vocabulary": sizes.vocabulary,
        "dtype": table.dtype,
        "value_bytes": table.value_bytes,
        "block_bytes": table.block_size,
        "cache_bytes_per_token": table.cache_per_token,
    }


def _model_line(answer: dict[str, Any]) -> str:
    return (
        f"{answer['name']} in {answer['dtype']}: {answer['family']}, "
        f"{counted(answer['n_blocks'], 'blocks')}, hidden size {answer['hidden_size']}, {answer['n_heads']} "
        f"heads ({answer['n_kv_heads']} of keys and values), feed-forward {answer['feed_forward']}, "
        f"{answer['vocabulary']} tokens\nper block: s_m {answer['block_bytes'] / 1e6:.3f} MB; s_c "
        f"{answer['cache_bytes_per_token']:.0f} B per token of a session"
    )


def _chosen(name: str | None) -> Sequence[Gpu]:
    if name is None:
        return list(gpus().values())
    if name in gpus():
        return [gpus()[name]]
    measured = measured_profiles()
    if name in measured:
        return [measured[name].gpu]
    raise UserError(unknown("hardware", name, [*gpus(), *measured]))


def _model(name: str, dtype: str | None) -> ModelTable:
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    try:
        return named_model(name, dtype)
    except KeyedError as error:
        raise UserError(error.what) from None


def _sheet(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "memory_bytes": gpu.memory_bytes,
        "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
        "flops": dict(gpu.flops),
        "source": gpu.source,
        "profiles": [name for name, m in measured_profiles().items() if m.gpu is gpu],
    }


def _sheets_text(rows: Sequence[dict[str, Any]]) -> str:
    titles = ("name", "GB", "GB/s", "fp32", "fp16", "bf16", "measured as", "source")
    cells = [
        (
            row["name"],
            f"{row['memory_bytes'] / 1e9:.4g}",
            f"{row['bandwidth_bytes_per_s'] / 1e9:.4g}",
            *(
                f"{row['flops'][t] / 1e12:.4g}" if t in row["flops"] else "-"
                for t in ("fp32", "fp16", "bf16")
            ),
            ", ".join(row["profiles"]) or "-",
            row["source"],
        )
        for row in rows
    ]
    return "\n".join(
        [
            *columns([titles, *cells]),
            "",
            "fp32, fp16, bf16: dense TFLOPS. Block times of a model: --model NAME (`testbed model list`).",
        ]
    )


def _times(gpu: Gpu, block: Block) -> dict[str, Any]:
    """Return the roofline's times for the block on this GPU, and those measured on it for such a block."""
    found = {
        name: _seconds(times_of(m.table))
        for name, m in measured_profiles().items()
        if m.gpu is gpu and m.block.computes_as(block)
    }
    try:
        law: dict[str, Any] | None = _seconds(roofline(gpu, block))
        why = None
    except RooflineError as error:
        law, why = None, str(error)
    return {
        "fits_blocks": int(gpu.memory_bytes // block.block_bytes),
        "roofline": law,
        "no_roofline_because": why,
        "measured": found,
    }


def _seconds(times: StepTimes) -> dict[str, float]:
    prompts = {f"prefill_{n}_s": times.prefill_s(n) for n in PROMPTS}
    return {"decode_s": times.decode_s, **prompts, "session_slope_s": times.session_slope_s}


def _times_text(rows: Sequence[dict[str, Any]]) -> list[str]:
    titles = (
        "name",
        "blocks in memory",
        "times",
        "decode",
        *(f"prefill of {n}" for n in PROMPTS),
        "per further session",
    )
    cells: list[tuple[str, ...]] = []
    for row in rows:
        kinds = {"roofline": row["roofline"], **{f"measured ({k})": t for k, t in row["measured"].items()}}
        for kind, times in kinds.items():
            shown = ["-"] * 4 if times is None else [f"{1e3 * value:.4g}" for value in times.values()]
            cells.append((row["name"], str(row["fits_blocks"]), kind, *shown))
    lines = columns([titles, *cells])
    lines += [
        "",
        "Times in ms per block, of one session with an empty cache; a server uses measured times if there "
        "are any.",
    ]
    return lines + [f"-: {row['no_roofline_because']}" for row in rows if row["no_roofline_because"]]

"""``testbed hardware``, and models by name for ``testbed model``: GPUs, models, derived block times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from policies.steps import StepTimes
from testbed.errors import UserError
from testbed.experiments.catalogue import DTYPES, Gpu, gpu_named, gpus, sizes_of_table
from testbed.experiments.model_tables import ModelTable
from testbed.experiments.problems import KeyedError, unknown
from testbed.experiments.profiles import Measured, measured_profiles, model_names, named_model
from testbed.experiments.roofline import Block, RooflineError, block_of, roofline, times_of
from testbed.experiments.servers import MEMORY_RESERVE
from testbed.experiments.units import counted
from testbed.terminal import columns

PROMPTS = (128, 1024)
"""Prompt lengths in the table of prefill times, in tokens."""
_ERROR_PROMPTS = (20, 250, 1000, 4000)
_SESSION = 1000
"""Tokens of the session whose caches ``model show`` states."""
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
        "experts",
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
        "n_experts",
    )
    cells = [
        (
            *(f"{row[key]}" for key in keys[:-3]),
            _span([n_bytes / 1e6 for n_bytes in listed(row["block_bytes"])], "{:.1f}"),
            _span(listed(row["cache_bytes_per_token"]), "{:.0f}"),
            "-" if row["n_experts"] is None else f"{row['experts_per_token']} of {row['n_experts']}",
        )
        for row in rows
    ]
    return {"models": rows}, "\n".join(columns([titles, *cells]))


def model_command(name: str, dtype: str | None) -> tuple[dict[str, Any], str]:
    """Return one model of the catalogue, for ``--json`` and as text. Raises ``UserError``."""
    table = _model(name, dtype)
    answer, sizes = model_answer(table), sizes_of_table(table)
    assert sizes is not None
    block_bytes = listed(answer["block_bytes"], sizes.n_blocks)
    cached = zip(listed(answer["cache_bytes_per_token"], sizes.n_blocks), sizes.blocks, strict=True)
    cache_bytes = sum(size * min(_SESSION, block.window or _SESSION) for size, block in cached)
    return answer, "\n".join(
        [
            _model_line(answer),
            f"all blocks: {sum(block_bytes) / 1e9:.4g} GB, checkpoint: {answer['checkpoint_bytes'] / 1e9:.4g} "
            f"GB; a token reads {answer['active_bytes_per_token'] / 1e9:.4g} GB of blocks and head; a session "
            f"of {_SESSION:,} tokens: {cache_bytes / 1e6:.4g} MB of caches",
            f"block times: testbed hardware --model {name} --dtype {answer['dtype']}",
        ]
    )


def model_answer(table: ModelTable) -> dict[str, Any]:
    """Return a model's sizes.

    ``block_bytes``, ``cache_bytes_per_token`` and ``cache_window_tokens`` are of one block, or a list where
    blocks differ. ``active_bytes_per_token`` are the weights that a token's decode reads in blocks and head,
    ``checkpoint_bytes`` those of all tensors.
    """
    sizes = sizes_of_table(table)
    assert sizes is not None and table.block_size and table.cache_per_token and table.value_bytes
    assert table.dtype is not None
    stored, value_bytes = DTYPES[table.dtype][1], table.value_bytes
    # A profile may have bytes of its own for its blocks, which are alike.
    block_bytes = [table.block_size] if sizes.are_alike else sizes.blocks_bytes(stored, value_bytes)
    mixture = next((block for block in sizes.blocks if block.n_experts), None)
    more_bytes = sizes.n_blocks * (table.block_size - sizes.block_bytes(stored, value_bytes))
    more_bytes = more_bytes if sizes.are_alike else 0.0
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
        "n_experts": mixture.n_experts if mixture else None,
        "experts_per_token": mixture.n_chosen if mixture else None,
        "dtype": table.dtype,
        "value_bytes": value_bytes,
        "block_bytes": one_or_all(block_bytes),
        "active_bytes_per_token": sizes.active_bytes(stored, value_bytes) + more_bytes,
        "cache_bytes_per_token": one_or_all([float(b.cache_values * value_bytes) for b in sizes.blocks]),
        "cache_window_tokens": one_or_all([block.window for block in sizes.blocks]),
        "checkpoint_bytes": sizes.checkpoint_bytes(stored, value_bytes) + more_bytes,
    }


def listed(value: Any, n_blocks: int = 1) -> list[float]:
    """Return a size of ``model_answer`` as a list with one item per block, or one item if all are equal."""
    return value if isinstance(value, list) else [value] * n_blocks


def one_or_all(values: Sequence[Any]) -> Any:
    """Return a size of every block as ``model_answer`` has it: one value if all are equal, else a list."""
    return values[0] if len(set(values)) == 1 else list(values)


def _span(values: Sequence[float], form: str) -> str:
    """Return the smallest and the largest of ``values``, or their one value."""
    ends = [form.format(value) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def of_blocks(answer: dict[str, Any]) -> str:
    """Return the bytes of a block and of its cache for people, as ranges where blocks differ."""
    blocks_mb = [n_bytes / 1e6 for n_bytes in listed(answer["block_bytes"])]
    cache_bytes = _span(listed(answer["cache_bytes_per_token"]), "{:.0f}")
    return f"s_m {_span(blocks_mb, '{:.3f}')} MB; s_c {cache_bytes} B per token of a session"


def _model_line(answer: dict[str, Any]) -> str:
    windows = [tokens for tokens in listed(answer["cache_window_tokens"]) if tokens is not None]
    experts = (
        f", {answer['experts_per_token']} of {answer['n_experts']} experts" if answer["n_experts"] else ""
    )
    return (
        f"{answer['name']} in {answer['dtype']}: {answer['family']}, "
        f"{counted(answer['n_blocks'], 'blocks')}, hidden size {answer['hidden_size']}, {answer['n_heads']} "
        f"heads ({answer['n_kv_heads']} of keys and values), feed-forward {answer['feed_forward']}{experts}, "
        f"{answer['vocabulary']} tokens\nper block: {of_blocks(answer)}"
        + (f", in {len(windows)} blocks of the last {windows[0]:.0f} tokens only" if windows else "")
    )


def _chosen(name: str | None) -> Sequence[Gpu]:
    if name is None:
        return list(gpus().values())
    if (gpu := gpu_named(name)) is not None:
        return [gpu]
    measured = measured_profiles()
    if name in measured:
        return [measured[name].gpu]
    raise UserError(unknown("hardware", name, [*gpus(), *measured]))


def _model(name: str, dtype: str | None) -> ModelTable:
    dtype = {"awq": "int4", "gptq": "int4"}.get(dtype or "", dtype)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype {dtype}: choose one of {', '.join(DTYPES)} (awq and gptq are int4)")
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
        "fits_blocks": int(gpu.memory_bytes * (1 - MEMORY_RESERVE) // block.block_bytes),
        "roofline": law,
        "no_roofline_because": why,
        "measured": found,
    }


def _seconds(times: StepTimes) -> dict[str, float]:
    prompts = {f"prefill_{n}_s": times.prefill_s(n) for n in PROMPTS}
    return {"decode_s": times.decode_s, **prompts, "session_slope_s": times.further_s(2)}


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
        f"Blocks in memory: of a server by the GPU's name, which keeps {MEMORY_RESERVE:.0%} of it free.",
        "Times in ms per block, of one session with an empty cache; a server uses measured times if there "
        "are any.",
    ]
    return lines + [f"-: {row['no_roofline_because']}" for row in rows if row["no_roofline_because"]]

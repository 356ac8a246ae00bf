"""BloomBee's measured steps beside our law: `python -m benchmarks bloombee` prints the table of docs/validation.md.

BloomBee's authors published tokens per second (median) of whole batches on two A100-PCIe-40 in one room, each with
half of the layers, in fp16: 128 tokens, greedy, before and after a rewrite of their software. A step of a batch of B
sequences then takes B divided by that. Our law is the roofline's time of all blocks for B decodes, and what software
costs: `base_s` per step and `sequence_s` for each further sequence. These two are fitted on llama-7b alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from policies.steps import StepTimes
from testbed.experiments.catalogue import gpus
from testbed.experiments.profiles import named_model
from testbed.experiments.roofline import Block, block_of, roofline

BATCHES = 1, 4, 32
FITTED = "llama-7b"
MEASURED = {
    "before": {
        "llama-7b": (7.41, 30.2, 134.0),
        "llama-13b": (7.72, 30.0, 115.6),
        "falcon-7b": (7.42, 27.3, 119.6),
    },
    "after": {
        "llama-7b": (11.30, 48.6, 130.0),
        "llama-13b": (9.36, 36.5, 109.6),
        "falcon-7b": (8.58, 31.2, 148.2),
    },
}
"""Tokens per second of a batch of each of ``BATCHES``, by version and model."""
_MEAN_POSITION = 64
"""Cached tokens at the mean step of 128; the prompts' lengths are not published."""
_FALCON_HIDDEN, _FALCON_HEAD = 4544, 64


class Fit(NamedTuple):
    """What software costs, in seconds: per step, and for each further sequence of its batch."""

    base_s: float
    sequence_s: float


class Compared(NamedTuple):
    """Seconds of a step, measured and by the law with the ``Fit`` of its version."""

    version: str
    model: str
    batch: int
    measured_s: float
    roofline_s: float
    law_s: float

    @property
    def error(self) -> float:
        """Law over measured, minus 1."""
        return self.law_s / self.measured_s - 1


def blocks() -> dict[str, tuple[int, StepTimes]]:
    """Return the number of blocks and a block's times on the A100, by model."""
    gpu = gpus()["a100-40gb"]
    found = {}
    for name, profile in (("llama-7b", "llama-2-7b"), ("llama-13b", "llama-2-13b")):
        table = named_model(profile, "fp16")
        block = block_of(table)
        assert block is not None and table.n_blocks
        found[name] = table.n_blocks, roofline(gpu, block)
    return {**found, "falcon-7b": (32, roofline(gpu, _falcon()))}


def _falcon() -> Block:
    """Return a block of Falcon-7B: 71 heads that share one pair of keys and values, no gate in its feed-forward part."""
    h = _FALCON_HIDDEN
    values = h * (h + 2 * _FALCON_HEAD) + h * h + 8 * h * h
    return Block("falcon-7b", "fp16", values, h, 2.0 * values, 2.0 * 2 * _FALCON_HEAD, 2 * h)


def roofline_s(model: tuple[int, StepTimes], batch: int) -> float:
    """Return the seconds of a step of ``batch`` decodes through all blocks, one server after the other."""
    n_blocks, times = model
    return times.batch_s(n_blocks, [_MEAN_POSITION] * batch, range(0))


def fit(measured: Sequence[float], model: tuple[int, StepTimes]) -> Fit:
    """Return the software's cost that leaves the least sum of squared relative errors on ``measured``, in tokens/s."""
    rows = []
    for batch, rate in zip(BATCHES, measured, strict=True):
        step_s = batch / rate
        rows.append((1 / step_s, (batch - 1) / step_s, 1 - roofline_s(model, batch) / step_s))
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    ay, by = (sum(row[i] * row[2] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    return Fit((ay * bb - by * ab) / determinant, (aa * by - ab * ay) / determinant)


def compared() -> Iterator[Compared]:
    """Yield every published figure beside the law, whose software cost is that of llama-7b in the same version."""
    models = blocks()
    for version, rates in MEASURED.items():
        software = fit(rates[FITTED], models[FITTED])
        for name, measured in rates.items():
            for batch, rate in zip(BATCHES, measured, strict=True):
                ours_s = roofline_s(models[name], batch)
                law_s = ours_s + software.base_s + (batch - 1) * software.sequence_s
                yield Compared(version, name, batch, batch / rate, ours_s, law_s)


def table() -> str:
    """Return the table of docs/validation.md."""
    lines = [
        "| model | version | batch | measured | roofline alone | with software as on llama-7b | differs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in compared():
        role = " (fitted)" if row.model == FITTED else ""
        times = " | ".join(f"{1e3 * time_s:.1f} ms" for time_s in (row.measured_s, row.roofline_s, row.law_s))
        error = f"{row.error:+.1%}".replace("-", "\N{MINUS SIGN}").replace("%", " %")
        lines.append(f"| {row.model}{role} | {row.version} | {row.batch} | {times} | {error} |")
    return "\n".join(lines)


def run(argv: Sequence[str]) -> int:
    """Print the table and the fits."""
    print(table())
    for version, rates in MEASURED.items():
        software = fit(rates[FITTED], blocks()[FITTED])
        print(
            f"{version}: {1e3 * software.base_s:.1f} ms per step, "
            f"{1e3 * software.sequence_s:.2f} ms per further sequence"
        )
    return 0

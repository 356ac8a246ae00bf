"""Sentences on where the paper's time model agrees with the measurement, and where it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from policies.steps import StepTimes
from testbed.experiments.units import DURATION, counted
from testbed.studies.calibrate.batches import BatchFit, BatchPoint
from testbed.studies.calibrate.client import ClientFit
from testbed.studies.calibrate.fit import Contention, Fit
from testbed.studies.calibrate.linear import LinearFit
from testbed.studies.calibrate.points import Point

NOISE_RATIO = 0.25
"""If the quartiles of equal steps are further apart than this, relative to their median, other programs
disturbed them.
"""
MATTERS_RATIO = 0.05
"""Effects that change a time by less than this share are reported as no effect."""


def show_s(value_s: float, digits: int = 4) -> str:
    """Returns a duration as text with a unit, with so many significant digits."""
    return DURATION.format(float(f"{value_s:.{digits}g}"))


def verdict(fit: Fit, client: ClientFit | None = None, batches: BatchFit | None = None) -> list[str]:
    """Returns one sentence per finding, the most important ones first."""
    sentences = [
        *_noise_sentence(fit),
        _decode_sentence(fit),
        _context_sentence(fit),
        _step_base_sentence(fit),
        _prefill_sentence(fit),
        _contention_sentence(fit.contention),
    ]
    if batches is not None:
        sentences.append(_batch_sentence(batches))
    return sentences if client is None else [*sentences, _client_sentence(client)]


def _batch_sentence(batches: BatchFit) -> str:
    most = max(point.n_decodes for point in batches.points)
    alone = BatchPoint(max(point.n_blocks for point in batches.points), 1, 0.0, 0, 0, 0.0, False)
    alone_s, together_s = batches.fitted_s(alone), batches.fitted_s(replace(alone, n_decodes=most))
    ratio = (
        f"; by it {most} decodes together take {together_s / alone_s:.2f} times as long as one"
        if alone_s
        else ""
    )
    mean, largest = _percent(batches.mean_error_ratio), _percent(batches.max_error_ratio)
    use = "do not use the batched profile: " if batches.mean_error_ratio > NOISE_RATIO else ""
    return (
        f"Batches: {use}the law of several sessions in one step is off by {mean} in the mean and {largest} at most on "
        f"{len(batches.errors_ratio())} points that the fit has not seen (R² {batches.fit.r2:.4f} on the others){ratio}."
    )


def _client_sentence(client: ClientFit) -> str:
    token = client.token
    line = (
        f"Client: embedding, head and choice take {show_s(token.time_s)} per output token (quartiles "
        f"{show_s(token.low_s)} and {show_s(token.high_s)}), whatever the chain; the paper's model does not "
        "have "
        "this time, [compute] hub_token sets it"
    )
    if not client.prompts:
        return f"{line}."
    longest = client.prompts[-1]
    return f"{line}. The first token after a prompt of {longest.n_tokens} takes {show_s(longest.time_s)}."


def _noise_sentence(fit: Fit) -> list[str]:
    spread, kind = max((fit.spread_ratio(kind), kind) for kind in ("decode", "prefill"))
    if spread <= NOISE_RATIO:
        return []
    return [
        f"Noise: do not use this profile. The quartiles of equal {kind} steps are {_percent(spread)} of their median "
        "apart, so something else used the machine; measure again while it is idle, or with more --rounds."
    ]


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _decode_sentence(fit: Fit) -> str:
    paper, better = fit.paper.decode, fit.better.decode
    tau = show_s(fit.paper.times.decode_s)
    if paper.max_ratio <= MATTERS_RATIO:
        return (
            f"Decode: the paper's model holds; k tau with tau = {tau} is within {_percent(paper.max_ratio)} "
            f"of every measured step (rms {_percent(paper.rms_ratio)}, R² {paper.r2:.4f})."
        )
    closer = (
        f"the better model is within {_percent(better.max_ratio)} (rms {_percent(better.rms_ratio)})"
        if better.rms_ratio < paper.rms_ratio
        else f"nor does the better model fit better (up to {_percent(better.max_ratio)})"
    )
    worst = _worst(paper, fit.alone("decode"))
    return (
        f"Decode: the paper's model does not hold; k tau with tau = {tau} is off by up to "
        f"{_percent(paper.max_ratio)} (rms {_percent(paper.rms_ratio)}), most with "
        f"{counted(worst.n_blocks, 'blocks')} and {worst.cached_tokens:.0f} cached tokens; {closer}."
    )


def _worst(fit: LinearFit, points: Sequence[Point]) -> Point:
    return max(zip(fit.residuals_ratio, points, strict=True), key=lambda pair: abs(pair[0]))[1]


def _span(points: Sequence[Point], of: Callable[[Point], float]) -> tuple[float, float]:
    values = [of(p) for p in points]
    return min(values), max(values)


def _length(point: Point) -> float:
    return point.n_input_tokens


def context_growth_ratio(times: StepTimes, low_tokens: float, high_tokens: float) -> float:
    """Returns by which share a block takes longer with ``high_tokens`` cached than with ``low_tokens``."""
    low_s = times.decode_s + times.context_slope_s * low_tokens
    return times.context_slope_s * (high_tokens - low_tokens) / low_s if low_s else 0.0


def _context_sentence(fit: Fit) -> str:
    low, high = _span(fit.alone("decode"), lambda p: p.cached_tokens)
    growth = context_growth_ratio(fit.better.times, low, high)
    slope = fit.better.estimate("context_slope_s")
    if low == high:
        return "Context: only one length was measured, so its effect is unknown."
    if not slope.is_certain and growth >= MATTERS_RATIO:
        return (
            f"Context: its effect is lost in the noise; fitted are {_percent(growth)} from {low:.0f} to "
            f"{high:.0f} "
            "cached tokens, less than twice the standard error."
        )
    if growth < MATTERS_RATIO:
        return (
            f"Context: no effect that matters; from {low:.0f} to {high:.0f} cached tokens a block's step "
            f"changes by {_percent(growth)}."
        )
    return (
        f"Context: a block's decode step takes {1 + growth:.2f} times as long with {high:.0f} cached tokens as "
        f"with {low:.0f} ({show_s(slope.value)} more per cached token); the paper's tau does not depend on "
        "it."
    )


def _step_base_sentence(fit: Fit) -> str:
    base, times = fit.better.estimate("step_base_s"), fit.better.times
    low, high = _span(fit.alone("decode"), lambda p: p.n_blocks)
    if low == high:
        return (
            "Blocks: only one number of blocks was measured, so a cost per step cannot be separated "
            "from one per block."
        )
    one_s = times.decode_s * low
    if not base.is_certain or base.value < MATTERS_RATIO * (base.value + one_s):
        return f"Blocks: a step's time is proportional to its blocks, from {low:.0f} to {high:.0f} of them."
    in_blocks = f", as much as {base.value / times.decode_s:.1f} blocks" if times.decode_s else ""
    return (
        f"Blocks: a step costs {show_s(base.value)} however many blocks it has{in_blocks}; the paper's model "
        "spreads that over the blocks, too much on long ranges and too little on short ones."
    )


def _prefill_sentence(fit: Fit) -> str:
    paper, better = fit.paper.prefill, fit.better.prefill
    line = (
        f"k ({show_s(fit.paper.times.prefill_slope_s)} l + {show_s(fit.paper.times.prefill_base_s)})"
        f" has R² {paper.r2:.4f}"
    )
    if paper.max_ratio <= MATTERS_RATIO:
        return f"Prefill: the paper's model holds; {line} and is within {_percent(paper.max_ratio)}."
    _, longest = _span(fit.alone("prefill"), _length)
    curve_s = fit.better.times.prefill_curve_s * longest**2
    bend_ratio = curve_s / (curve_s + fit.better.times.prefill_slope_s * longest) if curve_s else 0.0
    bend = (
        f"; it grows faster than its length: {_percent(bend_ratio)} of what {longest:.0f} tokens add to a block is "
        f"in the square ({show_s(fit.better.times.prefill_curve_s)} l²)"
        if bend_ratio > MATTERS_RATIO
        else ""
    )
    closer = f"the better model's largest is {_percent(better.max_ratio)} (rms {_percent(better.rms_ratio)})"
    return (
        f"Prefill: {line}, with errors of up to {_percent(paper.max_ratio)} (rms {_percent(paper.rms_ratio)})"
        f"{bend}; {closer}."
    )


def _contention_sentence(contention: Contention | None) -> str:
    if contention is None:
        return "Sessions: only one at a time was measured, so contention is unknown."
    n, ratio = contention.ratios[-1]
    if contention.is_one_at_a_time:
        return (
            f"Sessions: with {n} at once a step takes {ratio:.2f} times as long: steps run one after another. "
            "The paper's model does not have this; [compute] serial = true in the scenario makes the "
            "timing stub "
            "queue them, so the profile has no contention."
        )
    if abs(ratio - 1) < MATTERS_RATIO:
        return f"Sessions: {n} at once do not slow each other ({ratio:.2f} times)."
    return (
        f"Sessions: with {n} at once a step takes {ratio:.2f} times as long, {_percent(contention.ratio.value)} "
        "more per further session; the paper's model does not have this."
    )

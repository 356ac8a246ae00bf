"""The paper's time model and the better one, fitted to the same points.

Paper (its equations for tau and tau^I): a decode step of k blocks takes ``k tau``, a prefill of l tokens ``k
(slope l + intercept)``, whatever else happens.

Better, as the timing stub computes it: a decode step with c cached tokens takes ``step_base + k (decode +
context_slope c)``, a prefill of l tokens ``step_base + k (prefill_curve l² + prefill_slope l +
prefill_base)``; either takes ``1 + contention (n - 1)`` times as long while n sessions compute at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policies.steps import StepTimes
from testbed.errors import UserError
from testbed.studies.calibrate.linear import Estimate, LinearFit, fit_linear, r_squared, rms
from testbed.studies.calibrate.points import Point


def time_s(times: StepTimes, point: Point) -> float:
    """Returns the time (seconds) that a model predicts for the conditions of ``point``."""
    is_prefill = point.kind == "prefill"
    position, n_tokens = (0, point.n_input_tokens) if is_prefill else (point.cached_tokens, 1)
    alone_s = times.step_s(position, n_tokens, point.n_blocks)
    return alone_s * (1 + times.contention_ratio * (point.n_sessions - 1))


@dataclass(frozen=True)
class ModelFit:
    """One model fitted to decode steps and prefills of one session at a time."""

    decode: LinearFit
    prefill: LinearFit
    times: StepTimes

    def estimate(self, name: str) -> Estimate:
        """Returns the estimate of a parameter such as ``decode_s``; 0 if the model does not have it.

        That of ``step_base_s`` comes from decode steps.
        """
        fits = self.decode.estimates, self.prefill.estimates
        return next((f[name] for f in fits if name in f), Estimate(0.0, None))


@dataclass(frozen=True)
class Contention:
    """How much steps slow down while several sessions compute at once.

    ``ratios``: (number of sessions n, time of a step divided by that with one session). ``ratio``: the fitted
    growth per further session. ``r2`` and ``residuals_ratio`` are as in ``LinearFit``. ``is_one_at_a_time``:
    a step takes about n times as long, as if steps were computed one after another.
    """

    ratio: Estimate
    ratios: tuple[tuple[int, float], ...]
    r2: float
    residuals_ratio: tuple[float, ...]

    @property
    def is_one_at_a_time(self) -> bool:
        return self.ratio.value >= 0.85

    @property
    def rms_ratio(self) -> float:
        return rms(self.residuals_ratio)


@dataclass(frozen=True)
class Fit:
    """All that was fitted. ``own_prefill_base_s``: the cost per step if it is fitted to prefills instead of
    decodes.
    """

    points: tuple[Point, ...]
    paper: ModelFit
    better: ModelFit
    contention: Contention | None
    own_prefill_base_s: Estimate

    def spread_ratio(self, kind: str) -> float:
        """Returns (upper - lower quartile) / median of equal steps; of several conditions the median of
        these.
        """
        return float(np.median([(p.high_s - p.low_s) / p.time_s for p in self.alone(kind)]))

    def alone(self, kind: str) -> list[Point]:
        """Returns the points of one session at a time with pauses, in the order of the fits' residuals."""
        return _alone(self.points, kind)


def _alone(points: Sequence[Point], kind: str) -> list[Point]:
    return [p for p in points if p.kind == kind and p.n_sessions == 1 and p.is_paced]


def fit_times(points: Sequence[Point]) -> Fit:
    """Fit both models. Raises ``UserError`` if there is no prefill or no decode step to fit."""
    decode, prefill = _alone(points, "decode"), _alone(points, "prefill")
    for kind, some in (("prefill", prefill), ("decode", decode)):
        if not some or min(p.time_s for p in some) <= 0:
            raise UserError(f"there are no {kind} times above 0 to fit; measure again with more rounds")
    paper = _paper(decode, prefill)
    better, own_base = _better(decode, prefill)
    contention = _contention(points, better.times)
    return Fit(tuple(points), paper, better, contention, own_base)


def _paper(decode: Sequence[Point], prefill: Sequence[Point]) -> ModelFit:
    tau = fit_linear({"decode_s": [p.n_blocks for p in decode]}, [p.time_s for p in decode])
    tau_in = fit_linear(_prefill_columns(prefill), [p.time_s for p in prefill])
    times = StepTimes(tau.value("decode_s"), tau_in.value("prefill_base_s"), tau_in.value("prefill_slope_s"))
    return ModelFit(tau, tau_in, times)


def _prefill_columns(prefill: Sequence[Point]) -> dict[str, list[float]]:
    return {
        "prefill_slope_s": [p.n_blocks * p.n_input_tokens for p in prefill],
        "prefill_base_s": [p.n_blocks for p in prefill],
    }


def _better(decode: Sequence[Point], prefill: Sequence[Point]) -> tuple[ModelFit, Estimate]:
    """Fits the better model. Also returns the cost per step that prefills alone would have.

    The cost per step is fitted to decode steps, of which a session has most, and is fixed in the fit of
    prefills.
    """
    steps = fit_linear(
        {
            "decode_s": [p.n_blocks for p in decode],
            "context_slope_s": [p.n_blocks * p.cached_tokens for p in decode],
            "step_base_s": [1.0] * len(decode),
        },
        [p.time_s for p in decode],
    )
    times_s = [p.time_s for p in prefill]
    base_s = min(steps.value("step_base_s"), min(times_s))
    columns: dict[str, list[float]] = {
        **_prefill_columns(prefill),
        "prefill_curve_s": [p.n_blocks * p.n_input_tokens**2 for p in prefill],
    }
    prompts = fit_linear(columns, times_s, fixed=[base_s] * len(prefill))
    own = fit_linear({**columns, "own_s": [1.0] * len(prefill)}, times_s)
    times = StepTimes(
        steps.value("decode_s"),
        prompts.value("prefill_base_s"),
        prompts.value("prefill_slope_s"),
        steps.value("step_base_s"),
        steps.value("context_slope_s"),
        prompts.value("prefill_curve_s"),
    )
    return ModelFit(steps, prompts, times), own.estimates["own_s"]


def _contention(points: Sequence[Point], times: StepTimes) -> Contention | None:
    """Fits contention to steps without pauses that were measured alone and with other sessions.

    Steps with equal blocks and input lengths are compared, each divided by its time according to ``times``:
    with other sessions fewer steps count, so that their contexts differ. None if nothing was measured with
    other sessions.
    """
    alone: dict[tuple[int, int], list[float]] = {}
    busy = [p for p in points if p.kind == "decode" and not p.is_paced]
    for p in (p for p in busy if p.n_sessions == 1):
        ratio = p.time_s / time_s(times, p)
        alone.setdefault((p.n_blocks, p.n_input_tokens), []).append(ratio)
    many = [
        (p.n_sessions, p.time_s / time_s(times, p) / float(np.median(alone[p.n_blocks, p.n_input_tokens])))
        for p in busy
        if p.n_sessions > 1 and (p.n_blocks, p.n_input_tokens) in alone
    ]
    if not many:
        return None
    fitted = fit_linear(
        {"contention_ratio": [n - 1 for n, _ in many]},
        [ratio for _, ratio in many],
        fixed=[1.0] * len(many),
    )
    growth = fitted.value("contention_ratio")
    measured = [1.0, *(ratio for _, ratio in many)]
    r2 = r_squared(measured, [1.0, *(1 + growth * (n - 1) for n, _ in many)])
    ratios = ((1, 1.0), *sorted(many))
    return Contention(fitted.estimates["contention_ratio"], ratios, r2, fitted.residuals_ratio)

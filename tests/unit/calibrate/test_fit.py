from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from policies.steps import StepTimes
from testbed.errors import UserError
from testbed.studies.calibrate.fit import Fit, fit_times
from testbed.studies.calibrate.linear import fit_linear
from testbed.studies.calibrate.memory import MemorySample, fit_memory
from testbed.studies.calibrate.verdict import verdict

PLAIN = StepTimes(decode_s=2e-3, prefill_base_s=5e-3, prefill_slope_s=1e-4)
FULL = StepTimes(2e-3, 5e-3, 1e-4, 1.5e-3, 3e-6, prefill_curve_s=2e-7, contention_ratio=0.2)
Calibrate = Callable[..., Fit]


def close(found: StepTimes, true: StepTimes, rel: float = 1e-6) -> None:
    for f in fields(StepTimes):
        if f.name in ("others", "pattern"):  # a calibration measures one kind of block
            continue
        assert getattr(found, f.name) == pytest.approx(getattr(true, f.name), rel=rel, abs=1e-12), f.name


def alone(times: StepTimes) -> StepTimes:
    """Without contention, which is fitted apart."""
    return replace(times, contention_ratio=0.0)


def test_exact_times_of_the_papers_model_are_recovered_with_r2_one_and_no_residual(
    calibrate: Calibrate,
) -> None:
    fit = calibrate(PLAIN)
    close(fit.paper.times, PLAIN)
    close(fit.better.times, PLAIN)
    for model in (fit.paper, fit.better):
        assert model.decode.r2 == pytest.approx(1) and model.prefill.r2 == pytest.approx(1)
        assert model.decode.max_ratio < 1e-9 and model.prefill.max_ratio < 1e-9
    assert fit.contention is not None
    assert fit.contention.ratio.value == pytest.approx(0, abs=1e-9)


def test_the_better_model_recovers_step_base_context_slope_and_contention(calibrate: Calibrate) -> None:
    fit = calibrate(FULL)
    close(fit.better.times, alone(FULL))
    assert fit.better.decode.max_ratio < 1e-9
    assert fit.paper.decode.max_ratio > 0.2
    assert fit.contention is not None
    assert fit.contention.ratio.value == pytest.approx(0.2)
    assert fit.contention.r2 == pytest.approx(1)
    assert fit.own_prefill_base_s.value == pytest.approx(FULL.step_base_s)


def test_with_noise_the_estimates_are_within_four_of_their_standard_errors(calibrate: Calibrate) -> None:
    fit = calibrate(FULL, noise=0.02, rounds=4)
    for name in (
        "decode_s",
        "context_slope_s",
        "step_base_s",
        "prefill_base_s",
        "prefill_slope_s",
        "prefill_curve_s",
    ):
        found = fit.better.estimate(name)
        assert found.error is not None and found.error > 0
        assert abs(found.value - getattr(FULL, name)) < 4 * found.error, name
        assert found.value == pytest.approx(getattr(FULL, name), rel=0.15), name


def test_steps_that_wait_for_each_other_are_told_from_contention(calibrate: Calibrate) -> None:
    serial = calibrate(PLAIN, is_serial=True).contention
    slowed = calibrate(FULL).contention
    assert serial is not None and serial.is_one_at_a_time
    assert slowed is not None and not slowed.is_one_at_a_time


def test_what_cannot_be_told_apart_is_left_out_instead_of_guessed() -> None:
    one_count = fit_linear({"per_block": [2.0, 2.0], "constant": [1.0, 1.0]}, [4.0, 4.0])
    assert one_count.value("per_block") == pytest.approx(2)
    assert (one_count.estimates["constant"].value, one_count.estimates["constant"].error) == (0.0, None)


def test_nothing_fitted_is_negative() -> None:
    falling = fit_linear({"per_block": [1.0, 2.0, 3.0], "constant": [1.0, 1.0, 1.0]}, [1.0, 3.0, 5.0])
    assert falling.value("constant") == 0.0
    assert falling.value("per_block") > 0


def test_relative_errors_weigh_the_same_for_short_and_long_times() -> None:
    fit = fit_linear({"slope": [1.0, 1000.0]}, [1.1, 900.0])
    assert fit.value("slope") == pytest.approx(1.0, abs=0.02)


def test_without_measured_times_there_is_nothing_to_fit() -> None:
    with pytest.raises(UserError, match="no prefill times"):
        fit_times([])


def test_the_verdict_says_that_the_papers_model_holds_where_it_does(calibrate: Calibrate) -> None:
    decode, context, blocks, prefill, sessions = verdict(calibrate(PLAIN))
    assert "the paper's model holds" in decode and "tau = 2 ms" in decode
    assert "no effect that matters" in context
    assert "proportional to its blocks" in blocks
    assert "the paper's model holds" in prefill
    assert "do not slow each other" in sessions


def test_the_verdict_names_context_step_cost_and_contention_where_they_matter(calibrate: Calibrate) -> None:
    decode, context, blocks, prefill, sessions = verdict(calibrate(FULL))
    assert "does not hold" in decode
    assert "1.72 times as long" in context and "3 us more per cached token" in context
    assert "a step costs 1.5 ms however many blocks" in blocks
    assert "errors of up to" in prefill and "50.6 % of what 512 tokens add" in prefill
    assert "with 8 at once a step takes 2.40 times as long" in sessions


def test_the_verdict_warns_of_a_measurement_that_something_disturbed(calibrate: Calibrate) -> None:
    calm, noisy = calibrate(FULL, noise=0.02, rounds=4), calibrate(FULL, noise=0.5, rounds=4)
    assert calm.spread_ratio("decode") < 0.1 < 0.4 < noisy.spread_ratio("decode")
    assert not any("do not use" in sentence for sentence in verdict(calm))
    assert verdict(noisy)[0].startswith("Noise: do not use this profile.")


def test_the_verdict_does_not_call_a_context_without_effect_whose_effect_it_cannot_tell(
    calibrate: Calibrate,
) -> None:
    fit = calibrate(FULL, noise=0.5, rounds=4)
    estimate = fit.better.decode.estimates["context_slope_s"]
    unsure = replace(estimate, value=estimate.value or 1e-5, error=10.0)
    better = replace(
        fit.better,
        decode=replace(
            fit.better.decode, estimates={**fit.better.decode.estimates, "context_slope_s": unsure}
        ),
        times=replace(fit.better.times, context_slope_s=unsure.value),
    )
    (context,) = (line for line in verdict(replace(fit, better=better)) if line.startswith("Context"))
    assert "lost in the noise" in context


def test_the_verdict_names_a_queue(calibrate: Calibrate) -> None:
    assert "one after another" in verdict(calibrate(PLAIN, is_serial=True))[-1]


def test_a_single_block_and_length_are_said_to_tell_nothing(calibrate: Calibrate) -> None:
    fit = calibrate(PLAIN)
    few = [p for p in fit.points if p.n_blocks == 8 and p.n_input_tokens == 512 and p.n_sessions == 1]
    sentences = verdict(fit_times(few))
    assert "one length was measured" in sentences[1]
    assert "one number of blocks" in sentences[2]
    assert "only one at a time" in sentences[4]


def test_memory_is_recovered_per_block_and_cached_token() -> None:
    def used(k: int, n: int) -> MemorySample:
        return MemorySample(k, n, 100, 1e6 + k * (3e6 + n * 100 * 512))

    fit = fit_memory([used(1, 0), used(2, 0), used(8, 0), used(8, 1), used(8, 4)])
    assert fit is not None
    assert fit.base_bytes.value == pytest.approx(1e6)
    assert fit.block_bytes.value == pytest.approx(3e6)
    assert fit.token_bytes.value == pytest.approx(512)
    assert fit.fit.r2 == pytest.approx(1)
    assert fit.used_bytes(8, 4, 100) == pytest.approx(used(8, 4).used_bytes)


def test_a_backend_that_cannot_tell_its_memory_gets_no_fit() -> None:
    assert fit_memory([MemorySample(1, 0, 100, 0.0)]) is None

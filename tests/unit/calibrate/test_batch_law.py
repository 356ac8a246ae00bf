"""The law of several sessions in one step: measured on a stub that obeys it, and on one that does not."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nodes.compute import StubCompute, StubProfile
from policies.steps import Blocks, StepTimes
from testbed.experiments import load_experiment
from testbed.experiments.stub import stub_profile
from testbed.studies.calibrate.batches import (
    BatchCase,
    BatchFit,
    BatchPlan,
    BatchSample,
    fit_batches,
    measure_batches,
    plan_batches,
)
from testbed.studies.calibrate.fit import Fit
from testbed.studies.calibrate.plan import make_plan
from testbed.studies.calibrate.profile import Subject, profile_text
from testbed.studies.calibrate.report import report_markdown, report_text
from testbed.studies.calibrate.tables import answer_of
from testbed.studies.calibrate.verdict import verdict
from tests.support.manual_clock import ManualClock

TOKEN_BYTES = 32
KNOWN = StepTimes(
    2e-3, 5e-3, 1e-4, step_base_s=1.5e-3, context_slope_s=3e-6, prefill_curve_s=2e-7, session_slope_s=4e-4
)
SUBJECT = Subject("blocks", "small", "bloom", 8, 64, 256, "cpu", "float32", "plain", 2, 4e9, 49152, 64)
SCENARIO = """
hardware_files = ["profile.toml"]
compute = {{ batching = "continuous" }}
servers = [{{ hardware = "{hardware}", site = "A", count = 3 }}]
clients = {{ site = "A" }}
workload = {{ rate = 1, n_requests = 2, n_input_tokens = 4, n_output_tokens = 4 }}
[model]
{model}
[network]
kind = "clusters"
pairs = [{{ sites = ["A", "A"], rtt = "1 ms", rate = "1 Gbit/s" }}]
"""
OWN = 'family = "bloom"\nn_blocks = 8\nhidden_size = 64\nheads = 4\nvocab = 512\ndtype = "fp32"'
Calibrate = Callable[..., Fit]


class Superlinear(StepTimes):
    """A step's time grows with the square of its decodes."""

    def batch_s(
        self, blocks: Blocks, positions: Sequence[int], prompt: range, sizes: Sequence[int] = ()
    ) -> float:
        return super().batch_s(blocks, positions, prompt, sizes) * (1 + len(positions) ** 2)


async def measured(times: StepTimes, n_blocks: int) -> BatchFit:
    clock = ManualClock()
    compute = StubCompute(StubProfile(TOKEN_BYTES, times, batching="continuous"), clock)
    plan = plan_batches(make_plan(n_blocks, 2048, rounds=2), (1, 2, 4, 8), 2048)
    assert plan is not None
    opened: list[object] = []
    work = asyncio.ensure_future(
        measure_batches(plan, compute, clock, lambda n: bytes(n * TOKEN_BYTES), close=opened.append)
    )
    while not work.done():
        await clock.advance(100.0)
    n_groups = 2 * len({case.n_blocks for case in plan.cases})
    n_prompts = sum(case.n_prompt_tokens > 0 for case in plan.cases)
    assert len(opened) == 3 * (n_groups * 9 + n_prompts), "those of three rounds: all are closed"
    return fit_batches(work.result())


def batches(times: StepTimes = KNOWN, n_blocks: int = 8) -> BatchFit:
    return asyncio.run(measured(times, n_blocks))


def test_a_server_that_obeys_the_law_is_fitted_exactly_and_judged_by_what_was_held_out() -> None:
    found = batches()
    for name in ("decode_s", "session_slope_s", "context_slope_s", "step_base_s"):
        assert getattr(found.times, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3)
    for name in ("prefill_base_s", "prefill_slope_s", "prefill_curve_s"):
        assert getattr(found.times, name) == pytest.approx(getattr(KNOWN, name), rel=1e-2)
    n_held_out = sum(point.is_held_out for point in found.points)
    assert n_held_out == len(found.errors_ratio()) == round(len(found.points) / 4)
    assert found.max_error_ratio < 1e-3 and found.fit.r2 > 0.999999
    assert {(point.n_decodes, point.n_prompt_tokens > 0) for point in found.points} == {
        *((n, False) for n in (1, 2, 4, 8)),
        *((n, True) for n in (0, 4, 8)),
    }
    assert {point.n_blocks for point in found.points} == {4, 8}


def test_a_server_that_does_not_obey_it_is_found_out(calibrate: Calibrate) -> None:
    superlinear = Superlinear(**{name: getattr(KNOWN, name) for name in KNOWN.__dataclass_fields__})
    found = batches(superlinear)
    assert found.mean_error_ratio > 0.25
    (sentence,) = (line for line in verdict(calibrate(KNOWN), batches=found) if line.startswith("Batches"))
    assert "do not use the batched profile" in sentence


def test_one_block_is_enough_as_decodes_with_a_prompt_cost_a_step_once() -> None:
    found = batches(n_blocks=1)
    assert found.times.step_base_s == pytest.approx(KNOWN.step_base_s, rel=1e-3)
    assert found.times.decode_s == pytest.approx(KNOWN.decode_s, rel=1e-3)


def test_sessions_can_be_given_their_contexts_without_computing_them() -> None:
    async def samples(fill: Callable[[Any, int], None] | None) -> list[BatchSample]:
        clock = ManualClock()
        compute = StubCompute(StubProfile(TOKEN_BYTES, KNOWN, batching="continuous"), clock)
        plan = BatchPlan((BatchCase(2, False, 3, 0), BatchCase(2, False, 0, 50)), (50,), rounds=1)
        payload, close = (lambda n: bytes(n * TOKEN_BYTES)), compute.close_session
        work = asyncio.ensure_future(measure_batches(plan, compute, clock, payload, close=close, fill=fill))
        while not work.done():
            await clock.advance(100.0)
        return work.result()

    filled: list[int] = []

    def fill(session: Any, n_tokens: int) -> None:
        session.apply(0, [0] * n_tokens)
        filled.append(n_tokens)

    given, computed = asyncio.run(samples(fill)), asyncio.run(samples(None))
    assert filled == 2 * 3 * [50], "three sessions in each of two rounds"
    times_s = {sample.n_decodes: sample.time_s for sample in computed if not sample.round}
    assert {sample.n_decodes: sample.time_s for sample in given if not sample.round} == pytest.approx(times_s)


def test_a_model_of_few_tokens_has_no_room_for_batches() -> None:
    assert plan_batches(make_plan(2, 16), (1, 2, 4, 8), 16) is None
    assert plan_batches(make_plan(2, None), (1, 2, 4, 8), None) is not None


def test_the_profile_gives_the_stub_the_law_and_says_how_well_it_fits(
    tmp_path: Path, calibrate: Calibrate
) -> None:
    found = batches()
    text = profile_text("here", calibrate(KNOWN), SUBJECT, batches=found)
    (tmp_path / "profile.toml").write_text(text, encoding="utf-8")
    assert "which the fit has not seen, off by 0.0 % in the mean" in text
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(SCENARIO.format(hardware="here-batched", model=OWN), encoding="utf-8")
    stub = stub_profile(load_experiment(str(scenario)), 0)
    assert stub.batching == "continuous"
    for n_blocks, positions, prompt in (
        (8, (20,), range(0)),
        (3, (20, 300, 7), range(40)),
        (5, (), range(100)),
    ):
        expected_s = KNOWN.batch_s(n_blocks, positions, prompt)
        assert stub.times.batch_s(n_blocks, positions, prompt) == pytest.approx(expected_s, rel=1e-3)
    tables = tomllib.loads(text)["hardware"]
    assert tables["here"]["session_slope"] == tables["here-batched"]["session_slope"]
    assert "session_slope" not in tables["here-paper"]


def test_reports_and_json_have_the_law_and_every_point(calibrate: Calibrate) -> None:
    found, fit = batches(), calibrate(KNOWN)
    text = report_text(SUBJECT, fit, None, [], found)
    assert "b_d (each further decode, per block)" in text and "400 us" in text
    report = report_markdown("here", SUBJECT, fit, None, None, [], [], found)
    assert report.count("| held out |") == len(found.errors_ratio())
    answer = answer_of("here", SUBJECT, fit, None, None, found)["batches"]
    assert len(answer["points"]) == len(found.points)
    assert answer["held_out_max_error"] == found.max_error_ratio
    assert answer["session_slope_s"]["value"] == found.times.session_slope_s


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (OWN, None),
        (OWN.replace("hidden_size = 64", "hidden_size = 128"), "not for bloom-8x128 (fp32)"),
        (OWN.replace("fp32", "bf16"), "not for bloom-8x64 (bf16)"),
        ('name = "m"\nn_blocks = 8\nhidden_size = 64\nblock_size = "200 kB"', "has only sizes in bytes"),
    ],
)
def test_a_profile_that_was_measured_for_another_model_warns(
    model: str,
    words: str | None,
    tmp_path: Path,
    calibrate: Calibrate,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "profile.toml").write_text(profile_text("here", calibrate(KNOWN), SUBJECT), encoding="utf-8")
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        SCENARIO.format(hardware="mine", model=model) + '[hardware.mine]\nbase = "here"\nmemory = "1 GB"\n',
        encoding="utf-8",
    )
    load_experiment(str(scenario))
    if words is None:
        assert not caplog.messages
        return
    assert len(caplog.messages) == 1 and words in caplog.messages[0]
    assert 'hardware "mine" was measured for small (fp32)' in caplog.messages[0]


def test_a_law_by_which_a_decode_takes_no_time_is_said_without_a_ratio(calibrate: Calibrate) -> None:
    found = batches()
    nothing = replace(found, times=StepTimes(0.0, 1e-3, 1e-4))
    (said,) = (line for line in verdict(calibrate(KNOWN), batches=nothing) if line.startswith("Batches"))
    assert "on the others)." in said and "decodes together" not in said

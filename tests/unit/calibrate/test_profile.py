from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from policies.problem import Hop, RequestSpec, service_s
from policies.steps import StepTimes
from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.stub import stub_profile
from testbed.studies.calibrate.fit import Fit, time_s
from testbed.studies.calibrate.points import Point
from testbed.studies.calibrate.profile import Subject, profile_text

TIMES = StepTimes(2e-3, 5e-3, 1e-4, step_base_s=1.5e-3, context_slope_s=3e-6, prefill_curve_s=2e-7)
SUBJECT = Subject("blocks", "small", "bloom", 8, 64, 256, "cpu", "float32", "plain", 2, 4e9, 49152, 64)
SCENARIO = """
hardware_files = {files}
[model]
profile = "bloom-176b"
[[servers]]
hardware = "{hardware}"
site = "A"
count = 60
memory = "10 GB"
[clients]
site = "A"
[network]
kind = "clusters"
pairs = [{{ sites = ["A", "A"], rtt = "10 ms", rate = "1 Gbit/s" }}]
[workload]
rate = 0.5
n_requests = 3
n_input_tokens = 20
n_output_tokens = 12
"""
Calibrate = Callable[..., Fit]
Load = Callable[..., Experiment]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The experiment of a scenario with servers of ``hardware`` from ``files``, and more text at its end."""

    def run(hardware: str, files: Sequence[str] = ("profile.toml",), more: str = "") -> Experiment:
        path = tmp_path / "scenario.toml"
        path.write_text(SCENARIO.format(hardware=hardware, files=list(files)) + more, encoding="utf-8")
        return load_experiment(str(path))

    return run


@pytest.fixture
def profile(tmp_path: Path, calibrate: Calibrate) -> Path:
    path = tmp_path / "profile.toml"
    path.write_text(profile_text("here", calibrate(TIMES), SUBJECT), encoding="utf-8")
    return path


def point(kind: str, n_blocks: int, tokens: int) -> Point:
    assert kind in ("prefill", "decode")
    if kind == "prefill":
        return Point("prefill", n_blocks, tokens, 0.0, 1, 1, 0.0, 0.0, 0.0)
    return Point("decode", n_blocks, 0, tokens, 1, 1, 0.0, 0.0, 0.0)


@pytest.mark.usefixtures("profile")
def test_a_scenario_with_the_profile_gives_the_stub_the_times_that_were_measured(load: Load) -> None:
    stub = stub_profile(load("here"), 0)
    for n_blocks in (1, 3, 8):
        for tokens in (1, 20, 500):
            decode_s, prefill_s = (
                time_s(TIMES, point(kind, n_blocks, tokens)) for kind in ("decode", "prefill")
            )
            assert stub.times.step_s(tokens, 1, n_blocks) == pytest.approx(decode_s, rel=1e-5)
            assert stub.times.step_s(0, tokens, n_blocks) == pytest.approx(prefill_s, rel=1e-5)


@pytest.mark.usefixtures("profile")
def test_policies_see_tau_at_the_mean_context_of_the_scenarios_lengths(load: Load) -> None:
    problem = load("here").problem
    # Steps find 20, 21, ..., 30 tokens cached.
    assert problem.servers[0].decode_s == pytest.approx(2e-3 + 25 * 3e-6, rel=1e-5)
    plain = load("here-paper").problem
    assert problem.token_rtt_s[0][0] - plain.token_rtt_s[0][0] == pytest.approx(1.5e-3, rel=1e-5)


@pytest.mark.usefixtures("profile")
def test_the_model_of_a_request_adds_up_to_the_stubs_steps(load: Load) -> None:
    experiment = load("here")
    problem, stub = experiment.problem, stub_profile(experiment, 0)
    request = RequestSpec(0, 33, 17)
    first_s, all_s = service_s(problem, request, [Hop(0, 0, 5)])
    base_s = problem.servers[0].step_base_s
    ways_s = problem.input_rtt_s(0, 0, 33) - base_s
    assert first_s == pytest.approx(ways_s + stub.times.step_s(0, 33, 5))
    steps_s = sum(stub.times.step_s(33 + i, 1, 5) for i in range(16))
    assert all_s - first_s == pytest.approx(16 * (problem.token_rtt_s[0][0] - base_s) + steps_s)


@pytest.mark.usefixtures("profile")
def test_the_resolved_scenario_holds_the_profile_and_needs_the_file_no_more(
    load: Load, profile: Path, tmp_path: Path
) -> None:
    experiment = load("here")
    resolved = dump_toml(experiment)
    assert "hardware_files" not in resolved
    profile.unlink()
    path = tmp_path / "resolved.toml"
    path.write_text(resolved, encoding="utf-8")
    assert load_experiment(str(path)).problem == experiment.problem


def test_the_papers_numbers_stand_beside_the_better_ones(profile: Path) -> None:
    tables = tomllib.loads(profile.read_text(encoding="utf-8"))["hardware"]
    assert list(tables) == ["here", "here-paper"]
    assert {"step_base", "context_slope", "prefill_curve"} <= set(tables["here"]) - set(tables["here-paper"])
    assert tables["here"]["decode"] == "2 ms"


def test_steps_that_wait_for_each_other_are_left_to_the_scenarios_queue(calibrate: Calibrate) -> None:
    text = profile_text("here", calibrate(TIMES, is_serial=True), SUBJECT)
    assert "serial = true" in text and "\ncontention" not in text
    slowed = StepTimes(2e-3, 5e-3, 1e-4, contention_ratio=0.25)
    text = profile_text("here", calibrate(slowed), SUBJECT)
    assert "serial = true" not in text and "\ncontention = 0.25\n" in text


@pytest.mark.usefixtures("profile")
def test_a_profile_of_a_file_can_be_the_base_of_the_scenarios_own(load: Load) -> None:
    experiment = load("mine", more='[hardware.mine]\nbase = "here"\nmemory = "1 GB"\n')
    assert experiment.problem.servers[0].context_slope_s == pytest.approx(3e-6, rel=1e-5)


@pytest.mark.parametrize(
    ("files", "text", "words"),
    [
        (["nowhere.toml"], None, "hardware_files.0: .*nowhere.toml: cannot be read"),
        (["bad.toml"], "[hardware.x", "hardware_files.0: .*bad.toml: not valid TOML"),
        (["bad.toml"], '[hardware.x]\ndecod = "1 ms"', 'bad.toml: hardware.x.decod: .*did you mean "decode"'),
        (["bad.toml"], '[hardware.x]\nstep_base = "1"', "bad.toml: hardware.x.step_base: .*no unit"),
        (["bad.toml"], "[hardware.x]\ncontention = -1.0", "hardware.x.contention: must be at least 0"),
        (["bad.toml"], '[model]\nname = "m"', "bad.toml: model: unknown key.*hardware"),
        (["bad.toml"], "[hardware]", "bad.toml: hardware: needs at least 1"),
        (["bad.toml"], '[hardware.here]\nbase = "a100"', '"here", which is also in profile.toml; rename'),
    ],
)
@pytest.mark.usefixtures("profile")
def test_a_wrong_hardware_file_is_named_with_what_to_change(
    load: Load, tmp_path: Path, files: list[str], text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ScenarioError, match=words) as caught:
        load("here", ["profile.toml", *files] if "also" in words else files)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("profile")
def test_a_profile_that_no_file_defines_is_answered_with_those_there_are(load: Load) -> None:
    with pytest.raises(ScenarioError, match=r'unknown hardware "her" \(did you mean "here"'):
        load("her")

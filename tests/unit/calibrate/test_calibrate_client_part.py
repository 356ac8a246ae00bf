"""What the client takes per output token: measured, written into the profile, and read from it."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from nodes.hub import StubHub
from policies.steps import StepTimes
from testbed.errors import ScenarioError
from testbed.experiments import dump_toml, load_experiment
from testbed.experiments.experiment import Experiment
from testbed.studies.calibrate.client import ClientFit, ClientSample, ClientTime, fit_client, measure_client
from testbed.studies.calibrate.fit import Fit
from testbed.studies.calibrate.plan import N_STEPS, Case, Plan
from testbed.studies.calibrate.profile import Subject, profile_text
from testbed.studies.calibrate.report import report_markdown, report_text
from testbed.studies.calibrate.verdict import verdict
from tests.support.manual_clock import ManualClock
from tests.unit.calibrate.conftest import TOKEN_BYTES, KnownCompute

TIMES = StepTimes(2e-3, 5e-3, 1e-4, step_base_s=1.5e-3)
SUBJECT = Subject("blocks", "small", "bloom", 8, 64, 256, "cpu", "float32", "plain", 2, 4e9, 49152, 64)
CLIENT = ClientFit(ClientTime(1, 28, 1.25e-3, 1.125e-3, 1.5e-3), (ClientTime(16, 4, 2e-3, 2e-3, 2e-3),))
PLAN = Plan((Case(1, 4), Case(3, 8), Case(3, 16)), 2, 1, (3,), (0,), 24, pause_s=7.0)
SCENARIO = """
hardware_files = {files}
model = {{ profile = "bloom-176b" }}
servers = [{{ hardware = "here", site = "A", count = 60, memory = "10 GB" }}]
clients = {{ site = "A" }}
workload = {{ rate = 0.5, n_requests = 3, n_input_tokens = 20, n_output_tokens = 12 }}
network = {{ kind = "clusters", pairs = [{{ sites = ["A", "A"], rtt = "10 ms", rate = "1 Gbit/s" }}] }}
"""
Load = Callable[..., Experiment]


def measured(token_s: float) -> tuple[KnownCompute, list[ClientSample]]:
    async def run() -> tuple[KnownCompute, list[ClientSample]]:
        clock = ManualClock()
        compute = KnownCompute(TIMES, clock)
        # Its known compute changes nothing, so its tokens are not the whole model's.
        hub = StubHub(TOKEN_BYTES, 3, verify=False, clock=clock, token_s=token_s)
        work = asyncio.ensure_future(measure_client(PLAN, hub, compute, clock))
        while not work.done():
            await clock.advance(100.0)
        return compute, work.result()

    compute, samples = asyncio.run(run())
    return compute, samples


def test_a_client_of_known_time_is_measured_without_the_chain_and_the_pause() -> None:
    _, samples = measured(0.5)
    assert [sample.time_s for sample in samples] == pytest.approx([0.5] * len(samples), rel=0, abs=1e-9)
    assert {sample.round for sample in samples} == {-1, 0, 1}
    assert len(samples) == 3 * 2 * 2 * N_STEPS
    fit = fit_client(samples)
    assert fit.token == ClientTime(1, 2 * 2 * 2 * (N_STEPS - 1), 0.5, 0.5, 0.5)
    assert [prompt.n_tokens for prompt in fit.prompts] == [4, 16], "the shortest and the longest prompt"


def test_every_text_goes_through_the_whole_chain_in_a_session_that_is_closed() -> None:
    closed: list[object] = []

    class Counting(KnownCompute):
        def close_session(self, session: object) -> None:
            closed.append(session)

    async def run() -> None:
        clock = ManualClock()
        hub = StubHub(TOKEN_BYTES, 3, verify=False)
        compute = Counting(TIMES, clock)
        work = asyncio.ensure_future(measure_client(PLAN, hub, compute, clock))
        while not work.done():
            await clock.advance(100.0)
        work.result()
        assert closed == compute.open
        assert {(s.n_blocks, s.max_tokens - s.position) for s in compute.open} == {(3, 1)}

    asyncio.run(run())


def test_warm_up_does_not_count_and_a_point_is_the_median() -> None:
    samples = [ClientSample(-1, 1, 9.0, 9.0)]
    samples += [ClientSample(0, 1, 0.5, take_s) for take_s in (1.0, 2.0, 6.0)]
    fit = fit_client(samples)
    assert fit == ClientFit(ClientTime(1, 3, 2.5, 2.0, 4.5), ())


@pytest.fixture
def load(tmp_path: Path, calibrate: Callable[..., Fit]) -> Load:
    """The experiment of a scenario beside a profile of ``CLIENT``, and more options."""
    fit = calibrate(TIMES)
    (tmp_path / "profile.toml").write_text(profile_text("here", fit, SUBJECT, CLIENT), encoding="utf-8")
    (tmp_path / "plain.toml").write_text(profile_text("there", fit, SUBJECT), encoding="utf-8")
    other = ClientFit(ClientTime(1, 28, 3e-3, 3e-3, 3e-3), ())
    (tmp_path / "other.toml").write_text(profile_text("there", fit, SUBJECT, other), encoding="utf-8")

    def run(*options: str, files: tuple[str, ...] = ("profile.toml",)) -> Experiment:
        path = tmp_path / "scenario.toml"
        path.write_text(SCENARIO.format(files=list(files)), encoding="utf-8")
        return load_experiment(str(path), options)

    return run


def test_a_scenario_with_the_profile_has_the_client_that_was_measured(load: Load) -> None:
    assert load().problem.hub_token_s == 1.25e-3


@pytest.mark.parametrize(("given", "expected_s"), [("3 ms", 3e-3), ("0 ms", 0.0)])
def test_a_scenarios_own_time_replaces_the_profiles(load: Load, given: str, expected_s: float) -> None:
    assert load(f'compute.hub_token="{given}"').problem.hub_token_s == expected_s


def test_the_resolved_scenario_keeps_the_clients_time_without_the_file(load: Load, tmp_path: Path) -> None:
    experiment = load()
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(experiment), encoding="utf-8")
    (tmp_path / "profile.toml").unlink()
    assert load_experiment(str(path)).problem == experiment.problem


def test_a_profile_of_before_the_client_was_measured_adds_nothing(load: Load) -> None:
    assert load(files=("profile.toml", "plain.toml")).problem.hub_token_s == 1.25e-3
    document = load('compute.hub_token="0 ms"').document
    assert document["compute"]["hub_token"] == "0 s"


def test_profiles_that_disagree_about_the_client_are_refused_until_the_scenario_says(load: Load) -> None:
    both = ("profile.toml", "other.toml")
    with pytest.raises(ScenarioError, match=r"profile\.toml and other\.toml .* set it in compute\.hub_token"):
        load(files=both)
    assert load('compute.hub_token="2 ms"', files=both).problem.hub_token_s == 2e-3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[hub]\ntoken = "1"', "hub.token: .*no unit"),
        ('[hub]\ntokens = "1 ms"', 'hub.tokens: .*did you mean "token"'),
        ("[hub]", "hub.token: is missing"),
    ],
)
def test_a_wrong_client_table_is_named_with_what_to_change(
    load: Load, tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(path.read_text(encoding="utf-8") + text, encoding="utf-8")
    with pytest.raises(ScenarioError, match=words):
        load(files=("profile.toml", "plain.toml"))


def test_report_table_and_findings_say_what_the_client_takes(calibrate: Callable[..., Fit]) -> None:
    fit = calibrate(TIMES)
    sentence = verdict(fit, CLIENT)[-1]
    assert sentence.startswith("Client: embedding, head and choice take 1.25 ms per output token")
    assert sentence.endswith("The first token after a prompt of 16 takes 2 ms.")
    text = report_text(SUBJECT, fit, CLIENT, [])
    assert ["client", "(per", "output", "token)", "-", "1.25", "ms"] in [
        line.split() for line in text.split("\n")
    ]
    report = report_markdown("here", SUBJECT, fit, None, CLIENT, [], [])
    assert "| client (per output token) | - | 1.25 ms |" in report and sentence in report
    assert verdict(fit) == verdict(fit, CLIENT)[:-1]


def test_the_profile_says_it_in_a_table_of_its_own(calibrate: Callable[..., Fit]) -> None:
    tables = tomllib.loads(profile_text("here", calibrate(TIMES), SUBJECT, CLIENT))
    assert tables["hub"] == {"token": "1.25 ms"}
    assert set(tables) == {"hardware", "hub"}

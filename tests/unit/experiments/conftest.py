from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment

SMALL = """
name = "small"
[model]
profile = "bloom-176b"
[[servers]]
hardware = "a100"
site = "A"
count = 2
[clients]
site = "B"
[network]
kind = "clusters"
pairs = [
    { sites = ["A", "A"], rtt = "5 ms", rate = "1 Gbit/s" },
    { sites = ["A", "B"], rtt = "100 ms", rate = "100 Mbit/s" },
]
[workload]
rate = 0.5
n_requests = 10
n_input_tokens = 20
n_output_tokens = 64
"""

Load = Callable[..., Experiment]
Complain = Callable[..., str]


@pytest.fixture
def small() -> str:
    """A valid scenario: two A100 at A, one client at B."""
    return SMALL


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load the small scenario with one text replaced and options applied."""

    def run(*options: str, replace: tuple[str, str] = ("", "")) -> Experiment:
        assert replace[0] in SMALL
        path = tmp_path / "small.toml"
        path.write_text(SMALL.replace(*replace) if replace[0] else SMALL + replace[1])
        return load_experiment(str(path), options)

    return run


@pytest.fixture
def complaint(load: Load, tmp_path: Path) -> Complain:
    """The sentence for a bad scenario, without the folder of the file; it must be a single line."""

    def run(*options: str, replace: tuple[str, str] = ("", "")) -> str:
        with pytest.raises(ScenarioError) as caught:
            load(*options, replace=replace)
        sentence = str(caught.value)
        assert "\n" not in sentence
        return sentence.replace(f"{tmp_path}/", "")

    return run


@pytest.fixture
def arrivals() -> Callable[[Experiment], Sequence[float]]:
    return lambda experiment: [r.arrival_at_s for r in experiment.workload.requests]

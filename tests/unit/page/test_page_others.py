"""``testbed view RUN OTHER``: which runs are refused beside another, so that the interval of their mean means something."""

from __future__ import annotations

from pathlib import Path

import pytest

import testbed as tb
from testbed.errors import UserError
from testbed.experiments import load_experiment, shipped_scenarios
from testbed.page.others import differing, read_others

SMALL = {"workload.n_requests": 3, "workload.n_output_tokens": 4}
WINDOWS = ("workload.n_requests=20", "workload.draw=windows")


def simulated(out: Path, name: str, seed: int, **changes: object) -> Path:
    kept = tb.simulate(tb.scenario(name, changes), seed=seed, out=out).path
    assert kept is not None
    return kept


@pytest.mark.parametrize(
    ("name", "options"), [*((name, ()) for name, _ in shipped_scenarios()), ("trace-replay", WINDOWS)]
)
def test_others_may_have_what_another_seed_draws(name: str, options: tuple[str, ...]) -> None:
    a, b = (load_experiment(name, [f"seed={seed}", *options]) for seed in (3, 4))
    assert differing(a, b) == []


@pytest.mark.parametrize(
    ("key", "value", "differs"),
    [
        ("policy.name", "petals", "policy"),
        ("workload.n_output_tokens", 5, "workload"),
        ("network.pairs.3.rtt", "50 ms", "network"),
        ("clients.site", "Cluster1", "clients"),
        ("fault", [{"kind": "kill", "server": "mig-1g-0", "at": "1 s"}], "fault"),
    ],
)
def test_others_of_another_scenario_are_refused(
    key: str, value: object, differs: str, tmp_path: Path
) -> None:
    first = simulated(tmp_path / "first", "clustered", 0, **SMALL)
    other = simulated(tmp_path / "other", "clustered", 1, **{**SMALL, key: value})
    with pytest.raises(
        UserError, match=rf"other is of another scenario than .*first \(what differs: {differs}\)"
    ):
        read_others(first, [other])

"""How busy the page shows the links between sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import testbed as tb
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.experiments.sources import Document
from testbed.page.feed import Feed
from testbed.page.history import Position
from testbed.page.linkuse import use_between_sites
from testbed.records.base import data_of
from testbed.records.links import LinksUsed, LinkUse
from testbed.records.summary import PolicyUsed, RunSummary
from testbed.results.tables import LINKS, read_links, write_links
from testbed.rundir import write_json
from tests.support.small_model import SMALL_HARDWARE, SMALL_MODEL

SCENARIO: dict[str, Any] = {
    "name": "home",
    "model": SMALL_MODEL,
    "hardware": {"small": SMALL_HARDWARE},
    "servers": [{"hardware": "small", "site": site, "count": 2} for site in ("B", "C", "D")],
    "clients": [{"site": "home"}],
    "sites": [{"name": "home", "up": "10 Mbit/s"}],
    "network": {
        "kind": "clusters",
        "pairs": [
            {"sites": [a, b], "rtt": "20 ms", "rate": "100 Mbit/s"}
            for a, b in (
                *(("home", "B"), ("home", "C"), ("home", "D"), ("B", "C"), ("B", "D"), ("C", "D")),
                *(("B", "B"), ("C", "C"), ("D", "D")),
            )
        ],
    },
    "workload": {
        "arrivals": "constant",
        "rate": 1,
        "n_requests": 1,
        "n_input_tokens": 2,
        "n_output_tokens": 2,
    },
    "policy": {"name": "proposed", "design_concurrency": 1},
}


def busy(*spans: tuple[float, float]) -> LinkUse:
    """A link that is busy from the one to the other of each."""
    use = LinkUse()
    since_s, until_s = np.array(spans).T
    use.add(until_s, until_s - since_s, np.zeros(len(spans)))
    return use


def write(run_dir: Path, used: LinksUsed) -> None:
    """As a run leaves it."""
    summary = RunSummary(
        engine="emulation",
        scenario="home",
        seed=0,
        n_requests=1,
        n_completed=1,
        policy=PolicyUsed(placement="proposed", routing="ws-rr"),
        metrics={},
        links=used.rows[:1],
    )
    write_links(run_dir / LINKS, used)
    write_json(run_dir / "summary.json", data_of(summary))


@pytest.fixture
def experiment() -> Experiment:
    return load_experiment(Document(SCENARIO))


def test_a_way_shows_its_busiest_link_and_those_it_shares_where_anything_goes(
    experiment: Experiment, tmp_path: Path
) -> None:
    """The sites are home, B, C, D in the header's order. Nothing goes to D, which shares the uplink with B and C."""
    uses = [
        ("home up", "", busy((0.0, 100.0))),
        ("client-0", "small-0", busy((0.0, 50.0))),
        ("small-1", "client-0", busy((60.0, 80.0))),
        ("client-0", "small-2", busy((0.0, 10.0))),
        ("small-2", "client-0", busy((100.0, 199.0))),
    ]
    write(tmp_path, LinksUsed(uses, 400.0))
    found = use_between_sites(tmp_path, experiment)
    clients = [experiment.sites[node] for node in experiment.nodes]
    number = {site: at for at, site in enumerate(dict.fromkeys(clients))}
    to_b, to_c = ("-".join(map(str, sorted((number["home"], number[site])))) for site in ("B", "C"))
    assert found["sites"].keys() == {to_b, to_c}
    width_s, sites = found["width_s"], found["sites"]
    assert width_s == 2.0
    assert [sites[to_b]["use"][at // 2] for at in (0, 70, 98, 150)] == [1, 1, 1, 0]
    assert [sites[to_c]["use"][at // 2] for at in (0, 98, 150)] == [1, 1, 1]
    assert sites[to_b]["name"] == sites[to_c]["name"] == "home up"
    assert sites[to_b]["over"] == sites[to_c]["over"] == 0.25


def test_a_page_is_offered_the_use_of_links_when_all_of_it_can_be_read(tmp_path: Path) -> None:
    """The summary, which has the busiest links, is the last file that a run writes."""
    tb.simulate("clustered", out=tmp_path / "run")
    summary = tmp_path / "run" / "summary.json"
    summary.rename(tmp_path / "not-yet")

    def is_offered() -> bool:
        feed = Feed(tmp_path / "run")
        feed.open()
        return bool(feed.everything(Position())["status"]["links"])

    assert not is_offered()
    (tmp_path / "not-yet").rename(summary)
    assert is_offered()


def test_a_run_without_the_file_has_no_links(experiment: Experiment, tmp_path: Path) -> None:
    assert use_between_sites(tmp_path, experiment)["sites"] == {}


def test_the_table_of_links_is_read_as_it_was_written(tmp_path: Path) -> None:
    used = LinksUsed([("a", "b", busy((0.0, 1.5), (3.0, 4.0))), ("b", "a", busy((2.0, 2.5)))], 4.0)
    write(tmp_path, used)
    found = read_links(tmp_path)
    assert found.width_s == used.width_s and list(found.use_ratio) == [("a", "b"), ("b", "a")]
    for (_, series), ratios in zip(used.series(), found.use_ratio.values(), strict=True):
        assert ratios[: len(series.use_ratio)] == pytest.approx(series.use_ratio)
        assert not ratios[len(series.use_ratio) :].any()
    assert found.of_run == {("a", "b"): 0.625, ("b", "a"): pytest.approx(0.125, abs=0.01)}
    write(tmp_path, LinksUsed([], 4.0))
    assert read_links(tmp_path).use_ratio == {}

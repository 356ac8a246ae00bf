"""Where sites are, which only maps look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.page.header import header
from testbed.scenario import dump_toml, load_experiment

PLAN = {"placement": {"ranges": [[0, 1]] * 9, "cache_bytes": [1.0] * 9}}


def test_a_resolved_topology_keeps_the_coordinates_of_its_places(tmp_path: Path) -> None:
    path = tmp_path / "resolved.toml"
    path.write_text(dump_toml(load_experiment("abovenet")), encoding="utf-8")
    resolved = load_experiment(str(path))
    assert resolved.document["network"]["places"]["abovenet-08"] == [4.88969, 52.37403]
    head = header(resolved, PLAN)
    assert head["layout"] == "places"
    unknown = [site["name"] for site in head["sites"] if not site["is_placed"]]
    assert unknown == ["abovenet-11"]


def test_a_scenario_can_say_where_its_sites_are() -> None:
    given = "network.places={Cluster0=[2.35, 48.86], Cluster1=[139.7, 35.7], Cluster2=[-74.0, 40.7]}"
    head = header(load_experiment("clustered", [given]), PLAN)
    assert head["layout"] == "places"
    assert (head["sites"][0]["name"], head["sites"][0]["x"]) == ("Cluster0", 2.35)
    assert header(load_experiment("clustered"), PLAN)["layout"] == "rtt"


@pytest.mark.parametrize("place", ["[200, 0]", "[0, 95]", "[1]", "[nan, 0]", '"Paris"'])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(UserError, match=r"network\.places\.Cluster0"):
        load_experiment("clustered", [f"network.places={{Cluster0={place}}}"])

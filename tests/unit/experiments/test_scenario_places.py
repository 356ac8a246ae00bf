"""Where sites are, which only maps look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.experiments import dump_toml, load_experiment
from testbed.page.header import header
from testbed.records.plan import PlacementRow, Plan

PLAN = Plan(placement=PlacementRow(ranges=[(0, 1)] * 9, cache_bytes=[1.0] * 9))


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


def test_a_place_of_a_site_that_the_network_does_not_have_is_refused() -> None:
    with pytest.raises(
        UserError, match=r'network\.places: unknown site "Cluster9"; valid: Cluster0, Cluster1'
    ):
        load_experiment("clustered", ["network.places={Cluster9=[2.35, 48.86]}"])
    with pytest.raises(UserError, match=r'network\.places: unknown node "Paris"; nodes of abovenet: '):
        load_experiment("abovenet", ["network.places={Paris=[2.35, 48.86]}"])


def test_a_place_of_a_topologys_node_that_was_not_drawn_is_left_out() -> None:
    given = [f"network.places={{abovenet-{n:02}=[1.0, {n}.0]}}" for n in range(1, 20)]
    places = {}
    for option in given:
        network = load_experiment("abovenet", [option]).document["network"]
        assert set(network["places"]) <= set(network["sites"])
        places |= {name: place for name, place in network["places"].items() if place[0] == 1.0}
    assert 0 < len(places) < len(given)


@pytest.mark.parametrize("place", ["[200, 0]", "[0, 95]", "[1]", "[nan, 0]", '"Paris"'])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    with pytest.raises(UserError, match=r"network\.places\.Cluster0"):
        load_experiment("clustered", [f"network.places={{Cluster0={place}}}"])

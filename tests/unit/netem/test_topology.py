"""Topologies: delay-shortest paths, delays from coordinates, and contradictions."""

from __future__ import annotations

import pytest

from netem.topology import Topology, TopologyError, TopologyLink, TopologyNode, great_circle_km

PARIS = TopologyNode("paris", 2.3488, 48.85341)
LONDON = TopologyNode("london", -0.12574, 51.50853)


def topology(*links: tuple[str, str, float, float], extra: tuple[str, ...] = ()) -> Topology:
    """Return a topology of (end, end, one-way ms, Gbit/s) links; nodes in the order of their appearance."""
    names = dict.fromkeys([name for a, b, _, _ in links for name in (a, b)] + list(extra))
    return Topology(
        "small",
        tuple(TopologyNode(name) for name in names),
        tuple(TopologyLink(a, b, ms / 1e3, gbps * 1e9) for a, b, ms, gbps in links),
    )


def test_a_path_takes_the_least_delay_not_the_fewest_links_and_is_as_fast_as_its_slowest_link() -> None:
    paths = topology(("a", "b", 9.0, 10.0), ("a", "c", 2.0, 4.0), ("c", "b", 3.0, 1.0)).paths(["a", "b"])
    assert paths["a", "b"].nodes == ("a", "c", "b")
    assert paths["a", "b"].delay_s == pytest.approx(0.005)
    assert paths["a", "b"].rate_bps == 1e9
    assert paths["b", "a"].nodes == ("b", "c", "a")
    assert set(paths) == {("a", "b"), ("b", "a")}


def test_of_parallel_links_the_shortest_counts_and_then_the_fastest() -> None:
    links = (("a", "b", 2.0, 1.0), ("b", "a", 1.0, 1.0), ("a", "b", 1.0, 5.0))
    path = topology(*links).paths(["a", "b"])["a", "b"]
    assert (path.delay_s, path.rate_bps) == (0.001, 5e9)
    assert topology(*links[::-1]).paths(["b", "a"])["a", "b"] == path


def test_paths_do_not_depend_on_the_order_in_which_nodes_are_chosen() -> None:
    square = topology(("a", "b", 1.0, 1.0), ("b", "d", 1.0, 2.0), ("a", "c", 1.0, 3.0), ("c", "d", 1.0, 4.0))
    assert square.paths(["a", "d"]) == square.paths(["d", "a"])


def test_the_rtt_matrix_is_twice_the_one_way_delay_in_the_order_asked_for() -> None:
    line = topology(("a", "b", 1.0, 1.0), ("b", "c", 2.0, 1.0))
    matrix = line.rtt_matrix_s(["c", "a", "c"])
    assert matrix == ((0.0, 0.006, 0.0), (0.006, 0.0, 0.006), (0.0, 0.006, 0.0))


def test_nodes_without_a_path_and_unknown_nodes_are_named() -> None:
    apart = topology(("a", "b", 1.0, 1.0), extra=("c",))
    with pytest.raises(TopologyError, match="small has no path from a to c"):
        apart.paths(["c", "a"])
    with pytest.raises(TopologyError, match="small has no node d"):
        apart.paths(["a", "d"])


@pytest.mark.parametrize(
    ("nodes", "link", "sentence"),
    [
        (("a", "b", "a"), ("a", "b"), "two nodes named a"),
        (("a", "b"), ("a", "z"), "a link to z, which is no node"),
        (("a", "b"), ("b", "b"), "a link from b to itself"),
    ],
)
def test_a_topology_that_contradicts_itself_is_refused(
    nodes: tuple[str, ...], link: tuple[str, str], sentence: str
) -> None:
    with pytest.raises(TopologyError, match=sentence):
        Topology("odd", tuple(map(TopologyNode, nodes)), (TopologyLink(*link, 0.001, 1e9),))


def test_distances_are_those_along_the_earths_surface() -> None:
    assert great_circle_km(PARIS, LONDON) == pytest.approx(343.5, abs=1.0)
    assert great_circle_km(PARIS, PARIS) == 0.0
    opposite = TopologyNode("opposite", PARIS.longitude_deg - 180, -PARIS.latitude_deg)  # type: ignore[operator]
    assert great_circle_km(PARIS, opposite) == pytest.approx(6371.0 * 3.14159265, rel=1e-6)
    assert great_circle_km(PARIS, TopologyNode("nowhere")) is None


def test_fibre_delays_come_from_coordinates_and_links_to_unknown_places_keep_theirs() -> None:
    nowhere = TopologyNode("nowhere")
    given = Topology(
        "three",
        (PARIS, LONDON, nowhere),
        (TopologyLink("paris", "london", 0.0005, 1e9), TopologyLink("london", "nowhere", 0.007, 2e9)),
    )
    fibre = given.with_fibre_delays(1.5)
    distance_km = great_circle_km(PARIS, LONDON)
    assert distance_km is not None
    assert fibre.links[0].delay_s == pytest.approx(distance_km * 1.5 / 200_000)
    assert fibre.links[1] == given.links[1]
    assert fibre.without_coordinates == ("nowhere",)
    assert given.without_coordinates == ()
    assert fibre.max_rate_bps == 2e9

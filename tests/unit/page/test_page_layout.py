"""Where the map places sites."""

from __future__ import annotations

import math

import pytest

from testbed.page.layout import beside_nearest, by_round_trips


def test_sites_without_coordinates_are_as_far_apart_as_their_round_trips() -> None:
    truth = {"a": (0.0, 0.0), "b": (3.0, 4.0), "c": (6.0, 0.0), "d": (2.0, -1.0)}
    names = list(truth)
    rtts = {(x, y): math.dist(truth[x], truth[y]) for i, x in enumerate(names) for y in names[i + 1 :]}
    points = by_round_trips(names, rtts)
    scale = math.dist(points["a"], points["b"]) / 5
    for (x, y), rtt in rtts.items():
        assert math.dist(points[x], points[y]) == pytest.approx(rtt * scale)
    spans = [max(p[axis] for p in points.values()) - min(p[axis] for p in points.values()) for axis in (0, 1)]
    assert max(spans) == pytest.approx(1)


@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_a_layout_exists_for_few_sites_and_for_pairs_without_links(names: list[str]) -> None:
    points = by_round_trips(names, {})
    assert all(math.isfinite(value) for point in points.values() for value in point)
    assert len(set(points.values())) == len(names)


def test_the_first_site_is_on_the_left() -> None:
    points = by_round_trips(["hub", "x", "y"], {("hub", "x"): 1.0, ("hub", "y"): 1.0, ("x", "y"): 1.0})
    assert points["hub"][0] < min(points["x"][0], points["y"][0])


def test_a_site_of_unknown_place_stands_beside_its_nearest() -> None:
    rtts = {("a", "b"): 9.0, ("a", "c"): 1.0, ("b", "c"): 8.0}
    points = beside_nearest(["a", "b", "c"], rtts, {"a": (10.0, 50.0), "b": (0.0, 0.0)})
    assert points["c"] == (10.0, 46.0)

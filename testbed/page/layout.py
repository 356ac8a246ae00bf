"""Places the sites of a run on a map: at their coordinates, or so that distances follow round-trip times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from testbed.experiments.experiment import Experiment

Array = NDArray[np.float64]
Point = tuple[float, float]
_BESIDE_DEG = 4.0


def places(experiment: Experiment) -> dict[str, Point] | None:
    """Return (longitude, latitude) in degrees of the sites that have one; None unless more than half have."""
    known = experiment.document.get("network", {}).get("places") or {}
    sites = sites_of(experiment)
    found = {site: (float(known[site][0]), float(known[site][1])) for site in sites if site in known}
    return found if 2 * len(found) > len(sites) else None


def beside_nearest(
    sites: Sequence[str], rtts_s: Mapping[tuple[str, str], float], known: Mapping[str, Point]
) -> dict[str, Point]:
    """Return ``known`` with every other site close to the one to which its round trip is shortest."""
    points = dict(known)
    distance = _distances(sites, rtts_s)
    for i, site in enumerate(sites):
        if site not in known:
            nearest = min(
                (j for j, other in enumerate(sites) if other in known), key=lambda j: distance[i, j]
            )
            x, y = known[sites[nearest]]
            points[site] = (x, y - _BESIDE_DEG if y > -80 else y + _BESIDE_DEG)
    return {site: points[site] for site in sites}


def sites_of(experiment: Experiment) -> list[str]:
    """Return the sites that have nodes, in the order of the nodes."""
    return list(dict.fromkeys(experiment.sites[node] for node in experiment.nodes))


def site_rtts_s(experiment: Experiment) -> dict[tuple[str, str], float]:
    """Return the round trip in seconds of each pair of linked sites; a pair is in the order of the sites."""
    order = {site: number for number, site in enumerate(sites_of(experiment))}
    found: dict[tuple[str, str], float] = {}
    for (a, b), link in experiment.network.links.items():
        first, second = experiment.sites[a], experiment.sites[b]
        if order[first] < order[second] and (first, second) not in found:
            found[first, second] = link.delay_s + experiment.network.links[b, a].delay_s
    return found


def by_round_trips(sites: Sequence[str], rtts_s: Mapping[tuple[str, str], float]) -> dict[str, Point]:
    """Return points whose distances follow the round trips as well as they can in a plane.

    By classical multidimensional scaling. The distance of a pair without a link is the shortest path through
    other sites. The first site is on the left, the second one not above it; the larger extent is 1.
    """
    points = _turned(_scaled(_distances(sites, rtts_s)))
    centred = points - (points.max(axis=0) + points.min(axis=0)) / 2
    extent = float(np.ptp(centred, axis=0).max()) or 1.0
    return {site: (float(x), float(y)) for site, (x, y) in zip(sites, centred / extent, strict=True)}


def _distances(sites: Sequence[str], rtts_s: Mapping[tuple[str, str], float]) -> Array:
    """Return the (n, n) matrix of shortest paths; twice the largest one where there is no path."""
    number = {site: i for i, site in enumerate(sites)}
    distance = np.full((len(sites), len(sites)), np.inf)
    np.fill_diagonal(distance, 0.0)
    for (a, b), rtt_s in rtts_s.items():
        distance[number[a], number[b]] = distance[number[b], number[a]] = rtt_s
    for through in range(len(sites)):
        distance = np.minimum(distance, distance[:, [through]] + distance[[through], :])
    reached = distance[np.isfinite(distance)]
    return np.where(np.isfinite(distance), distance, 2 * reached.max() or 1.0)


def _turned(points: Array) -> Array:
    """Turn and mirror points so that the first is due left of the middle, and the second not above it."""
    points = points - points.mean(axis=0)
    length = float(np.hypot(*points[0]))
    if length < 1e-9:
        return points
    cosine, sine = -points[0] / length
    turned = points @ np.array([[cosine, -sine], [sine, cosine]])
    below = next((y for y in turned[1:, 1] if abs(y) > 1e-9), 1.0)
    return np.asarray(turned * [1.0, np.sign(below)])


def _scaled(distance: Array) -> Array:
    """Return (n, 2) coordinates for an (n, n) matrix of distances; the mirror image is always the same."""
    n = len(distance)
    centring = np.eye(n) - 1 / n
    values, vectors = np.linalg.eigh(-0.5 * centring @ distance**2 @ centring)
    points = np.zeros((n, 2))
    for axis, index in enumerate(np.argsort(-values, kind="stable")[:2]):
        if values[index] > 1e-12:
            column = vectors[:, index] * np.sqrt(values[index])
            points[:, axis] = column * np.sign(column[np.argmax(np.abs(np.round(column, 9)))])
    return points

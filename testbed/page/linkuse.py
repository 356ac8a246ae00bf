"""Use of links over time between the sites of the page's map, once the run has left it (``links.parquet``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from testbed.experiments.experiment import Experiment
from testbed.page.layout import sites_of
from testbed.records.links import ends_of, link_name
from testbed.results.tables import read_links

_DIGITS = 3


def use_between_sites(run_dir: Path, experiment: Experiment) -> dict[str, Any]:
    """Return ``width_s``, and by "a-b" (numbers of sites, as in the header) ``{name, over, use}``.

    ``name`` is the busiest link between two sites that exchanged messages, or that they share with others, ``over`` its
    use over the whole run. ``use`` is the largest use of all those links, in both directions, by steps of ``width_s``.
    Raises as ``read_links``.
    """
    used = read_links(run_dir)
    number = {site: at for at, site in enumerate(sites_of(experiment))}
    site_of = {node: number[experiment.sites[node]] for node in experiment.nodes}
    between = {
        link: _key(site_of[link[0]], site_of[link[1]]) for link in used.use_ratio if site_of.keys() >= {*link}
    }
    ways = _shared_ways(experiment, site_of)
    found: dict[str, dict[str, Any]] = {}
    for (source, target), ratios in used.use_ratio.items():  # the busiest first
        keys = {between[source, target]} if (source, target) in between else ways.get((source, target), set())
        for key in keys & {*between.values()}:
            name = link_name(source, target)
            other = found.setdefault(key, {"name": name, "over": used.of_run[source, target], "use": ratios})
            other["use"] = np.maximum(other["use"], ratios)
    for row in found.values():
        row["use"] = _rounded(row["use"])
    return {"width_s": used.width_s, "sites": found}


def _shared_ways(experiment: Experiment, site_of: Mapping[str, int]) -> dict[tuple[str, str], set[str]]:
    """Return between which sites each shared link carries messages, by its ends."""
    ways: dict[tuple[str, str], set[str]] = {}
    for (a, b), names in experiment.network.shared_paths.items():
        for name in names:
            ways.setdefault(ends_of(name), set()).add(_key(site_of[a], site_of[b]))
    return ways


def _key(a: int, b: int) -> str:
    return f"{min(a, b)}-{max(a, b)}"


def _rounded(ratios: NDArray[np.float64]) -> list[float]:
    return [float(ratio) for ratio in ratios.round(_DIGITS)]

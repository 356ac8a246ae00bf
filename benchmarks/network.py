"""RTT of 28,672-byte echoes and bulk rates over every network that runs on this machine.

If netem does not, it is measured in a VM. ``testbed links`` measures three pairs of 5, 20 and 100 ms. The
baseline is the same echo over a link without delay at 100 Gbit/s: the time of the sockets, the kernel and the
forwarder alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.backends import netem_in_vm, networks_here
from benchmarks.figure import figure
from testbed.experiments import load_experiment
from testbed.studies.links.check import links_command

_SITES = (("near", "5 ms", "1 Gbit/s"), ("mid", "20 ms", "1 Gbit/s"), ("far", "100 ms", "100 Mbit/s"))
_ECHOES = 100
_BASELINE = ("none", "0 ms", "100 Gbit/s")


def _scenario() -> str:
    servers = "".join(
        f'[[servers]]\nhardware = "a100"\nsite = "{site}"\nname = "{site}"\n'
        for site, _, _ in (*_SITES, _BASELINE)
    )
    pairs = [("hub", *row) for row in (*_SITES, _BASELINE)]
    names = [site for site, _, _ in (*_SITES, _BASELINE)]
    pairs += [(a, b, "1 ms", "1 Gbit/s") for i, a in enumerate(names) for b in names[i + 1 :]]
    rows = ",\n".join(
        f'{{ sites = ["{a}", "{b}"], rtt = "{rtt}", rate = "{rate}" }}' for a, b, rtt, rate in pairs
    )
    return (
        'name = "links"\n[model]\nprofile = "bloom-176b"\n'
        + servers
        + f'[clients]\nsite = "hub"\n[network]\nkind = "clusters"\npairs = [\n{rows}\n]\n'
        + '[workload]\narrivals = "poisson"\nrate = 1.0\nn_requests = 1\nn_input_tokens = 1\nn_output_tokens = 1\n'
        + '[policy]\nname = "proposed"\n'
    )


def measure() -> list[dict[str, Any]]:
    here = networks_here()
    figures = [one for network in here for one in measure_network(network)]
    return figures if "netem" in here else figures + netem_in_vm()


def measure_network(network: str) -> list[dict[str, Any]]:
    """Measures one backend. Figures have a goal if the project has set one: all but the baseline and
    ``loopback``.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.toml"
        path.write_text(_scenario(), encoding="utf-8")
        experiment = load_experiment(str(path), [f"network.backend={network}"])
        answer, _ = links_command(experiment, None, _ECHOES)
    goals = network != "loopback"
    figures: list[dict[str, Any]] = []
    for row in answer["pairs"]:
        baseline = "none" in (row["from"], row["to"])
        if row["from"].startswith("client"):
            where = "no delay (baseline)" if baseline else f"{row['rtt_ms']['requested']:g} ms"
            for key, goal in (("p50", "<= 0.3"), ("p99", "<= 1")):
                name = f"{network}: echo error at {where}, {key}"
                error_ms = row["echo_ms"][f"error_{key}"]
                figures.append(figure(name, error_ms, "ms", goal if goals and not baseline else ""))
        if not baseline:
            figures += _rate_figures(network, row, goals)
    return figures


def _rate_figures(network: str, row: dict[str, Any], goals: bool) -> list[dict[str, Any]]:
    rate, direction = row["rate_mbps"], f"{row['from']} to {row['to']}"
    error = 100 * (rate["achieved"] / rate["requested"] - 1)
    goal = "+-2" if rate["requested"] < 500 else "+-5"
    name = f"{network}: rate error at {rate['requested']:g} Mbit/s, {direction}"
    return [
        figure(name, error, "%", goal if goals else ""),
        figure(f"{network}: goodput after headers, {direction}", rate["goodput"], "Mbit/s"),
    ]

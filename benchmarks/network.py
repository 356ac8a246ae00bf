"""RTT of 28,672-byte echoes and bulk rates over the network that ``auto`` picks here.

``testbed links`` measures three pairs of 5, 20 and 100 ms. The baseline is the same echo over a link
without delay at 100 Gbit/s: what the sockets, the kernel and the forwarder take by themselves.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.figure import figure
from testbed.linkcheck import links_command
from testbed.scenario import load_experiment

_SITES = (("near", "5 ms", "1 Gbit/s"), ("mid", "20 ms", "1 Gbit/s"), ("far", "100 ms", "100 Mbit/s"))
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
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.toml"
        path.write_text(_scenario(), encoding="utf-8")
        answer, _ = links_command(load_experiment(str(path)), None, 200)
    network = answer["network"]
    figures: list[dict[str, Any]] = []
    for row in answer["pairs"]:
        echo, rate = row["echo_ms"], row["rate_mbps"]
        baseline = row["to"].startswith("none")
        if row["from"].startswith("client"):
            what = "no delay (baseline)" if baseline else f"{row['rtt_ms']['requested']:g} ms"
            figures.append(
                figure(
                    f"{network}: echo error at {what}, p50",
                    echo["error_p50"],
                    "ms",
                    "" if baseline else "<= 0.3",
                )
            )
            figures.append(
                figure(
                    f"{network}: echo error at {what}, p99",
                    echo["error_p99"],
                    "ms",
                    "" if baseline else "<= 1",
                )
            )
        if not baseline and not row["from"].startswith("none"):
            error = 100 * (rate["achieved"] / rate["requested"] - 1)
            goal = "+-2" if rate["requested"] < 500 else "+-5"
            direction = f"{row['from']} to {row['to']}"
            figures.append(
                figure(
                    f"{network}: rate error at {rate['requested']:g} Mbit/s, {direction}", error, "%", goal
                )
            )
            figures.append(
                figure(f"{network}: goodput after headers, {direction}", rate["goodput"], "Mbit/s")
            )
    return figures

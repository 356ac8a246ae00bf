"""``testbed doctor``: finds out what this machine can do by trying it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import Any

from netem import probe
from netem.networks import AUTO, CLOCKS, NETWORKS, Network, choose
from testbed.experiments.checkpoints import INSTALL
from testbed.runtime.blocks import blocks_missing
from testbed.runtime.gpus import find_gpus

_ASK_TORCH = """
import json
import nodes.blocks.compute, nodes.blocks.hub, torch, transformers
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    "gpus": [f"cuda:{i} {gpu.name} {gpu.total_memory / 1e9:.1f} GB" for i, gpu in enumerate(gpus)],
}))
"""


def doctor_rows() -> list[dict[str, Any]]:
    """Return a row per capability: ``{name, works, detail, hint}``. Hints say how to get what is missing."""
    rows = [
        _row("python", None, sys.version.split()[0]),
        _row(
            "root",
            None if os.geteuid() == 0 else f"effective uid {os.geteuid()}",
            "effective uid 0",
            "not needed where rootless works",
        ),
        _row("namespaces", probe.probe_namespaces(), "network namespaces can be made"),
        _row("rootless", probe.probe_rootless(), "user namespaces for unprivileged users"),
        _row("tun", probe.probe_tun(), "TUN devices with offloads"),
        _row("htb", probe.probe_qdisc("htb"), "rate shaping (sch_htb)"),
        _row("netem-qdisc", probe.probe_qdisc("netem"), "kernel delay emulation (sch_netem)"),
    ]
    emulated = [network for network in NETWORKS.values() if network.emulates]
    emulated.sort(key=lambda network: "real" not in network.clocks)
    missing = [(network, network.missing()) for network in emulated]
    rows += [_row(f"network {network.name}", why_not, network.here) for network, why_not in missing]
    rows.append(_packets_row(missing))
    for clock in CLOCKS:
        chosen, _ = choose(AUTO, clock)  # the rows of the networks say why no better one
        rows.append(_row(f"{clock} time", None, f"network auto takes {chosen.name}"))
    return rows + _blocks_rows() + _uuid_rows()


def _row(name: str, missing: str | None, detail: str, hint: str = "") -> dict[str, Any]:
    if missing is None:
        return {"name": name, "works": True, "detail": detail, "hint": ""}
    return {"name": name, "works": False, "detail": missing, "hint": hint}


def _packets_row(missing: list[tuple[Network, str | None]]) -> dict[str, Any]:
    """Return the row on jitter, loss and changes of links: which networks here apply them to real packets.

    ``missing``: each network with what it lacks here, or None if it works.
    """
    working = [network.name for network, why_not in missing if network.has_packets and why_not is None]
    imitated = [network.name for network, _ in missing if network.delays_in_client]
    lacking = [lacks for network, lacks in missing if network.has_packets]
    why_not = (
        None
        if working
        else f"only imitated by clients ({', '.join(imitated)}); for real packets: {lacking[-1]}"
    )
    return _row(
        "jitter, loss", why_not, f"on real packets, by {' and '.join(working)}; changes of links, too"
    )


def _blocks_rows() -> list[dict[str, Any]]:
    """Return rows: whether real blocks can be computed, and on which GPUs. A child process imports torch."""
    missing = blocks_missing()
    if missing is not None:
        why_not = f"not installed ({missing}): {INSTALL}"
        return [_row("blocks", why_not, ""), _row("gpu", _gpu_missing() or why_not, "")]
    asked = subprocess.run([sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, check=False)
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"status {asked.returncode}"])[-1]
        why_not = f"real blocks cannot be imported: {last}"
        return [_row("blocks", why_not, ""), _row("gpu", _gpu_missing() or why_not, "")]
    found = json.loads(asked.stdout)
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    gpus = ", ".join(found["gpus"])
    no_gpu = None if gpus else _gpu_missing() or "this torch was built without CUDA, or sees no device"
    return [_row("blocks", None, f"real transformer blocks: {versions}"), _row("gpu", no_gpu, gpus)]


def _uuid_rows() -> list[dict[str, Any]]:
    """Return a row for each GPU or MIG instance, with the UUID that ``compute.device`` can be set to."""
    why_not = "no device has one" if _gpu_missing() else "neither nvidia-ml-py nor nvidia-smi names a device"
    return [_row("gpu uuid", None, str(gpu)) for gpu in find_gpus()] or [_row("gpu uuid", why_not, "")]


def _gpu_missing() -> str | None:
    """Return why the NVIDIA driver cannot be used, or None if it can; needs no torch."""
    try:
        os.close(os.open("/dev/nvidiactl", os.O_RDWR))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return "there is no NVIDIA driver on this machine; only real blocks could use one"
        return f"the NVIDIA driver cannot be used: {error.strerror}"
    return None


def doctor_text(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table for the terminal."""
    lines = []
    for row in rows:
        mark = "yes" if row["works"] else "no"
        hint = f" ({row['hint']})" if row["hint"] else ""
        lines.append(f"{row['name']:<17} {mark:<4} {row['detail']}{hint}")
    return "\n".join(lines)

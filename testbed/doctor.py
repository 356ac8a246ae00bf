"""``testbed doctor``: what this machine can do, found by trying it."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from typing import Any

from netem import probe
from netem.choose import BACKENDS, choose_backend


def doctor_rows() -> list[dict[str, Any]]:
    """One row per capability: ``{name, works, detail, hint}``; hints say how to get what is missing."""
    rows = [
        _row("python", None, f"{sys.version.split()[0]}"),
        _row(
            "root",
            None if os.geteuid() == 0 else "not root",
            "effective uid 0",
            "not needed where rootless works",
        ),
        _row("namespaces", probe.probe_namespaces(), "network namespaces can be made"),
        _row("rootless", probe.probe_rootless(), "user namespaces for unprivileged users"),
        _row("tun", probe.probe_tun(), "TUN devices with offloads"),
        _row("htb", probe.probe_qdisc("htb"), "rate shaping (sch_htb)"),
        _row("netem-qdisc", probe.probe_qdisc("netem"), "kernel delay emulation (sch_netem)"),
    ]
    missing = {backend.name: backend.missing() for backend in BACKENDS}
    rows += [_row(f"network {name}", why_not, "works here") for name, why_not in missing.items()]
    rows.append(_packets_row({name: why for name, why in missing.items() if name != "loopback"}))
    chosen, why = choose_backend("auto")
    rows.append({"name": "network auto", "works": True, "detail": f"takes {chosen.name}", "hint": why})
    rows.append(_row("torch", _torch_missing(), "real transformer blocks can be computed"))
    rows.append(_row("gpu", _gpu_missing(), "a CUDA device"))
    return rows


def _row(name: str, missing: str | None, detail: str, hint: str = "") -> dict[str, Any]:
    if missing is None:
        return {"name": name, "works": True, "detail": detail, "hint": ""}
    return {"name": name, "works": False, "detail": missing, "hint": hint}


def _packets_row(missing: dict[str, str | None]) -> dict[str, Any]:
    """Whether jitter, loss and links that change meet real packets: what the kernel's networks need for it."""
    working = [name for name, why_not in missing.items() if why_not is None]
    why_not = (
        None if working else f"only imitated by clients (loopback); for real packets: {missing['fabric']}"
    )
    what = "on real packets, while they flow"
    return _row("jitter, loss", why_not, f"and changes of links {what}: {', '.join(working)}")


def _torch_missing() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: pip install 'testbed[blocks]'"
    return None


def _gpu_missing() -> str | None:
    """Asks the driver, not torch: importing torch takes seconds."""
    try:
        os.close(os.open("/dev/nvidiactl", os.O_RDWR))
    except OSError as error:
        if error.errno == errno.ENOENT:
            return "no NVIDIA driver on this machine; the stub needs none"
        return f"the NVIDIA driver cannot be used: {error.strerror}"
    return None


def doctor_text(rows: list[dict[str, Any]]) -> str:
    """The table for the terminal."""
    lines = []
    for row in rows:
        mark = "yes" if row["works"] else "no"
        hint = f" ({row['hint']})" if row["hint"] else ""
        lines.append(f"{row['name']:<17} {mark:<4} {row['detail']}{hint}")
    return "\n".join(lines)

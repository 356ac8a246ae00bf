"""The device that is measured, its driver, and the versions of the packages that compute."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Any

from benchmarks.gpu_parts.record import Record
from nodes.blocks.memory import amount

_PACKAGES = ("torch", "transformers", "safetensors", "bitsandbytes", "numpy")


def run(record: Record) -> None:
    """Raises ``ComputeError`` if the device cannot be used."""
    import torch

    from nodes.blocks.device import available_bytes, open_device

    device, _ = open_device(record.job.device, "float32")
    values: dict[str, Any] = {
        "name": _processor(),
        "memory_bytes": None,
        "available_bytes": available_bytes(device),
        "driver": None,
        "capability": None,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
        "linux": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        values["name"] = properties.name
        values["memory_bytes"] = properties.total_memory
        values["capability"] = f"{properties.major}.{properties.minor}"
        values["driver"] = _driver()
    record.put(**values)
    about = f"driver {values['driver']}, CUDA {values['cuda']}" if device.type == "cuda" else "no GPU"
    record.find(
        f"{values['name']}, {amount(values['available_bytes'])} of memory free; {about}, "
        f"torch {values['versions']['torch']}, transformers {values['versions']['transformers']}."
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Returns the version of the GPU's driver, which torch does not report; None without ``nvidia-smi``."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.split("\n", 1)[0].strip() or None


def _processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()

"""Finds the GPUs and MIG instances of this machine, and assigns them to the servers of a run.

Nothing here imports torch or initialises CUDA: only the processes that compute do.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nodes.blocks.memory import amount
from policies.workload import longest_tokens
from testbed.errors import UserError
from testbed.experiments.blocks import check_steps
from testbed.experiments.experiment import BlocksSettings, Experiment
from testbed.experiments.problems import KeyedError

_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance of one. ``index`` is that of the GPU, in the driver's order."""

    index: int
    uuid: str
    name: str
    memory_bytes: float | None
    """``None`` if unknown (only nvidia-ml-py reports it)."""

    def __str__(self) -> str:
        return f"{self.uuid} {self.name}" + (f" {amount(self.memory_bytes)}" if self.memory_bytes else "")


def find_gpus() -> list[Gpu]:
    """Return the GPUs that a process on this machine may use.

    A GPU that is split is listed as its MIG instances.

    Empty if there are none, and if neither nvidia-ml-py nor nvidia-smi is installed.
    """
    gpus = _from_nvml()
    return _visible(_from_smi() if gpus is None else gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def shared_out(experiment: Experiment, announce: Callable[[str], None]) -> BlocksSettings | None:
    """Return the settings of real blocks, with this machine's devices for "auto"; ``None`` for the stub.

    Raises ``UserError`` for a UUID that is not one of this machine's GPUs, for servers that need more
    ``memory`` than the device that they share has, and for "auto" or UUIDs with several machines.
    """
    settings = experiment.compute.blocks
    if settings is None or not any(map(_is_looked_up, settings.devices)):
        return settings
    if experiment.machines:
        raise UserError(
            f'compute.device is "{next(filter(_is_looked_up, settings.devices))}", which works on one '
            'machine only; with several machines use "cpu", "cuda" or a device such as "cuda:0"'
        )
    gpus = find_gpus()
    if settings.devices == ("auto",):
        if not gpus:
            announce('compute.device "auto" uses the CPU: no GPU was found (`testbed doctor` explains why)')
            return replace(settings, devices=("cpu",))
        settings = replace(settings, devices=tuple(gpu.uuid for gpu in gpus))
        announce(f'compute.device "auto" uses in turn {", ".join(map(str, gpus))}')
    if not gpus:
        return settings  # no GPU is found: the node that opens the device reports it
    settings = replace(settings, devices=tuple(_full(name, gpus) for name in settings.devices))
    try:
        check_steps(settings, longest_tokens(experiment.workload.requests))
    except KeyedError as error:
        raise UserError(f"{'.'.join(map(str, error.key))} {error.what}") from None
    _check_memory(experiment, settings, gpus, announce)
    return settings


def missing_gpu(experiment: Experiment) -> str | None:
    """Return a warning if real blocks shall compute on a GPU and none is found here; else ``None``."""
    devices = (
        experiment.compute.blocks.devices if experiment.compute.blocks and not experiment.machines else ()
    )
    asked = next((device for device in devices if device not in ("cpu", "auto")), None)
    if asked is None or find_gpus():
        return None
    return (
        f'compute.device is "{asked}", but no GPU was found (`testbed doctor` explains why): the run would '
        "be refused"
    )


def _is_looked_up(device: str) -> bool:
    return device == "auto" or device.startswith(("GPU-", "MIG-"))


def _full(device: str, gpus: Sequence[Gpu]) -> str:
    """Return the full UUID of a device whose UUID may be shortened, as in CUDA. Raises ``UserError``."""
    if not _is_looked_up(device):
        return device
    found = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(device)]
    if len(found) != 1:
        why = "matches several" if found else "is none"
        raise UserError(
            f'compute.device "{device}" {why} of the GPUs here; use one of {", ".join(map(str, gpus))}'
        )
    return found[0]


def _check_memory(
    experiment: Experiment, settings: BlocksSettings, gpus: Sequence[Gpu], announce: Callable[[str], None]
) -> None:
    servers = experiment.problem.servers
    for gpu in gpus:
        those = [s for n, s in enumerate(servers) if settings.device_of(n) == gpu.uuid]
        wanted_bytes = sum(server.memory_bytes for server in those)
        if gpu.memory_bytes is None and those:
            announce(f"the memory of {gpu.uuid} is not checked: without nvidia-ml-py it is unknown")
        elif gpu.memory_bytes is not None and wanted_bytes > gpu.memory_bytes * _ROUNDING:
            names = ", ".join(server.name for server in those[:5]) + (", ..." if len(those) > 5 else "")
            raise UserError(
                f"the servers on {gpu} ({names}) have {amount(wanted_bytes)} of memory together, more than "
                "the device; give them less, or list more or larger devices in compute.device"
            )


def _from_nvml() -> list[Gpu] | None:
    """Return the GPUs by nvidia-ml-py; ``None`` if it is not installed, or finds no driver."""
    try:
        import pynvml as nvml
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return [gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _of_nvml(nvml, index)]
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _of_nvml(nvml: Any, index: int) -> Iterator[Gpu]:
    """Yield the GPU of that index, or its MIG instances."""
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    for handle in [gpu] if (instances := _instances(nvml, gpu)) is None else instances:
        yield Gpu(
            index,
            nvml.nvmlDeviceGetUUID(handle),
            nvml.nvmlDeviceGetName(handle),
            float(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        )


def _instances(nvml: Any, gpu: Any) -> list[Any] | None:
    """Return handles of the MIG instances; ``None`` for a GPU that is not split."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(gpu)
    except nvml.NVMLError_NotSupported:
        return None
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))
        except nvml.NVMLError_NotFound:
            continue  # a slot without an instance
    return found


def _from_smi() -> list[Gpu]:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return _listed(done.stdout) if done.returncode == 0 else []


def _listed(text: str) -> list[Gpu]:
    """Parse ``nvidia-smi -L``: a line for each GPU, and after it one for each of its MIG instances."""
    gpus: list[Gpu] = []
    for line in text.splitlines():
        whole = re.match(r"GPU (\d+): (.+) \(UUID: (GPU-\S+)\)", line)
        part = re.match(r"\s+(MIG .+?)\s+Device\s+\d+: \(UUID: (MIG-\S+)\)", line)
        if whole:
            parent = Gpu(int(whole[1]), whole[3], whole[2], None)
            gpus.append(parent)
        elif part and gpus:
            if gpus[-1] is parent:
                gpus.pop()
            gpus.append(Gpu(parent.index, part[2], f"{parent.name} {part[1]}", None))
    return gpus


def _visible(gpus: Sequence[Gpu], wanted: str | None) -> list[Gpu]:
    """Return the GPUs in ``CUDA_VISIBLE_DEVICES``, in its order.

    As in CUDA, an unknown name ends the list.
    """
    if wanted is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for name in wanted.split(","):
        name = name.strip()
        those = [
            g for g in gpus if (str(g.index) == name if name.isdigit() else name and g.uuid.startswith(name))
        ]
        if not those:
            break
        chosen += those
    return chosen

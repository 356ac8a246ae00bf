"""The device that computes: opens it, reads its free memory, and copies hidden states to it and from it."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from nodes.compute import ComputeError
from policies.problem import SCALE_BYTES, Wire

_FIRST_WITH_BFLOAT16 = 8
"""Compute capability (Ampere). torch's own question is about the current device, which need not be this one."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_device(name: str, dtype_name: str) -> tuple[torch.device, torch.dtype]:
    """Returns a device and a dtype by their names.

    ``name`` is "cpu", "cuda", "cuda:N", or the UUID of a GPU or MIG instance: then this process can use no
    other GPU. Raises ``ComputeError`` if there is no such device, or if it does not support the dtype.
    """
    if dtype_name not in DTYPES:
        raise ComputeError(f'unknown dtype "{dtype_name}"; supported dtypes: {", ".join(DTYPES)}')
    dtype = DTYPES[dtype_name]
    is_uuid = name.startswith(("GPU-", "MIG-"))
    if is_uuid:
        _see_only(name)
    try:
        device = torch.device("cuda:0" if is_uuid else name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise ComputeError(
            f'the device "{name}" cannot be used: {reason}; choose one that `testbed doctor` lists'
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ComputeError(f'the device "{name}" is not supported; supported devices: cpu, cuda')
    if device.type == "cuda" and dtype == torch.bfloat16:
        properties = torch.cuda.get_device_properties(device)
        if properties.major < _FIRST_WITH_BFLOAT16:
            raise ComputeError(f"{properties.name} does not compute in {dtype_name}")
    if device.type == "cuda":
        # cuDNN's attention plans anew for every length of a session, which takes some 30 ms, and a session
        # gets longer with every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # float32 is then float32, whatever the environment has turned on.
        torch.backends.cuda.matmul.allow_tf32 = False
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device, dtype


def _see_only(uuid: str) -> None:
    """Lets CUDA see only the device ``uuid``, as ``cuda:0``.

    Raises ``ComputeError`` if CUDA has begun with others.

    CUDA reads its environment only once, when it begins.
    """
    if torch.cuda.is_initialized() and os.environ.get("CUDA_VISIBLE_DEVICES") != uuid:
        raise ComputeError(f'the device "{uuid}" cannot be used: this process has begun CUDA with others')
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid


def available_bytes(device: torch.device) -> float:
    """Returns the bytes that are free on the device, for all processes; infinite where that is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError):  # no Linux
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
        if found:
            return float(found[1]) * 1024
    return float("inf")


def limit_memory(device: torch.device, limit_bytes: float) -> None:
    """Lets this process allocate at most ``limit_bytes`` of a GPU, so that others can share it.

    Ignored on a CPU.
    """
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes), device)


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Returns the bytes that this process uses: its allocator's on a GPU, its resident set on a CPU."""
    if device.type == "cuda":
        return {
            "device_allocated_bytes": float(torch.cuda.memory_allocated(device)),
            "device_reserved_bytes": float(torch.cuda.memory_reserved(device)),
            "device_peak_bytes": float(torch.cuda.max_memory_allocated(device)),
        }
    with contextlib.suppress(OSError):  # no Linux
        found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
        if found:
            return {"resident_bytes": float(found[1]) * 1024}
    return {}


@contextlib.contextmanager
def explaining_out_of_memory(what: str) -> Iterator[None]:
    """Turns an out-of-memory error in the body into a ``ComputeError`` with ``what`` and torch's message."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ComputeError(f"{what}: {error}") from error


def is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


_SENT = {"fp16": torch.float16, "int8": torch.int8}
"""The type of what is sent."""


def from_bytes(
    payloads: Sequence[bytes],
    n_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    wire: Wire | None = None,
) -> torch.Tensor:
    """Returns hidden states ``[n_tokens, hidden size]`` from payloads: the bytes of what is sent, row after row."""
    of_wire = dtype if wire is None else _SENT[wire]
    if device.type == "cuda":
        # From pinned memory the copy needs no staging; later work of this stream waits for it.
        host = torch.empty(sum(map(len, payloads)), dtype=torch.uint8, pin_memory=True)
        end = host.data_ptr()
        for payload in payloads:  # once: prompts have tens of megabytes
            ctypes.memmove(end, payload, len(payload))
            end += len(payload)
        states = host.to(device, non_blocking=True).view(of_wire).reshape(n_tokens, -1)
    else:
        states = torch.frombuffer(bytearray().join(payloads), dtype=of_wire).reshape(n_tokens, -1)
    if wire == "int8":
        scales = states[:, :SCALE_BYTES].contiguous().view(torch.float32)
        states = states[:, SCALE_BYTES:] * scales
    return states.to(dtype)


def sent(states: torch.Tensor, wire: Wire) -> torch.Tensor:
    """Returns hidden states ``[n_tokens, hidden size]`` as they are sent: with int8 each row behind its scale."""
    if wire == "fp16":
        most = torch.finfo(torch.float16).max
        return states.clamp(-most, most).half()
    values = states.float()
    scales = values.abs().amax(dim=1, keepdim=True) / 127
    rows = (values / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat((scales.view(torch.int8), rows), dim=1)


def to_bytes(states: torch.Tensor, wire: Wire | None = None) -> bytes:
    """Returns the bytes of hidden states ``[n_tokens, hidden size]``; waits until they have been computed."""
    return to_payloads(states, [len(states)], wire)[0]


def to_payloads(states: torch.Tensor, sizes: Sequence[int], wire: Wire | None = None) -> list[bytes]:
    """As ``to_bytes``, for successive numbers of tokens apart."""
    if wire is not None:
        states = sent(states, wire)
    if states.is_cuda:
        host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        host.copy_(states, non_blocking=True)
        # Blocking: a process that waits must not keep a core from the others that share the GPU.
        done = torch.cuda.Event(blocking=True)
        # The copy is in the stream of the tensor's own device, which need not be the thread's current one.
        done.record(torch.cuda.current_stream(states.device))
        done.synchronize()
        states = host
    rows = states.contiguous().view(torch.uint8).numpy()
    ends = [*itertools.accumulate(sizes, initial=0)]
    return [rows[start:end].tobytes() for start, end in itertools.pairwise(ends)]

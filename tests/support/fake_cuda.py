"""In place of CUDA, where there is none: what ``torch.cuda`` is asked for is written down, and nothing is done.

It shows which device and stream a call names, and in which order calls come. That a GPU does what they say, it cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

TOTAL_BYTES = 100 * 1024**3
CURRENT = torch.device("cuda", 0)
"""The current device of every thread, as long as none is set."""


class FakeCuda:
    """``calls``: tuples of a function's name and what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails_in = ""
        """A function of a graph that raises."""
        self.fails_with: RuntimeError = RuntimeError("the device says no")
        self.then: dict[str, Callable[[], None]] = {}
        """What to do in a graph's function of this name."""
        self.workspace: str | None = "outside"
        """Where cuBLAS' workspace of the one stream lies: steps that are not recorded have made it outside the pool."""
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self._clear_workspaces, raising=False)
        for name in (
            "synchronize",
            "empty_cache",
            "set_device",
            "set_stream",
            "set_per_process_memory_fraction",
        ):
            monkeypatch.setattr(torch.cuda, name, self._noting(name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: _Stream(self, device))
        monkeypatch.setattr(torch.cuda, "Event", lambda **given: _Event(self, given))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=CURRENT: _Stream(self, device))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: _Graph(self))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        self.graphs_of: dict[Any, int] = {}
        """How many graphs live in a pool, by its handle; 0 once the last is gone."""
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL_BYTES, TOTAL_BYTES))
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=TOTAL_BYTES)
        )
        for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, lambda _: 0)

    def _noting(self, name: str) -> Any:
        return lambda *given: self.calls.append((name, *given))

    def _clear_workspaces(self) -> None:
        self.workspace = None

    def of(self, *names: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in names]


class _Stream:
    def __init__(self, cuda: FakeCuda, device: torch.device) -> None:
        self.device = device
        self._cuda = cuda

    def synchronize(self) -> None:
        self._cuda.calls.append(("stream.synchronize", self.device))


class _Event:
    def __init__(self, cuda: FakeCuda, given: dict[str, Any]) -> None:
        self._cuda = cuda
        cuda.calls.append(("Event", given))

    def record(self, stream: _Stream | None = None) -> None:
        self._cuda.calls.append(("event.record", stream.device if stream is not None else CURRENT))

    def synchronize(self) -> None:
        self._cuda.calls.append(("event.synchronize",))


class _Graph:
    """Records nothing and plays nothing: a step answers what it answered when it was recorded.

    As in torch, a pool whose last graph is gone takes no other, and a graph that goes takes the workspace with it that its
    stream has: whoever recorded the address of one outside the pool would write into others' memory.
    """

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._pool: Any = None

    def capture_begin(self, pool: Any, **given: Any) -> None:
        if self._cuda.graphs_of.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._pool = pool
        self._cuda.graphs_of[pool] = self._cuda.graphs_of.get(pool, 0) + 1
        if self._cuda.workspace is None:
            self._cuda.workspace = "in the pool"
        self._workspace = self._cuda.workspace
        self._note("capture_begin", given)

    def capture_end(self) -> None:
        self._note("capture_end")

    def replay(self) -> None:
        assert self._workspace == "in the pool", "its workspace may be gone"
        self._note("replay")

    def _note(self, name: str, *given: Any) -> None:
        self._cuda.calls.append((name, *given))
        self._cuda.then.get(name, lambda: None)()
        if name == self._cuda.fails_in:
            raise self._cuda.fails_with

    def __del__(self) -> None:
        if self._pool is not None:
            self._cuda.graphs_of[self._pool] -= 1


class OnDevice(torch.Tensor):
    """A tensor of the CPU's that says it is on ``cuda:1``."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 1)


def on_device(values: torch.Tensor) -> torch.Tensor:
    return values.as_subclass(OnDevice)

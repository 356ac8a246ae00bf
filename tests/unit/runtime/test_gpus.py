"""Which GPUs and MIG instances are found, and what servers of a scenario get of them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from testbed.cli.main import app
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import Experiment
from testbed.inspect.machine import _uuid_rows
from testbed.runs import session
from testbed.runtime import gpus as module
from testbed.runtime.blocks import blocks_model
from testbed.runtime.gpus import Gpu, find_gpus, missing_gpu, shared_out

WHOLE = Gpu(0, "GPU-aaaa", "NVIDIA A100", 80e9)
PARTS = [Gpu(1, f"MIG-bbb{n}", f"NVIDIA A100 MIG {n}g.10gb", n * 50e6) for n in (1, 2)]
LISTED = """\
GPU 0: NVIDIA A100 (UUID: GPU-aaaa)
GPU 1: NVIDIA A100 (UUID: GPU-bbbb)
  MIG 1g.10gb     Device  0: (UUID: MIG-bbb1)
  MIG 2g.10gb     Device  1: (UUID: MIG-bbb2)
GPU 2: NVIDIA H200 (UUID: GPU-cccc)
"""


class NvmlError(Exception): ...


class NotSupported(NvmlError): ...


class NotFound(NvmlError): ...


@dataclass(frozen=True)
class Handle:
    uuid: str
    name: str
    total: int
    instances: tuple[Handle | None, ...] | None = None
    """Of a GPU in MIG mode."""
    has_mig: bool = True


class FakeNvml(ModuleType):
    """The driver's library as nvidia-ml-py gives it."""

    NVML_DEVICE_MIG_ENABLE = 1
    NVMLError, NVMLError_NotSupported, NVMLError_NotFound = NvmlError, NotSupported, NotFound

    def __init__(self, *gpus: Handle, has_driver: bool = True) -> None:
        super().__init__("pynvml")
        self.is_open = False
        self._gpus, self._has_driver = gpus, has_driver

    def nvmlInit(self) -> None:  # noqa: N802 - the library's names
        if not self._has_driver:
            raise NvmlError
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:  # noqa: N802
        return self._gpus[index]

    def nvmlDeviceGetMigMode(self, gpu: Handle) -> tuple[int, int]:  # noqa: N802
        if not gpu.has_mig:
            raise NotSupported
        return int(gpu.instances is not None), 0

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Handle) -> int:  # noqa: N802
        return len(gpu.instances or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Handle, number: int) -> Handle:  # noqa: N802
        instance = (gpu.instances or ())[number]
        if instance is None:
            raise NotFound
        return instance

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:  # noqa: N802
        return handle.uuid

    def nvmlDeviceGetName(self, handle: Handle) -> str:  # noqa: N802
        return handle.name

    def nvmlDeviceGetMemoryInfo(self, handle: Handle) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=handle.total)


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that has neither of the two ways to ask its driver. Returns a folder on ``PATH``."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def program(folder: Path, text: str, status: int = 0) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}END\nexit {status}\n")
    (folder / "nvidia-smi").chmod(0o755)


def having(monkeypatch: pytest.MonkeyPatch, *gpus: Gpu) -> None:
    monkeypatch.setattr(module, "find_gpus", lambda: list(gpus))


def blocks(*options: str) -> Experiment:
    """Five servers with 20 MB each."""
    return load_experiment("bloom-tiny", ["compute.backend=blocks", "compute.random_weights=true", *options])


def devices(experiment: Experiment, said: list[str] | None = None) -> list[str]:
    settings = shared_out(experiment, ([] if said is None else said).append)
    assert settings is not None
    return [settings.device_of(number) for number in range(experiment.problem.n_servers)]


def test_the_drivers_library_names_gpus_and_in_place_of_a_split_one_its_instances(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Handle("MIG-bbb1", "A100 MIG 1g.10gb", 10), None, Handle("MIG-bbb2", "A100 MIG 2g.10gb", 20)
    nvml = FakeNvml(
        Handle("GPU-aaaa", "T4", 16, has_mig=False),
        Handle("GPU-bbbb", "A100", 80, parts),
        Handle("GPU-cccc", "H200", 141),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert find_gpus() == [
        Gpu(0, "GPU-aaaa", "T4", 16.0),
        Gpu(1, "MIG-bbb1", "A100 MIG 1g.10gb", 10.0),
        Gpu(1, "MIG-bbb2", "A100 MIG 2g.10gb", 20.0),
        Gpu(2, "GPU-cccc", "H200", 141.0),
    ]
    assert not nvml.is_open


def test_without_the_library_or_its_driver_nvidia_smi_is_asked(
    no_tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_gpus() == []
    program(no_tools, LISTED)
    found = [
        Gpu(0, "GPU-aaaa", "NVIDIA A100", None),
        Gpu(1, "MIG-bbb1", "NVIDIA A100 MIG 1g.10gb", None),
        Gpu(1, "MIG-bbb2", "NVIDIA A100 MIG 2g.10gb", None),
        Gpu(2, "GPU-cccc", "NVIDIA H200", None),
    ]
    assert find_gpus() == found
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(has_driver=False))
    assert find_gpus() == found
    program(no_tools, "NVIDIA-SMI has failed because it could not communicate\n", status=9)
    assert find_gpus() == []


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        ("2,0", ["GPU-cccc", "GPU-aaaa"]),
        ("1", ["MIG-bbb1", "MIG-bbb2"]),
        ("MIG-bbb2", ["MIG-bbb2"]),
        ("GPU-c, 0", ["GPU-cccc", "GPU-aaaa"]),
        ("0,-1,2", ["GPU-aaaa"]),
        ("", []),
    ],
)
def test_what_the_environment_hides_is_not_there(
    visible: str, uuids: list[str], no_tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(no_tools, LISTED)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.uuid for gpu in find_gpus()] == uuids


def test_auto_goes_round_what_there_is_and_says_what(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    having(monkeypatch, WHOLE, PARTS[1])
    experiment, said = blocks("compute.device=auto"), list[str]()
    assert devices(experiment, said) == ["GPU-aaaa", "MIG-bbb2", "GPU-aaaa", "MIG-bbb2", "GPU-aaaa"]
    assert said == [
        'compute.device "auto" uses in turn GPU-aaaa NVIDIA A100 80 GB, MIG-bbb2 NVIDIA A100 MIG 2g.10gb 100 MB'
    ]
    real = blocks_model(experiment, tmp_path)
    assert real is not None
    assert [real.blocks_spec(number, 1e9).device for number in (0, 1)] == ["GPU-aaaa", "MIG-bbb2"]
    assert real.hub_spec().device == "GPU-aaaa"


def test_auto_means_cpu_where_there_is_no_gpu_and_says_so(tmp_path: Path) -> None:
    experiment, said = blocks("compute.device=auto"), list[str]()
    assert devices(experiment, said) == ["cpu"] * 5
    [sentence] = said
    assert sentence.startswith('compute.device "auto" uses the CPU: no GPU was found')
    real = blocks_model(experiment, tmp_path)
    assert real is not None
    assert real.settings.devices == ("cpu",)


@pytest.mark.parametrize("device", ["auto", '["MIG-bbb1", "MIG-bbb2"]'])
def test_servers_that_want_more_than_their_device_has_are_refused(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three servers of 20 MB are on the instance of 50 MB, two on that of 100 MB."""
    having(monkeypatch, *PARTS)
    with pytest.raises(UserError) as refused:
        devices(blocks(f"compute.device={device}"))
    assert str(refused.value) == (
        "the servers on MIG-bbb1 NVIDIA A100 MIG 1g.10gb 50 MB (large-0, small-1, large-2) have 60 MB of memory "
        "together, more than the device; give them less, or list more or larger devices in compute.device"
    )
    having(monkeypatch, replace(PARTS[0], memory_bytes=60e6), PARTS[1])
    assert devices(blocks(f"compute.device={device}"))[:2] == ["MIG-bbb1", "MIG-bbb2"]


def test_memory_that_nobody_knows_is_said_to_be_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, replace(WHOLE, memory_bytes=None))
    said: list[str] = []
    assert devices(blocks("compute.device=auto"), said) == ["GPU-aaaa"] * 5
    assert said[1] == "the memory of GPU-aaaa is not checked: without nvidia-ml-py it is unknown"


def test_a_uuid_may_be_shortened_and_one_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = blocks('compute.device=["GPU-a", "MIG-bbb2", "cpu"]')
    assert devices(asked)[:3] == ["GPU-a", "MIG-bbb2", "cpu"]  # nobody to ask: left to the nodes
    having(monkeypatch, WHOLE, *PARTS)
    assert devices(asked)[:3] == ["GPU-aaaa", "MIG-bbb2", "cpu"]
    with pytest.raises(
        UserError, match='"GPU-ffff" is none of the GPUs here; use one of GPU-aaaa NVIDIA A100 80 GB, MIG'
    ):
        devices(blocks("compute.device=GPU-ffff"))
    with pytest.raises(UserError, match='"MIG-bbb" matches several of the GPUs here'):
        devices(blocks("compute.device=MIG-bbb"))


def test_a_step_that_no_gpu_has_room_for_is_refused_once_auto_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    long = blocks("compute.device=auto", "workload.n_input_tokens=200000", "workload.n_output_tokens=8")
    assert devices(long)[0] == "cpu"
    having(monkeypatch, WHOLE)
    with pytest.raises(UserError, match=r"^workload has a request of 200008 tokens.* of a GPU's memory, but"):
        devices(long)


def test_over_several_machines_there_is_no_one_machine_to_look_at() -> None:
    experiment = replace(blocks("compute.device=auto"), machines="ray")
    with pytest.raises(UserError, match='is "auto", which works on one machine only'):
        devices(experiment)


def test_names_that_are_no_matter_of_this_machine_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch)
    monkeypatch.setattr(module, "find_gpus", lambda: pytest.fail("was asked"))
    assert devices(blocks("compute.device=cuda:1")) == ["cuda:1"] * 5
    assert shared_out(load_experiment("bloom-tiny"), pytest.fail) is None


def test_validate_says_that_a_gpu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--compute", "blocks", "--random-weights", "--set", "compute.device=cuda"]
    having(monkeypatch)
    said = CliRunner().invoke(app, ["validate", "bloom-tiny", *options], catch_exceptions=False).stdout
    assert said.splitlines()[-1].startswith('compute.device is "cuda", but no GPU was found')
    having(monkeypatch, *PARTS)
    assert "no GPU" not in CliRunner().invoke(app, ["validate", "bloom-tiny", *options]).stdout
    having(monkeypatch)
    assert missing_gpu(blocks("compute.device=auto")) is None and missing_gpu(blocks()) is None
    assert missing_gpu(replace(blocks("compute.device=cuda"), machines="ray")) is None


def test_validate_and_up_refuse_alike_and_validate_says_who_gets_what(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--set", "compute.backend=blocks", "--set", "compute.device=auto"]
    here = CliRunner().invoke(app, ["validate", "bloom-tiny", *options], catch_exceptions=False)
    assert "uses the CPU" in here.stdout.splitlines()[-1]
    having(monkeypatch, *PARTS)
    refused = CliRunner().invoke(app, ["validate", "bloom-tiny", *options])
    assert isinstance(refused.exception, UserError)
    monkeypatch.setattr(session, "require_blocks", lambda _: None)
    with pytest.raises(UserError, match=r"MIG-bbb1 .* have 60 MB of memory together"):
        session.check_can_run(blocks("compute.device=auto"))
    having(monkeypatch, WHOLE)
    told = CliRunner().invoke(app, ["validate", "bloom-tiny", *options, "--json"], catch_exceptions=False)
    assert json.loads(told.stdout)["devices"] == ["GPU-aaaa"] * 5


def test_the_doctor_has_a_row_for_each(no_tools: Path) -> None:
    [none] = _uuid_rows()
    assert (none["name"], none["works"]) == ("gpu uuid", False)
    assert "device" in none["detail"]
    program(no_tools, LISTED)
    assert [row["detail"] for row in _uuid_rows()][:2] == [
        "GPU-aaaa NVIDIA A100",
        "MIG-bbb1 NVIDIA A100 MIG 1g.10gb",
    ]

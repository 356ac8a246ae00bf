"""Which CPUs are kept awake: all in a virtual machine, one per core on hardware."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.runtime.real.awake import cpus_to_keep_awake


def machine(folder: Path, flags: str, siblings: dict[int, str]) -> tuple[Path, Path]:
    """A system's folder of CPUs and its cpuinfo."""
    about = folder / "cpuinfo"
    about.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    for cpu, listed in siblings.items():
        topology = folder / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(listed + "\n")
    return folder, about


TWO_CORES = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}


@pytest.mark.parametrize(
    ("flags", "cpus", "expected"),
    [
        ("fpu ht", {0, 1, 2, 3}, [0, 1]),
        ("fpu ht", {2, 3, 1}, [1, 2]),
        ("fpu ht hypervisor", {0, 1, 2, 3}, [0, 1, 2, 3]),
        ("fpu ht", {0, 7}, [0, 7]),
    ],
    ids=["one-per-core", "those-allowed", "virtual-machine", "unknown-topology"],
)
def test_a_core_is_kept_awake_by_one_of_its_threads(
    flags: str, cpus: set[int], expected: list[int], tmp_path: Path
) -> None:
    assert cpus_to_keep_awake(cpus, *machine(tmp_path, flags, TWO_CORES)) == expected

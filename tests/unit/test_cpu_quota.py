"""CPU quotas of control groups of both versions, read from folders that the tests make."""

from __future__ import annotations

from pathlib import Path

import pytest

from testbed.runtime.quota import cpu_quota


@pytest.fixture
def mounts(tmp_path: Path) -> Path:
    folder = tmp_path / "cgroup"
    folder.mkdir()
    return folder


def quota(mounts: Path, line: str) -> float | None:
    own = mounts.parent / "self"
    own.write_text(line + "\n")
    return cpu_quota(mounts, own)


def test_the_tightest_group_on_the_way_out_counts(mounts: Path) -> None:
    inner = mounts / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert quota(mounts, "0::/a/b") is None
    (mounts / "a" / "cpu.max").write_text("150000 100000\n")
    assert quota(mounts, "0::/a/b") == 1.5
    (inner / "cpu.max").write_text("50000 100000\n")
    assert quota(mounts, "0::/a/b") == 0.5


def test_the_first_version_of_control_groups_is_read_too(mounts: Path) -> None:
    folder = mounts / "cpu,cpuacct" / "docker"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    lines = "5:memory:/docker\n4:cpu,cpuacct:/docker\n1:name=systemd:/docker"
    assert quota(mounts, lines) is None
    (folder / "cpu.cfs_quota_us").write_text("200000\n")
    assert quota(mounts, lines) == 2.0


@pytest.mark.parametrize("text", ["", "garbage", "max", "1 0", "nan 1"])
def test_what_cannot_be_read_is_no_quota(text: str, mounts: Path) -> None:
    (mounts / "cpu.max").write_text(text)
    assert quota(mounts, "0::/") is None
    assert quota(mounts, "nothing") is None


def test_a_system_without_control_groups_has_none(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path, tmp_path / "missing") is None

"""Whole runs by an unprivileged user: no root, no capability, only user namespaces and /dev/net/tun.

Where the tests run as root, they become another user inside a mount namespace of their own, in which
that user can read this Python and open a TUN device, as on an ordinary desktop or server.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from netem.probe import probe_rootless
from tests.support.forked import asking
from tests.support.runs import COMMAND, FAST, PATIENCE_S, REAL, require

_USER = 65534
_ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the unprivileged user may write (pytest's own belong to root alone)."""
    path = Path(tempfile.mkdtemp(prefix="testbed-rootless-"))
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def _closed_ancestor(path: Path) -> Path | None:
    """The outermost folder above ``path`` that other users cannot enter."""
    closed = [p for p in (path, *path.parents) if not p.stat().st_mode & stat.S_IXOTH]
    return closed[-1] if closed else None


def _done_by_user(folder: Path, command: list[str], anew: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command line as an unprivileged user. ``testbed`` at its beginning is forked unless it must be ``anew``."""
    begins, number = asking()
    command = [*([] if anew or command[0] != COMMAND else begins), *command]
    return subprocess.run(
        _as_user(folder, command), capture_output=True, text=True, timeout=PATIENCE_S, pass_fds=[number]
    )


def _as_user(folder: Path, command: list[str]) -> list[str]:
    if os.geteuid() != 0:
        return command
    needed = sorted({Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), _ROOT})
    lines = ["set -e"]
    closed = {}
    for number, path in enumerate(needed):
        ancestor = _closed_ancestor(path)
        if ancestor is not None:
            closed[path] = ancestor
            lines += [f"mkdir {folder}/keep{number}", f"mount --bind {path} {folder}/keep{number}"]
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {ancestor}" for ancestor in sorted(set(closed.values()))]
    for number, path in enumerate(needed):
        if path in closed:
            lines += [f"mkdir -p {path}", f"mount --bind {folder}/keep{number} {path}"]
    lines += [
        f"mknod {folder}/tun c 10 200",
        f"chmod 666 {folder}/tun",
        f"mount --bind {folder}/tun /dev/net/tun",
        f"cd {folder}",
        f"exec setpriv --reuid={_USER} --regid={_USER} --clear-groups env HOME={folder} {shlex.join(command)}",
    ]
    return ["unshare", "--mount", "sh", "-c", "\n".join(lines)]


@pytest.mark.parametrize(
    ("network", "clock"),
    [("fabric", ()), ("memory", ()), ("fabric", REAL)],
    ids=["fabric", "memory", "fabric in real time"],
)
def test_an_unprivileged_user_runs_the_same_command(
    network: str, clock: tuple[str, ...], folder: Path
) -> None:
    require("rootless", probe_rootless())
    arguments = ["up", "clustered", *FAST, *clock, "--network", network, "--json"]
    command = [COMMAND, *arguments, "--out", str(folder / "run")]
    done = _done_by_user(folder, command, anew=(network, clock) == ("fabric", ()))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["network"], summary["clock"]) == (network, "real" if clock else "virtual")
    assert summary["n_completed"] == 3
    if os.geteuid() == 0:
        assert (folder / "run" / "summary.json").stat().st_uid == _USER


_HELD_AND_USED = """
testbed=$1 run=$2; shift 2
FORKED "$testbed" up clustered --network fabric --hold --out "$run" "$@" 2> "$run.err" &
until grep -q 'holding the testbed up' "$run.err" || ! kill -0 $!; do sleep 0.05; done
FORKED "$testbed" exec a100-0 --run "$run" -- sh -c 'id -u; hostname; getent hosts client-0; exit 5'
echo "code $?"
"$testbed" exec a100-1 --run "$run" -- sleep 1000 2> "$run.sleep" &
until pgrep -x sleep -P $! > /dev/null; do sleep 0.05; done
kill -INT %1; wait %2; echo "code $?"; wait %1; cat "$run.err" >&2
"""


def test_an_unprivileged_user_runs_programs_on_the_nodes_of_a_testbed(folder: Path) -> None:
    require("rootless", probe_rootless())
    text = _HELD_AND_USED.replace("FORKED", shlex.join(asking()[0]))
    script = ["bash", "-m", "-c", text, "held", COMMAND, str(folder / "run")]
    options = [*FAST, "--set", "workload.n_requests=1", *REAL]
    done = _done_by_user(folder, [*script, *options])
    lines = done.stdout.splitlines()
    assert lines[:4] == ["0", "a100-0", "198.18.0.1      client-0", "code 5"], done.stdout + done.stderr
    assert "code 143" in lines[4:], "the program ended with the testbed"


def test_the_doctor_tells_an_unprivileged_user_that_no_root_is_needed(folder: Path) -> None:
    require("rootless", probe_rootless())
    done = _done_by_user(folder, [COMMAND, "doctor", "--json"])
    assert done.returncode == 0, done.stderr
    works = {row["name"]: row["works"] for row in json.loads(done.stdout)["capabilities"]}
    assert works["rootless"] and works["network fabric"]
    if os.geteuid() == 0:
        assert not works["root"]

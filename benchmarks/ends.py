"""Seconds until a run with nine servers has ended, with all its processes: after Ctrl-C, its tables written, and after a
kill -9 of the command.

The baseline is an interpreter that has imported the command line and is sent Ctrl-C.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import figure
from benchmarks.proc import family

_NETWORKS = ("loopback", "fabric")
_SERVING_S = 1.0
"""A run is in the midst of its sessions so long after its nodes are up."""
_PATIENCE_S = 60.0
_IMPORTED = "import sys, time; import testbed.cli.main; print('nodes up', file=sys.stderr, flush=True); time.sleep(60)"


def measure() -> list[dict[str, Any]]:
    rows = []
    for network in _NETWORKS:
        rows.append(figure(f"Ctrl-C of a run on {network}", _ended_s(network, signal.SIGINT), "s", "<= 3 s"))
    rows.append(figure("kill -9 of a run on fabric", _ended_s("fabric", signal.SIGKILL), "s", "<= 3 s"))
    interpreter = [sys.executable, "-c", _IMPORTED]
    rows.append(figure("Ctrl-C of an interpreter (baseline)", _signalled_s(interpreter, signal.SIGINT), "s"))
    return rows


def _ended_s(network: str, number: signal.Signals) -> float:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "testbed", "up", "clustered", "--clock", "real", "--out", str(run)]
        took_s = _signalled_s([*command, "--set", f"network.backend={network}"], number)
        if number == signal.SIGINT and not (run / "summary.json").is_file():
            raise RuntimeError(f"a run on {network} left no summary.json after Ctrl-C")
    return took_s


def _signalled_s(command: Sequence[str], number: signal.Signals) -> float:
    """Returns the seconds from a signal until the command and its nodes have ended."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "nodes up" in line:
            break
    else:
        raise RuntimeError(f"{' '.join(command)} did not begin: {''.join(said)}")
    time.sleep(_SERVING_S)
    nodes = [os.pidfd_open(pid) for pid in family(process.pid) if pid != process.pid]
    sent_at = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=_PATIENCE_S)
    for node in nodes:
        if not select.select([node], [], [], _PATIENCE_S)[0]:
            raise RuntimeError(f"a node of {' '.join(command)} is there {_PATIENCE_S:g} s after its end")
        os.close(node)
    return time.monotonic() - sent_at

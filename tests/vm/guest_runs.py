"""Runs inside the guest: whole runs of the command line over netem, as root and as an unprivileged user,
and in virtual time, whose TCP must do without a setting that this older kernel lacks.

Every run is a forked child of this process, which has imported what the command line needs: that takes
longer than a run. Prints one line of JSON per run, with its exit status and what it said on stdout and
stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path

NOBODY = 1000
# A process that keeps the guest's only CPU awake would have to be emulated instruction by instruction.
NETEM = ["--network", "netem", "--json", "--set", "network.keep_cpus_awake=false"]
SHORT = [
    *NETEM, "--no-report", "--no-twin", "--no-page",
    "--set", "workload.n_requests=2", "--set", "workload.n_output_tokens=3", "--set", "workload.rate=1",
]  # fmt: skip
KILL = [
    "--set", "workload.n_output_tokens=6",
    "--set", 'fault=[{kind="kill", server="a100-0", after={request=0, tokens=2}, for="20 s"}]',
]  # fmt: skip
COMMANDS = {
    "clustered": ["up", "clustered", *SHORT],
    "gts-ce": ["up", "gts-ce", *SHORT],
    "faults": ["up", "clustered", *SHORT, *KILL],
    "forwarding": ["up", "clustered", *SHORT, *KILL, "--set", "policy.communication='server-to-server'"],
    "virtual": ["up", "clustered", "--network", "fabric", *SHORT[2:], "--clock", "virtual"],
    "memory": ["up", "clustered", "--network", "memory", *SHORT[2:]],
    "links": ["links", "gts-ce", *NETEM, "--pairs", "3", "--echoes", "10"],
}
RUNS = [
    *(("clustered", 0), ("gts-ce", NOBODY), ("links", NOBODY)),
    *(("faults", 0), ("forwarding", NOBODY)),
    *(("virtual", NOBODY), ("memory", NOBODY)),
]


IMPORTED = (
    *("testbed.cli.main", "testbed.runs.up", "testbed.studies.links.check", "testbed.runtime.real.handle"),
    *("testbed.runtime.virtual.memory", "testbed.runtime.virtual.processes", "testbed.runtime.nodeset"),
    *("testbed.experiments.resolve", "testbed.control.mover", "testbed.control.faults.recoveries"),
    *("testbed.results.summary", "testbed.results.tables", "testbed.results.text", "testbed.results.trace"),
    *("policies.foresight", "policies.milp", "nodes.server", "nodes.recovery", "networkx"),
)
"""What the commands import while they run, and what that brings. By name: nothing here uses them."""


def main() -> None:
    started_at = time.monotonic()
    for name in IMPORTED:
        importlib.import_module(name)
    print(f"imports took {time.monotonic() - started_at:.1f} s", flush=True)
    for name, user in RUNS:
        pid = os.fork()
        if pid == 0:
            _run(name, user)
        os.waitpid(pid, 0)


def _run(name: str, user: int) -> None:
    arguments = COMMANDS[name]
    started_at = time.monotonic()
    folder = Path(f"/tmp/run-{user}-{name}")
    folder.mkdir()
    os.chown(folder, user, user)
    os.setgid(user)
    os.setuid(user)
    os.environ["HOME"] = str(folder)
    messages = folder / "messages"
    with open(messages, "wb") as file:
        os.dup2(file.fileno(), 2)
    answer, status = io.StringIO(), 1
    sys.argv = ["testbed", *arguments, *(["--out", str(folder / "run")] if arguments[0] == "up" else [])]
    try:
        from testbed.cli.main import main as command_line

        with contextlib.redirect_stdout(answer):
            command_line()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    took_s = time.monotonic() - started_at
    report = {
        "run": name, "user": user, "status": status, "took_s": took_s,
        "stdout": answer.getvalue(), "stderr": messages.read_text(encoding="utf-8")[-3000:],
    }  # fmt: skip
    print("@@run " + json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

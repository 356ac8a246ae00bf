"""Runs inside the guest: whole runs of the command line over netem, as root and as an unprivileged user.

Every run is a forked child of this process, which has imported what the command line needs: that takes
longer than a run. Prints one line of JSON per run: ``{"run", "user", "status", "answer"}``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path

NOBODY = 1000
SHORT = [
    "--no-report", "--json",
    "--set", "workload.n_requests=2", "--set", "workload.n_output_tokens=3", "--set", "workload.rate=1",
]  # fmt: skip
RUNS = {
    "clustered": ["up", "clustered", "--network", "netem", *SHORT],
    "gts-ce": ["up", "gts-ce", "--network", "netem", *SHORT],
    "links": ["links", "gts-ce", "--network", "netem", "--pairs", "2", "--echoes", "10", "--json"],
}


def main() -> None:
    started_at = time.monotonic()
    import testbed.linkcheck
    import testbed.results.tables
    import testbed.results.text
    import testbed.results.trace
    import testbed.scenario
    import testbed.topology
    import testbed.up  # noqa: F401

    print(f"imports took {time.monotonic() - started_at:.1f} s", flush=True)
    for user in (0, NOBODY):
        for name, arguments in RUNS.items():
            pid = os.fork()
            if pid == 0:
                _run(name, user, arguments)
            os.waitpid(pid, 0)


def _run(name: str, user: int, arguments: list[str]) -> None:
    started_at = time.monotonic()
    folder = Path(f"/tmp/run-{user}-{name}")
    folder.mkdir()
    os.chown(folder, user, user)
    os.setgid(user)
    os.setuid(user)
    os.environ["HOME"] = str(folder)
    answer, status = io.StringIO(), 1
    sys.argv = ["testbed", *arguments, *(["--out", str(folder / "run")] if arguments[0] == "up" else [])]
    try:
        from testbed.cli import main as command_line

        with contextlib.redirect_stdout(answer):
            command_line()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    took_s = time.monotonic() - started_at
    report = {"run": name, "user": user, "status": status, "took_s": took_s, "answer": answer.getvalue()}
    print("@@run " + json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()

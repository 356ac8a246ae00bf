"""Runs inside the guest: all that the lane tests, part by part, as root and as an unprivileged user.

Every part, and every command line in it, is a forked child of this process, which has imported what they need: an
import takes longer than a run. After a part it prints ``@@part NAME STATUS``, and for each whole run one line of JSON.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from _pytest.config import default_plugins

from testbed.experiments import load_experiment
from tests.support.children import ending
from tests.support.forked import fork_interpreters, freeze
from tests.vm import guest_accuracy

NOBODY = 1000
_PR_SET_DUMPABLE = 4
CONTRACT = ("tests/contract/test_network_contract.py", "tests/contract/test_network_changes.py")
_PYTEST = (
    *("--noconftest", "-p", "no:cacheprovider", "-o", "asyncio_mode=", "-W", "ignore", "-o", "addopts="),
    *("-o", "timeout=", "--color=no", "-v"),
)
# A process that keeps the guest's only CPU awake would have to be emulated instruction by instruction.
ASLEEP = ["--set", "network.keep_cpus_awake=false"]
NETEM = ["--network", "netem", "--json", *ASLEEP]
SHORT = [
    *NETEM, "--no-report", "--no-twin", "--no-page",
    "--set", "workload.n_requests=2", "--set", "workload.n_output_tokens=3", "--set", "workload.rate=1",
]  # fmt: skip
# Long messages over netem are a matter of the contract; here they cost more than all else.
KILL = [
    "--set", "model.hidden_size=112",
    "--set", "workload.n_output_tokens=6",
    "--set", 'fault=[{kind="kill", server="a100-0", after={request=0, tokens=2}, for="20 s"}]',
]  # fmt: skip
ON_MEMORY = ["up", "clustered", "--network", "memory", *SHORT[2:]]
"""The same as "virtual" on a network that no kernel is asked about."""
# "virtual" is virtual time, whose TCP must do without a setting that this older kernel lacks.
COMMANDS = {
    "faults": ["up", "clustered", *SHORT, *KILL],
    "forwarding": ["up", "clustered", *SHORT, *KILL, "--set", "policy.communication='server-to-server'"],
    "virtual": ["up", "clustered", "--network", "fabric", *SHORT[2:], "--clock", "virtual"],
    "links": ["links", "gts-ce", *NETEM, "--pairs", "3", "--echoes", "10"],
}
RUNS = [("faults", 0), ("links", NOBODY), ("forwarding", NOBODY), ("virtual", NOBODY)]
IMPORTED = (
    *(
        "testbed.cli.main",
        "testbed.runs.up",
        "testbed.runs.net",
        "testbed.runs.inside",
        "testbed.runs.byhand",
        "testbed.runtime.real.launcher",
    ),
    *("testbed.studies.links.check", "testbed.runtime.real.handle", "testbed.runtime.guests"),
    *("testbed.runtime.virtual.processes", "testbed.runtime.nodeset"),
    *("testbed.experiments.resolve", "testbed.control.mover", "testbed.control.faults.recoveries"),
    *("testbed.results.summary", "testbed.results.tables", "testbed.results.text", "testbed.results.trace"),
    *("policies.foresight", "policies.milp", "nodes.server", "nodes.recovery", "networkx"),
)
"""What the commands import while they run, and what that brings. By name: nothing here uses them."""


def import_all() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")


def main() -> None:
    import_all()
    for scenario in ("clustered", "gts-ce"):  # what is read once for all scenarios
        load_experiment(scenario)
    freeze()
    _say(f"imports took until {_uptime_s():.0f} s")
    contract = "-k", "netem", *CONTRACT
    for name, user, work in (
        # Its fixture makes the process administrator of a network of its own: it comes last.
        ("contract-0", 0, partial(_tests, *contract, "tests/vm/guest_netem.py")),
        (f"contract-{NOBODY}", NOBODY, partial(_tests, *contract)),
        ("accuracy", 0, guest_accuracy.main),
        ("runs", 0, _whole_runs),
        ("programs", 0, _programs),
    ):
        status = _status(_begin(work, user, Path("/tmp")))
        _say(f"@@part {name} {status} after {_uptime_s():.0f} s")


def _say(text: str) -> None:
    print(text, flush=True)  # or a forked child would say it again


def _uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _tests(*arguments: str) -> None:
    sys.exit(pytest.main([*_PYTEST, *arguments]))


def _begin(work: Callable[[], None], user: int, home: Path, prints_in: Path | None = None) -> int:
    """Forks a child that does some work as a user, and returns its process id.

    ``prints_in``: a folder for files with what it prints.
    """
    pid = os.fork()
    if pid == 0:
        with ending():
            if prints_in is not None:
                for descriptor, name in ((1, "stdout"), (2, "stderr")):
                    with open(prints_in / name, "wb") as file:
                        os.dup2(file.fileno(), descriptor)
            os.setgid(user)
            os.setuid(user)
            # What changes its user may not look into /proc/self, which making a user namespace needs; an exec would undo that.
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            os.environ["HOME"] = str(home)
            work()
    return pid


def _status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _begin_command(arguments: list[str], folder: Path, user: int = 0) -> int:
    """Begins ``testbed ARGUMENTS`` in a child. What it prints is in the files stdout and stderr of a new folder."""
    folder.mkdir()
    os.chown(folder, user, user)
    for name in ("stdout", "stderr"):
        (folder / name).touch()

    def work() -> None:
        from testbed.cli.main import main as command_line

        sys.argv = ["testbed", *arguments]
        fork_interpreters()
        command_line()

    return _begin(work, user, folder, folder)


def _whole_runs() -> None:
    for name, user in RUNS:
        folder, arguments = Path(f"/tmp/run-{user}-{name}"), COMMANDS[name]
        out = ["--out", str(folder / "run")] if arguments[0] == "up" else []
        status = _status(_begin_command([*arguments, *out], folder, user))
        answer, messages = ((folder / of).read_text(encoding="utf-8") for of in ("stdout", "stderr"))
        report = {"run": name, "user": user, "status": status, "stdout": answer, "stderr": messages[-3000:]}
        _say("@@run " + json.dumps(report))


def _programs() -> None:
    """Programs on the nodes of a network alone, and links changed by hand."""
    run, commands = Path("/tmp/net"), Path("/tmp/commands")
    commands.mkdir()

    def testbed(*arguments: str) -> tuple[int, str]:
        folder = commands / str(len(list(commands.iterdir())))
        status = _status(_begin_command([*arguments[:2], "--run", str(run), *arguments[2:]], folder))
        return status, (folder / "stdout").read_text(encoding="utf-8")

    def say_round_trip(source: str, target: str, when: str) -> None:
        status, text = testbed("exec", source, "--", "ping", "-c", "3", target)
        assert status == 0, text
        _say(f"@@rtt {when} {text.splitlines()[-1]}")

    assert os.spawnlp(os.P_WAIT, "mount", "mount", "-t", "tmpfs", "etc", "/etc") == 0
    Path("/etc/hosts").write_text("127.0.0.1 localhost\n", encoding="ascii")
    subnet = ["--set", "network.subnet=10.77.0.0/16", "--out", str(run)]
    network = _begin_command(
        ["net", "clustered", "--network", "netem", *ASLEEP, *subnet], messages := Path("/tmp/net-messages")
    )
    while "is up" not in (text := (messages / "stderr").read_text(encoding="utf-8")):
        assert os.waitpid(network, os.WNOHANG) == (0, 0), text
        time.sleep(0.2)
    say_round_trip("client-0", "a100-0", "before")
    say_round_trip("a100-0", "a100-1", "before")
    assert testbed("link", "set", "a100-0", "a100-1", "--rtt", "40 ms")[0] == 0
    say_round_trip("a100-0", "a100-1", "set")
    assert testbed("link", "cut", "a100-0", "a100-1")[0] == 0
    assert testbed("exec", "a100-0", "--", "ping", "-c", "1", "-W", "1", "a100-1")[0] == 1
    assert testbed("link", "restore", "a100-0", "a100-1")[0] == 0
    say_round_trip("a100-0", "a100-1", "restored")
    _say(testbed("exec", "a100-0", "--", "grep", "a100-1", "/etc/hosts")[1])
    os.kill(network, signal.SIGINT)
    assert _status(network) == 0


if __name__ == "__main__":
    main()

"""A machine of ``ray_cluster``: namespaces with a node of Ray, and a process that forks programs on it (``forked``)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from netem.syscalls import CLONE_NEWNET, CLONE_NEWNS, make_mounts_private, set_death_signal, unshare
from tests.support import forked

_CLONE_NEWPID, _CLONE_NEWTIME = 0x20000000, 0x80
_AGENTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
_WORKER = Path(__file__).with_name("ray_worker.py")
_BEGIN = """
ip link set lo up
if [ $1 = ${2%:*} ]; then
    ip link add b0 type bridge; end=b0  # which outlives the other machines
else
    while ! ip link show v0 >/dev/null 2>&1; do sleep 0.05; done
    end=v0
fi
ip addr add $1/24 dev $end; ip link set $end up; ip route add default via 10.77.0.254
if [ $1 != ${2%:*} ]; then
    until timeout 1 bash -c "</dev/tcp/${2%:*}/${2#*:}" 2>/dev/null; do sleep 0.05; done
fi
"""


def main() -> None:
    """``ADDRESS HEAD:PORT AHEAD_S OPTION...``, the options of ``ray start``. Sends where it is asked for forks over 0."""
    address, head, ahead_s, *how = sys.argv[1:]
    set_death_signal(signal.SIGKILL)
    unshare(CLONE_NEWNET | CLONE_NEWNS | _CLONE_NEWPID | (_CLONE_NEWTIME if int(ahead_s) else 0))
    if int(ahead_s):
        Path("/proc/self/timens_offsets").write_text(f"monotonic {ahead_s} 0\n", encoding="ascii")
    first = os.fork()
    if first:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
    set_death_signal(signal.SIGKILL)
    make_mounts_private()
    subprocess.run(["mount", "-t", "proc", "proc", "/proc"], check=True)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        here.close()
        forked.serve(there.detach())
        os._exit(0)
    there.close()
    with here, socket.socket(fileno=0) as told:
        socket.send_fds(told, [b"+"], [here.fileno()])
    os.open(os.devnull, os.O_RDONLY)
    subprocess.run(["bash", "-c", _BEGIN, "bash", address, head], check=True)
    _begin_ray(how)


def _begin_ray(how: list[str]) -> None:
    """``ray start`` without what costs as much as a small run: a page of the head, and agents that nobody here asks."""
    from ray._private import services
    from ray._raylet import persist_port
    from ray.scripts.scripts import main as command

    begin = services.start_ray_process

    def begin_less(words: list[str], *arguments: Any, **options: Any) -> Any:
        said = dict(word.removeprefix("--").partition("=")[::2] for word in words)
        if "dashboard_agent_command" in said:
            for name in _AGENTS:  # which they would say, if they were in use
                persist_port(said["session_dir"], said["node_id"], name, -1)
        for number, word in enumerate(words):
            if word.startswith(("--dashboard_agent_command=", "--runtime_env_agent_command=")):
                words[number] = word.partition("=")[0] + "=sleep infinity"
            elif word.startswith("--python_worker_command="):
                options_of_it = word.partition("default_worker.py")[2]
                words[number] = f"--python_worker_command={sys.executable} {_WORKER}{options_of_it}"
        return begin(words, *arguments, **options)

    services.start_api_server = lambda *_, **__: (None, None)
    services.start_ray_process = begin_less
    sys.argv[:] = ["ray", "start", *how]
    command()


if __name__ == "__main__":
    main()

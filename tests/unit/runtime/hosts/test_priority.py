"""Agents get the usual priority back, of which Ray takes its workers' away."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ASK = """
import os, subprocess, sys, threading
from testbed.runtime.hosts.agent import usual_priority
over = threading.Event()
threading.Thread(target=over.wait).start()
os.setpriority(os.PRIO_PROCESS, 0, 15)
if sys.argv[1] != "root":
    os.setuid(65534)
print(usual_priority(), subprocess.run(["nice"], capture_output=True, text=True, check=True).stdout.strip())
over.set()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may raise a priority")
@pytest.mark.parametrize(("who", "niceness"), [("root", 0), ("nobody", 15)])
def test_an_agent_and_what_it_starts_have_the_usual_priority_where_it_may(who: str, niceness: int) -> None:
    done = subprocess.run([sys.executable, "-c", ASK, who], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(niceness)] * 2

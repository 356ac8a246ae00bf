"""What the launcher imports before it forks servers with real blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.blocks import need_blocks

need_blocks()

ASK = """
import json, os, sys
from testbed.runtime.real.launcher import _preload
_preload(True)
import torch
print(json.dumps({
    "threads": len(os.listdir("/proc/self/task")),
    "cuda": torch.cuda.is_initialized(),
    "loaded": all(name in sys.modules for name in ("nodes.blocks.compute", "nodes.blocks.hub")),
}))
"""


def test_importing_torch_before_the_fork_starts_no_thread_and_touches_no_gpu() -> None:
    """Namespaces need a single thread, and a forked process cannot use a GPU that its parent has used."""
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as the launcher is started
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=env)
    assert json.loads(done.stdout) == {"threads": 1, "cuda": False, "loaded": True}

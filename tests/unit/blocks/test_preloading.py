"""What the launcher imports before it forks servers with real blocks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pyarrow
import pytest

from testbed.runtime.real.handle import SINGLE_THREADED
from tests.support.blocks import need_blocks

need_blocks()

ASK = """
import cProfile, json, os, sys

ASKING = {"is_available", "device_count", "init", "_lazy_init", "current_device", "get_device_properties"}

def queries(profile):
    found = set()
    for code in (entry.code for entry in profile.getstats()):
        if isinstance(code, str):  # of a function in C
            found |= {name for name in ("_cuda_init", "_cuda_getDeviceCount") if name in code}
        elif code.co_name in ASKING and code.co_filename.endswith("torch/cuda/__init__.py"):
            found.add(code.co_name)
    return sorted(found)

class Transformers:  # of some versions
    def find_spec(self, name, *_):
        if name == "nodes.blocks.compute":
            try:
                import sklearn
            except ImportError:
                pass

sys.meta_path.insert(0, Transformers())
with cProfile.Profile() as before:
    from testbed.runtime.real.launcher import _preload
    _preload(True)
import torch
threads = len(os.listdir("/proc/self/task"))
child = os.fork()
if child == 0:
    os._exit(bool(getattr(torch.cuda, "_is_in_bad_fork", lambda: False)()))
child_cannot_use_gpu = bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
with cProfile.Profile() as after:
    torch.cuda.is_available()
    torch.cuda.device_count()
print(json.dumps({
    "threads": threads,
    "queries": queries(before),
    "child_cannot_use_gpu": child_cannot_use_gpu,
    "loaded": all(name in sys.modules for name in ("nodes.blocks.compute", "nodes.blocks.hub", "transformers.models.bloom.modeling_bloom")),
    "queries_after": queries(after),
    "sklearn": "sklearn" in sys.modules,
}))
"""


SKLEARN = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "sklearn.py").write_text(SKLEARN, encoding="utf-8")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))
    env = {**os.environ, **SINGLE_THREADED, "PYTHONPATH": path}  # as the launcher is started
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=env)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_importing_torch_before_the_fork_starts_no_thread_and_touches_no_gpu(answer: dict[str, Any]) -> None:
    """Namespaces need a single thread, and a forked process cannot use a GPU that its parent has asked for."""
    assert (answer["threads"], answer["queries"], answer["child_cannot_use_gpu"]) == (1, [], False)
    assert answer["loaded"] and not answer["sklearn"]


@pytest.mark.parametrize(("given", "n_threads"), [({}, 2), (SINGLE_THREADED, 1)])
def test_arrow_starts_no_thread_in_the_launchers_environment(given: dict[str, str], n_threads: int) -> None:
    program = "import os, pyarrow; pyarrow.jemalloc_memory_pool(); print(len(os.listdir('/proc/self/task')))"
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **given}
    if not given:
        env.pop("JE_ARROW_MALLOC_CONF", None)
    if "jemalloc" not in pyarrow.supported_memory_backends():
        pytest.skip("this pyarrow has no jemalloc")
    assert int(subprocess.check_output([sys.executable, "-c", program], text=True, env=env)) == n_threads


@pytest.mark.parametrize("query", ["is_available", "device_count"])
def test_a_question_to_cuda_before_the_fork_is_seen(answer: dict[str, Any], query: str) -> None:
    """So that the test above can fail: on a build without CUDA such a question leaves no other trace."""
    assert query in answer["queries_after"]

"""Checks that ``chaos`` finds bugs: breaks ten lines, each in a copy of the code, and searches a
failing seed.

``python -m benchmarks chaos-mutations --seeds 1000``
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("benchmarks", "nodes", "netem", "policies", "scenarios", "testbed", "tests")
_AT_ONCE = 25
_PATIENCE_S = 300.0


class Mutation(NamedTuple):
    """A change that breaks something (``what``): ``old``, which is in ``file`` once, becomes ``new``."""

    what: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "a session that ends does not close its hops",
        "nodes/session.py",
        "                    await self._close(pages)\n",
        "                    pass\n",
    ),
    Mutation(
        "hops that were opened beside one that refused stay open",
        "nodes/chain.py",
        "            await self.close(opened)\n",
        "",
    ),
    Mutation(
        "a server that drains is not woken when a session ends",
        "nodes/sessions.py",
        "        self.released.set()\n",
        "",
    ),
    Mutation(
        "inputs after the prompt are not remembered for a replay",
        "nodes/session.py",
        "        hop.inputs += self._model.remember(rows)\n",
        "        hop.inputs += self._model.remember(rows) if not round_.position else b''\n",
    ),
    Mutation(
        "a session's cache is not given back",
        "nodes/sessions.py",
        "        self.admission.release((connection.number, key))\n        self.released.set()\n",
        "        self.released.set()\n",
    ),
    Mutation(
        "a session that ends keeps its place in its chain",
        "nodes/sessions.py",
        "            self.forwarding.leave(session.place)\n",
        "            pass\n",
    ),
    Mutation(
        "a stopped server never goes on",
        "testbed/faultkinds.py",
        "        await _let_continue(machine)\n        return True\n",
        "        return True\n",
    ),
    Mutation(
        "routers are not notified of a server that begins again",
        "testbed/control/faults/machine.py",
        "        self._coordinator.membership.begins(self.server, ",
        "        (lambda *_: None)(self.server, ",
    ),
    Mutation(
        "the coordinator forgets to release a request that has ended",
        "testbed/runtime/reports.py",
        "        elif isinstance(record, (*ENDED, Rejected, Preempted)):\n            self._coordinator.release(record.request)\n",
        "        elif isinstance(record, (*ENDED, Rejected, Preempted)):\n            pass\n",
    ),
    Mutation(
        "messages that wait at a link are not released when it comes up again",
        "netem/memory.py",
        "            pipe.release()\n",
        "",
    ),
)


def first_seed(mutation: Mutation, n_seeds: int) -> tuple[int, str] | None:
    """Returns the first of ``n_seeds`` seeds that fails with the mutation, and how; None if all pass."""
    with tempfile.TemporaryDirectory(prefix="testbed-mutation-") as name:
        folder = Path(name)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        path = folder / mutation.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.old) != 1:
            raise ValueError(
                f"{mutation.what}: the line is {text.count(mutation.old)} times in {mutation.file}, not once"
            )
        path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        for first in range(0, n_seeds, _AT_ONCE):
            command = [sys.executable, "-m", "benchmarks", "chaos", "--jobs", "1", "--json", "--no-shrinking"]
            command += ["--seeds", str(_AT_ONCE), "--first", str(first)]
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env={**os.environ, "PYTHONPATH": name},
                    capture_output=True,
                    text=True,
                    timeout=_PATIENCE_S,
                )
            except subprocess.TimeoutExpired:
                return first, f"one of {_AT_ONCE} seeds from here on does not end"
            if done.returncode not in (0, 1):
                raise RuntimeError(done.stderr[-2000:])
            for failure in json.loads(done.stdout)["failures"]:
                number, text = failure["broken"][0]
                return failure["seed"], f"invariant {number}: {text}"
    return None


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks chaos-mutations", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="the most seeds to try for each mutation")
    options = parser.parse_args(arguments)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        found = pool.map(lambda mutation: first_seed(mutation, options.seeds), MUTATIONS)
        n_found = 0
        for mutation, first in zip(MUTATIONS, found, strict=True):
            n_found += first is not None
            seed, how = first if first is not None else (None, "")
            where = f"seed {seed}, {how[:160]}" if first is not None else f"not within {options.seeds} seeds"
            print(f"{mutation.what}: {where}", flush=True)
    print(f"{n_found} of {len(MUTATIONS)} found")
    return 0 if n_found == len(MUTATIONS) else 1

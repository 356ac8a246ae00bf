"""A suite of two small settings, and policies that work, fail, loop, change and print."""

from __future__ import annotations

from pathlib import Path

from benchmarks.suite import run as make_reference

SCENARIO = Path(__file__).parents[2] / "scenarios" / "clustered.toml"
SUITE = """
name = "small"
description = "two settings of a few requests"
seeds = [0, 1]
quick_seeds = [0]
references = ["proposed", "petals", "whole-model"]
set = ['workload.n_requests=8', 'workload.n_output_tokens={{p50=6,p95=12,max=16}}', 'workload.lengths="hidden"']

[limits]
placement_s = 0.5
run_s = 20

[[setting]]
name = "few"
about = "hardly any load"
scenario = "clustered"
objective = "ttft=10s,tpot=0.9s"
quick = true

[[setting]]
name = "many"
about = "all at once"
scenario = "{scenario}"
objective = "ttft=10s,tpot=0.9s"
set = ["workload.rate=5"]
"""
POLICIES = '''
import time

from policies.cgbp import CgBp
from policies.wsrr import WsRr


class Good(CgBp, WsRr):
    """Both halves."""

    name = "good"

    def place(self, problem, design_concurrency=None):
        print("for whoever reads this")
        return super().place(problem, design_concurrency)


class Crashes(Good):
    def place(self, problem, design_concurrency=None):
        if problem.request_rate > 1:
            raise ValueError("no idea")
        return super().place(problem, design_concurrency)


class Loops(Good):
    def place(self, problem, design_concurrency=None):
        while True:
            try:
                sum(range(10_000))
            except Exception:
                pass


class Changes(Good):
    """Refuses every request as often as it was bound before, in any process: no run has the same times as another."""

    wants = ("requests",)

    def n_before(self):
        from pathlib import Path

        bound = Path("bound")
        n_bound = len(bound.read_bytes()) if bound.exists() else 0
        with bound.open("ab") as file:
            file.write(b".")
        return n_bound

    def bind(self, problem, placement):
        n_refused = self.n_before()
        router, asked = super().bind(problem, placement), {}
        found = router.route

        def route(request, state, now_s):
            asked[state.who] = asked.get(state.who, 0) + 1
            return None if asked[state.who] <= n_refused else found(request, state, now_s)

        router.route = route
        return router


class Remembers(Changes):
    """As often as it was bound before in its own process."""

    bound = []

    def n_before(self):
        self.bound.append(self)
        return len(self.bound) - 1


class Peeks(Good):
    """Looks how long the first answer will be, where its callers have that."""

    def place(self, problem, design_concurrency=None):
        import sys

        frame = sys._getframe()
        while "experiment" not in frame.f_locals:
            frame = frame.f_back
        first = frame.f_locals["experiment"].workload.requests[0]
        return super().place(problem, 1 + first.n_output_tokens)


class Hurries(Good):
    """Its placement is slow until it has been made so often as ``times`` says."""

    times = 1

    def place(self, problem, design_concurrency=None):
        from pathlib import Path

        made = Path(f"made-{self.times}")
        n_made = len(made.read_bytes()) if made.exists() else 0
        with made.open("ab") as file:
            file.write(b".")
        ends_at = time.process_time() + (0.8 if n_made < self.times else 0.0)
        while time.process_time() < ends_at:
            pass
        return super().place(problem, design_concurrency)


class Dawdles(Hurries):
    times = 9


class Delegates(Good):
    """Has another program search for its placement."""

    def place(self, problem, design_concurrency=None):
        import subprocess
        import sys

        search = "import time\\nwhile time.process_time() < 0.8: pass"
        subprocess.run([sys.executable, "-S", "-c", search], check=True)
        return super().place(problem, design_concurrency)


class Exits(Good):
    def place(self, problem, design_concurrency=None):
        import os

        os._exit(3)
'''


def write_suite(folder: Path) -> None:
    """Write the suite with its reference figures into ``folder``."""
    (folder / "own.toml").write_text(SCENARIO.read_text(encoding="utf-8"))
    (folder / "suite.toml").write_text(SUITE.format(scenario="own.toml"))
    assert make_reference([str(folder), "--out", str(folder / "runs"), "--jobs", "2"]) == 0

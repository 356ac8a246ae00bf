"""Runs all benchmarks, or those named on the command line, and prints their figures.

The names in ``COMMANDS`` have options of their own: see their modules.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys

NAMES = (
    "dataplane",
    "startup",
    "network",
    "events",
    "fabric",
    "virtual",
    "emulation",
    "simulator",
    "results",
    "endpoint",
    "page",
)
_OWN = (
    "batches",
    "bloombee",
    "conversations",
    "gpu",
    "optimality",
    "petals",
    "rivals",
    "scale",
    "speculation",
    "suite",
    "sweep",
    "wire",
)
_STRESS = ("chaos", "chaos-mutations", "fuzz", "soak")
COMMANDS = {name: f"benchmarks.{name}" for name in _OWN} | {
    name: f"tests.stress.{name.replace('-', '_')}" for name in _STRESS
}
"""Modules of the commands that take minutes or hours, or need a device."""


def main() -> int:
    if sys.argv[1:] and sys.argv[1] in COMMANDS:
        return int(importlib.import_module(COMMANDS[sys.argv[1]]).run(sys.argv[2:]))
    wanted = [argument for argument in sys.argv[1:] if not argument.startswith("-")] or list(NAMES)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        print(f"benchmarks: there is no {unknown[0]!r}; choose of {', '.join(NAMES)}", file=sys.stderr)
        return 2
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}"
    if "--json" not in sys.argv:
        print(f"machine: {machine}")
    for name in wanted:
        figures = importlib.import_module(f"benchmarks.{name}").measure()
        if "--json" in sys.argv:
            print(json.dumps({"benchmark": name, "machine": machine, "figures": figures}))
            continue
        print(f"\n{name}")
        for figure in figures:
            target = f"   (goal {figure['goal']})" if figure.get("goal") else ""
            print(f"  {figure['name']:<66} {figure['value']:>10} {figure['unit']:<8}{target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

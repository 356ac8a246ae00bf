"""Runs all benchmarks, or those named on the command line, and prints their figures."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys

NAMES = (
    "dataplane",
    "startup",
    "ends",
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"Others take minutes or hours, or need a device, and have options of their own: {', '.join(sorted(COMMANDS))}.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; default: all of them"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per benchmark")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"there is no {unknown[0]!r}; choose of {', '.join(NAMES)}")
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release()}, Python {platform.python_version()}"
    if not options.json:
        print(f"machine: {machine}")
    for name in options.names or NAMES:
        figures = importlib.import_module(f"benchmarks.{name}").measure()
        if options.json:
            print(json.dumps({"benchmark": name, "machine": machine, "figures": figures}))
            continue
        print(f"\n{name}")
        for figure in figures:
            target = f"   (goal {figure['goal']})" if figure.get("goal") else ""
            print(f"  {figure['name']:<66} {figure['value']:>10} {figure['unit']:<8}{target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

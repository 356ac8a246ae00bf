"""The command line.

- ``main``: the entry point, and the commands for runs, scenarios and results
- ``sweep``: commands that make many runs; ``measure``: measurements; ``workload``: recorded workloads
- ``blocks``: models, hardware and ``generate``; ``programs``: programs and links of a running testbed
- ``options``: options that several commands share
"""

from testbed.cli.main import main

__all__ = ["main"]

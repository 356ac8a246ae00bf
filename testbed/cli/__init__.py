"""The command line: ``main`` has the commands of runs, scenarios and results, ``blocks`` those of real blocks,
``measure`` those that measure, ``programs`` those around a running testbed; ``options`` what several of them share."""

from testbed.cli.main import main

__all__ = ["main"]

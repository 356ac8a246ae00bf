"""The command line.

- ``main``: the entry point, and the list of all commands
- ``run``, ``ask``, ``watch``, ``describe``, ``machine``: commands by what a user wants; ``reproduce``: papers
- ``options``: options that several commands share; ``helptext``: the text of ``--help``
"""

from testbed.cli.main import main

__all__ = ["main"]

"""The project's errors. A command prints the message; its exit code is 2 for ``UserError``, else 1."""

from __future__ import annotations

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, by the shells' convention: 128 plus the signal's number."""


class TestbedError(Exception):
    """Base class of the tool's own errors."""

    __test__ = False


class UserError(TestbedError):
    """A mistake of the user's. The message is one sentence: what is wrong, and what to change."""


class ScenarioError(UserError):
    """A scenario file or a ``--set`` override is wrong. The message names file and key path."""


class RunError(TestbedError):
    """The emulation itself broke, for example because a process died or the network failed. One sentence."""


class MachineLostError(RunError):
    """A machine of the run cannot be asked any more: it has left the cluster, or its agent has ended."""

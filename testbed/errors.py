"""The project's errors. ``UserError`` ends a command with one sentence and exit code 2."""

from __future__ import annotations

EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 and the signal's number."""


class TestbedError(Exception):
    """Base of everything that the tool itself raises."""

    __test__ = False


class UserError(TestbedError):
    """The user can mend it; the message is one sentence that says what to change."""


class ScenarioError(UserError):
    """A scenario file or a ``--set`` override is wrong. The message names file and key path."""


class RunError(TestbedError):
    """The emulation itself broke: a process died, the network failed. One sentence."""

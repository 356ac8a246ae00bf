"""``testbed`` and ``python -m testbed``: the command line."""

import sys

from testbed.errors import EXIT_INTERRUPTED
from testbed.terminal import say


def main() -> None:
    """Run the command line; Ctrl-C ends it with ``EXIT_INTERRUPTED`` also while its modules are being imported."""
    try:
        from testbed.cli import main as command
    except KeyboardInterrupt:
        say("testbed: stopped")
        sys.exit(EXIT_INTERRUPTED)
    command()


if __name__ == "__main__":
    main()

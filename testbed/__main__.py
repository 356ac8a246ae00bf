"""``testbed`` and ``python -m testbed``: the command line."""

import io
import sys

from testbed.errors import EXIT_INTERRUPTED
from testbed.garbage import collect_seldom
from testbed.terminal import say


def main() -> None:
    """Run the command line; Ctrl-C ends it with ``EXIT_INTERRUPTED`` also while its modules are being imported.

    Answers hold characters such as ±; where the locale has none of them, they are printed as ``?``.
    """
    collect_seldom()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        sys.stdout.reconfigure(errors="replace")
    try:
        from testbed.cli import main as command
    except KeyboardInterrupt:
        say("testbed: stopped")
        sys.exit(EXIT_INTERRUPTED)
    command()


if __name__ == "__main__":
    main()

"""``testbed`` and ``python -m testbed``: the command line."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it with exit code 130 also while its modules are being imported."""
    try:
        from testbed.cli import main as command
    except KeyboardInterrupt:
        print("testbed: stopped", file=sys.stderr)
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()

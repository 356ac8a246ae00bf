"""``python -m testbed``: the command line."""

from testbed.cli import main

if __name__ == "__main__":
    main()

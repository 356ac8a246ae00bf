"""What the machine's locale must not change."""

from __future__ import annotations

import os
import subprocess
import sys

_ANSWER = r"""
import testbed.cli
from testbed import __main__
testbed.cli.main = lambda: print("1.5 \xb1 0.1")
__main__.main()
"""


def test_an_answer_is_printed_where_the_locale_lacks_its_characters() -> None:
    for environment, printed in (
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, b"1.5 ? 0.1\n"),
        ({"PYTHONUTF8": "1"}, "1.5 ± 0.1\n".encode()),
    ):
        done = subprocess.run(
            [sys.executable, "-c", _ANSWER],
            capture_output=True,
            env={**os.environ, **environment},
            check=True,
        )
        assert done.stdout == printed

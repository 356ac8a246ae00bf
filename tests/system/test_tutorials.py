"""The tutorials, word for word: every block of every one, in order, in an empty folder.

Their commands and programs are forked. One that goes on in the background is no function of the shell's: a signal must find
what passes it on.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.runtime.blocks import blocks_missing
from tests.support.forked import COMMAND, as_shell_functions, asking
from tests.support.runs import require

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
TUTORIALS = sorted(path.stem for path in FOLDER.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: ([^\n]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

IN_BACKGROUND = re.compile(r"^testbed(?= .*&$)", re.MULTILINE)


def test_every_tutorial_is_in_the_index() -> None:
    index = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    assert TUTORIALS == ["endpoint", "faults", "own-policy", "search", "workload-and-slo"]
    assert all(f"tutorials/{name}.md" in index for name in TUTORIALS)


def test_every_document_is_in_the_index() -> None:
    index = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    missing = [path.name for path in FOLDER.parent.glob("*.md") if f"({path.name})" not in index]
    assert missing == ["README.md"]


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    if "--compute blocks" in text:
        missing = blocks_missing()
        require("blocks", f"{missing} is not installed" if missing else None)
    functions, asked = as_shell_functions()
    asks = shlex.join([*asking()[0], COMMAND])
    script = ["set -euo pipefail", "trap 'jobs -p | xargs -r kill' EXIT", functions]
    for kind, about, block in BLOCK.findall(text):
        if about.startswith("file="):
            (tmp_path / about.removeprefix("file=")).write_text(block, encoding="utf-8")
        elif about == "run":
            script.append(f"python - <<'END_OF_BLOCK'\n{block}END_OF_BLOCK")
        else:
            assert (kind, about) == ("sh", "")
            script.append(IN_BACKGROUND.sub(lambda _: asks, block))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        pass_fds=[asked],
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

"""The tutorials, word for word: every block of every one, in order, in an empty folder.

Their commands and programs are forked, unless one goes on in the background: a signal must find it, not the shell's function.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.runtime.blocks import blocks_missing
from tests.support.forked import as_shell_functions
from tests.support.runs import require

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"
TUTORIALS = sorted(path.stem for path in FOLDER.glob("*.md"))
BLOCK = re.compile(r"^```(\w+)(?: ([^\n]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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
    script = ["set -euo pipefail", "" if re.search(r"&$", text, re.MULTILINE) else functions]
    for kind, about, block in BLOCK.findall(text):
        if about.startswith("file="):
            (tmp_path / about.removeprefix("file=")).write_text(block, encoding="utf-8")
        elif about == "run":
            script.append(f"python - <<'END_OF_BLOCK'\n{block}END_OF_BLOCK")
        else:
            assert (kind, about) == ("sh", "")
            script.append(block)
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

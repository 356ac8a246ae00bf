"""Outputs that documents state: finds them, and holds them against the commands that printed them.

``make docs-figures`` runs all of them and writes the date and the tree of the run into the pages. A page states an output as

    *Output of `COMMAND`.*

followed by a fenced block; a test runs such a command. Where one takes longer than a test may, the line ends with ", last run
DATE on tree TREE." and only ``make docs-figures`` runs it. A block may leave out lines of the output. Lines may be wrapped
elsewhere, and figures of real time are not compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from tests.support.forked import as_shell_functions

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?:^\*Output of `(?P<command>[^`]+)`(?P<last>, last run \S+ on tree \w+)?\.\*\n\n)?"
    r"^```(?P<kind>[^\n]*)\n(?P<block>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_REAL_TIME = (
    (re.compile(r"run /\S+"), "run FOLDER"),
    (re.compile(r"(up|started) in [\d.]+ s"), r"\1 in N s"),
    (re.compile(r"served in [\d.]+ s, [\d.,]+ times"), "served in N s, N times"),
    (re.compile(r"[\d.]+ ms(?= |$)"), "N ms"),
)
_COMMANDS = re.compile(r"\$? ?(testbed|make|python|git|tail) | +\[")
"""A command to type, or a line with its further options."""


class Stated(NamedTuple):
    """A fenced block: its page and line, the command that printed it (None: not stated), and when it was last run by hand."""

    page: Path
    line: int
    command: str | None
    is_slow: bool
    kind: str
    block: str

    @property
    def is_commands(self) -> bool:
        """Whether the block has commands to type, and no output."""
        return all(_COMMANDS.match(line) for line in self.block.splitlines() if line.strip())


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def stated(page: Path) -> Iterator[Stated]:
    """Yields all fenced blocks of a page."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        is_slow = found["last"] is not None
        yield Stated(page, line, found["command"], is_slow, found["kind"], found["block"])


def missing_lines(block: str, output: str) -> list[str]:
    """Returns the lines of a block that the output does not have, but for wrapping and real time."""
    whole = _plain(output)
    return [line for line in block.splitlines() if line.strip() and _plain(line) not in whole]


def _plain(text: str) -> str:
    words = " ".join(text.split())
    for pattern, instead in _REAL_TIME:
        words = pattern.sub(instead, words)
    return words


def output_of(command: str, *, renders: bool = False) -> str:
    """Returns what a command prints, in an empty folder. Several are joined by "; ". Figures are blank unless it ``renders`` them."""
    functions, asked = as_shell_functions(renders=renders)
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["bash", "-ec", f"{functions}\n{command}"],
            cwd=folder,
            env={**os.environ, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            check=False,
            pass_fds=[asked],
        )
    return done.stdout + done.stderr


def main() -> int:
    """Run every command; returns 1 if an output is not the stated one, after printing what it is."""
    tree = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD^{tree}"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    n_wrong = 0
    for page in pages():
        for one in list(stated(page)):
            if one.command is None:
                continue
            print(f"{page.relative_to(ROOT)}:{one.line}: {one.command}", flush=True)
            output = output_of(one.command, renders=True)
            if missing := missing_lines(one.block, output):
                n_wrong += 1
                print("  it no longer prints", *missing, "  but", output, sep="\n")
            elif one.is_slow:
                text = page.read_text(encoding="utf-8")
                begin = f"*Output of `{one.command}`, last run "
                now = f"{datetime.now(UTC):%Y-%m-%d} on tree {tree}"
                text = re.sub(re.escape(begin) + r"\S+ on tree \w+", lambda _: begin + now, text)  # noqa: B023
                page.write_text(text, encoding="utf-8")
    return 1 if n_wrong else 0


if __name__ == "__main__":
    sys.exit(main())

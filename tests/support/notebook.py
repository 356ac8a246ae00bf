"""The tutorial in ``docs/python.md`` as cells: to run them, and to make ``docs/python.ipynb`` of them.

``python -m tests.support.notebook`` writes what the cells show into both files.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
PAGE, NOTEBOOK = DOCS / "python.md", DOCS / "python.ipynb"
_BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


class Cell(NamedTuple):
    """``kind``: "markdown" or "code"; ``shows``: the text below a cell of code."""

    kind: str
    source: str
    shows: str = ""


def cells_of(text: str) -> Iterator[Cell]:
    """Yield the cells of the tutorial: what stands before the reference."""
    text = text.partition("\n## Reference\n")[0] + "\n"
    end = 0
    for block in _BLOCK.finditer(text):
        if words := text[end : block.start()].strip():
            yield Cell("markdown", words)
        yield Cell("code", block[1].rstrip("\n"), (block[2] or "").rstrip("\n"))
        end = block.end()
    if words := text[end:].strip():
        yield Cell("markdown", words)


def shown_by(cells: list[Cell]) -> list[str]:
    """Run the cells of code one after the other, and return what each shows: what it prints, and its last value."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for number, cell in enumerate(cells):
        if cell.kind != "code":
            continue
        tree = ast.parse(cell.source, f"cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(tree, f"cell {number}", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
                if value is not None:
                    print(repr(value))
        shown.append(out.getvalue().rstrip("\n"))
    return shown


def notebook_of(cells: list[Cell]) -> dict[str, Any]:
    """Return the notebook in nbformat 4.5, without outputs: running it makes them."""
    made = []
    for number, cell in enumerate(cells):
        of_kind = {"execution_count": None, "outputs": []} if cell.kind == "code" else {}
        lines = cell.source.splitlines(keepends=True)
        made.append(
            {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}, **of_kind, "source": lines}
        )
    about = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": made, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def notebook_text(cells: list[Cell]) -> str:
    return json.dumps(notebook_of(cells), indent=1, ensure_ascii=False) + "\n"


def _write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    cells = list(cells_of(text))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        shown = iter(shown_by(cells))

    def with_output(block: re.Match[str]) -> str:
        out = next(shown, "")
        below = f"\n```text\n{out}\n```\n" if out else ""
        return f"```python\n{block[1]}```\n{below}"

    tutorial, mark, reference = text.partition("\n## Reference\n")
    PAGE.write_text(_BLOCK.sub(with_output, tutorial) + mark + reference, encoding="utf-8")
    NOTEBOOK.write_text(notebook_text(cells), encoding="utf-8")


if __name__ == "__main__":
    _write()

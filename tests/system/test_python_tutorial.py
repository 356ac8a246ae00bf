"""``docs/python.md`` and its notebook, word for word."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.notebook import NOTEBOOK, PAGE, cells_of, notebook_text, shown_by
from tests.support.runs import require
from tests.support.sketches import sketch

SKETCHED = "from tests.support.sketches import sketch; sketch(setattr); del sketch, sys"
"""Blank figures, which are no part of what cells show."""


def test_the_tutorial_shows_what_stands_below_each_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sketch(monkeypatch.setattr)
    cells = list(cells_of(PAGE.read_text(encoding="utf-8")))
    assert shown_by(cells) == [cell.shows for cell in cells if cell.kind == "code"]
    assert len(cells) > 15 and sum(bool(cell.shows) for cell in cells) > 8


def test_the_notebook_is_the_tutorial() -> None:
    assert NOTEBOOK.read_text(encoding="utf-8") == notebook_text(
        list(cells_of(PAGE.read_text(encoding="utf-8")))
    )


def test_a_kernel_runs_the_notebook(tmp_path: Path) -> None:
    """As Jupyter does: with an event loop that runs, and classes of ``__main__``."""
    missing = next((name for name in ("nbclient", "ipykernel") if find_spec(name) is None), None)
    require("notebook", f"{missing} is not installed" if missing else None)
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    folder = {"metadata": {"path": str(tmp_path)}}
    begin = f"--IPKernelApp.exec_lines=import sys; sys.path.append({str(Path(__file__).parents[2])!r}); {SKETCHED}"
    NotebookClient(notebook, timeout=250, resources=folder, extra_arguments=[begin]).execute()
    cells = [cell for cell in cells_of(PAGE.read_text(encoding="utf-8")) if cell.kind == "code"]
    for cell, ran in zip(cells, (cell for cell in notebook.cells if cell.cell_type == "code"), strict=True):
        texts = [out.text if out.output_type == "stream" else out.data["text/plain"] for out in ran.outputs]
        assert all(out.get("name") != "stderr" for out in ran.outputs), ran.outputs
        assert "".join(texts).split() == cell.shows.split()  # a notebook breaks long values into lines
    assert any(
        "text/html" in out.get("data", {}) for cell in notebook.cells for out in cell.get("outputs", ())
    )
    assert (
        json.loads((tmp_path / "runs" / "first" / "summary.json").read_text(encoding="utf-8"))["n_completed"]
        == 10
    )

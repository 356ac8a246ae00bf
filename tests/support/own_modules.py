"""A user's own code in the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Write the module ``name`` into ``folder``, make that the current one, and forget what is imported from it."""
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, name, raising=False)

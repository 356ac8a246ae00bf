"""Figures, which are not rendered."""

import pytest

from tests.support.sketches import sketch


@pytest.fixture(autouse=True)
def sketched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made but not rendered, but where the test has the mark ``renders``."""
    if request.node.get_closest_marker("renders") is None:
        sketch(monkeypatch.setattr)

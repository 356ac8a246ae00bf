"""How many examples Hypothesis draws; and figures, which are not rendered."""

import pytest
from hypothesis import settings

from tests.support.effort import register_profiles
from tests.support.sketches import sketch

register_profiles()
settings.load_profile("testbed")


@pytest.fixture(autouse=True)
def sketched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made but not rendered, but where the test has the mark ``renders``."""
    if request.node.get_closest_marker("renders") is None:
        sketch(monkeypatch.setattr)

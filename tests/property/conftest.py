"""On how many requests Foresight tries placements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from policies import foresight, foresight_sharing, rehearsed, search


@pytest.fixture(autouse=True, scope="module")
def short_streams() -> Iterator[None]:
    """Foresight tries placements on a fifth of the requests: what always holds does so on however many."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (foresight, search):
            patch.setattr(module, "STREAM_REQUESTS", 20)
        patch.setattr(foresight_sharing, "_FEWEST", 20)
        patch.setattr(rehearsed, "_FEWEST", 10)
        patch.setattr(rehearsed, "_MOST", 40)
        yield

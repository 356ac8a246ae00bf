"""What ``testbed explain`` prints."""

from __future__ import annotations

import pytest

from testbed.studies.explain.text import _in_ms


@pytest.mark.parametrize(
    ("value_s", "text"), [(-1e-5, "0.000"), (-6e-4, "-0.001"), (0.0, "0.000"), (1.2345, "1.234")]
)
def test_seconds_have_no_minus_sign_for_what_rounding_leaves(value_s: float, text: str) -> None:
    assert _in_ms(value_s) == text

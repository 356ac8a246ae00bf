"""BloomBee's measured steps beside our law, as docs/validation.md states them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.bloombee import FITTED, MEASURED, blocks, compared, fit, roofline_s, table

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"


def test_validation_has_the_table_that_the_law_makes() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def test_a_fit_finds_the_software_that_made_its_figures() -> None:
    model = blocks()[FITTED]
    rates = [n / (roofline_s(model, n) + 0.09 + 0.002 * (n - 1)) for n in (1, 4, 32)]
    assert fit(rates, model) == pytest.approx((0.09, 0.002))


def test_nothing_of_the_other_models_is_fitted() -> None:
    rows = list(compared())
    assert len(rows) == 18 and {row.version for row in rows} == set(MEASURED)
    for row in rows:
        of_fitted = next(
            one for one in rows if (one.version, one.model, one.batch) == (row.version, FITTED, row.batch)
        )
        assert row.law_s - row.roofline_s == pytest.approx(of_fitted.law_s - of_fitted.roofline_s)

from __future__ import annotations

from collections.abc import Iterable

import pytest

from testbed.studies.sweep.progress import with_lines


def said(
    capsys: pytest.CaptureFixture[str], n_items: int, instants_s: Iterable[float], n_taken: int
) -> list[str]:
    clock = iter(instants_s).__next__
    items = with_lines(range(n_items), n_items, clock)
    assert [next(items) for _ in range(n_taken)] == list(range(n_taken))
    with pytest.raises(StopIteration):
        next(items)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_log_gets_a_line_for_every_tenth_of_the_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, 200, (i / 10 for i in range(201)), 200)
    assert len(lines) == 10
    assert lines[0] == "20 of 200 runs (10%) in 2 s, about 18 s left"
    assert lines[-1] == "200 of 200 runs (100%) in 20 s, about 0 s left"


def test_a_log_gets_a_line_every_half_minute_where_a_tenth_takes_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys, 100, (12.0 * i for i in range(101)), 100)
    assert lines[:2] == [
        "3 of 100 runs (3%) in 36 s, about 1164 s left",
        "6 of 100 runs (6%) in 72 s, about 1128 s left",
    ]
    assert len(lines) == 34


def test_few_runs_get_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(said(capsys, 3, range(4), 3)) == 3

"""``testbed view`` of a leaderboard: a file, whose buttons choose a part of it."""

from __future__ import annotations

from pathlib import Path

from testbed.page.view import view_command
from testbed.rundir import LEADERBOARD, STUDY_PAGE
from testbed.studies.sweep.webpage import page_text


def test_a_leaderboards_page_is_a_file_that_view_names(tmp_path: Path) -> None:
    (tmp_path / LEADERBOARD).touch()
    said: list[str] = []
    view_command(tmp_path, (), None, False, said.append)
    assert said == [(tmp_path / STUDY_PAGE).as_uri()]


def test_parts_of_a_table_are_chosen_without_a_script() -> None:
    table = ["policy"], [["<mine>"]]
    plain = page_text("board", [], table, [], [])
    assert "<input" not in plain and plain.count("<table>") == 1
    page = page_text("board", [], table, [], [], {"homes": (["policy"], [["other"]])})
    assert page.count("<table>") == 2 and "&lt;mine&gt;" in page and "<script" not in page
    assert "<input type=radio name=part id=part-0 checked><label for=part-0>all</label>" in page
    assert "#part-0:checked~.part-0,#part-1:checked~.part-1{display:block}" in page

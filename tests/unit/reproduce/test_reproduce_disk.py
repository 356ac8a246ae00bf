from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from testbed.errors import RunError, UserError
from testbed.rundir import replacing
from testbed.studies.reproduce.command import DOCUMENTS, RESULTS, reproduce_command
from testbed.studies.reproduce.settings import settings_of
from testbed.studies.sweep import disk
from tests.support.full_disk import files_no_longer_than

N_TABLES = len(settings_of("tables"))
FULL = Path("/dev/full")


def tables(out: Path) -> dict[str, Any]:
    return reproduce_command("tables", 2, 0, out, 1)[0]


def test_a_disk_that_fills_up_while_runs_are_computed_keeps_the_finished_ones(
    tmp_path: Path, quick_runs: list[str]
) -> None:
    with files_no_longer_than(100_000), pytest.raises(RunError, match=r"results.jsonl: cannot be written \("):
        tables(tmp_path)
    n_kept = tables(tmp_path)["n_found"]
    assert 0 < n_kept < 2 * N_TABLES
    assert len(quick_runs) == 2 * N_TABLES + 1, "only the run that was cut short is run again"


@pytest.mark.parametrize(
    "name", ["tables.md", "run-times.md", "figures/breakdown.png", "figures/breakdown.pdf"]
)
def test_a_disk_that_is_full_when_results_are_written_down_costs_no_results(
    tmp_path: Path, quick_runs: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        if path == tmp_path / name:
            yield FULL
            return
        with replacing(path) as temporary:
            yield temporary

    with monkeypatch.context() as patched:
        for module in ("testbed.studies.sweep.disk", "testbed.results.plots"):
            patched.setattr(f"{module}.replacing", full)
        with pytest.raises(RunError, match=rf"{name}: cannot be written \(No space left on device\)"):
            tables(tmp_path)
    assert not (tmp_path / name).exists()
    assert tables(tmp_path)["n_found"] == 2 * N_TABLES
    assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_folder_where_a_document_belongs_is_named_before_anything_runs(
    tmp_path: Path, quick_runs: list[str], name: str
) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} is a folder, but a file belongs there; move it away"):
        tables(tmp_path)
    assert quick_runs == []


def test_a_file_where_the_figures_belong_is_named_before_anything_runs(
    tmp_path: Path, quick_runs: list[str]
) -> None:
    (tmp_path / "figures").write_text("")
    with pytest.raises(UserError, match="figures is a file, but a folder belongs there; move it away"):
        tables(tmp_path)
    assert quick_runs == []


def test_a_folder_where_a_figure_belongs_gets_one_sentence(tmp_path: Path, quick_runs: list[str]) -> None:
    (tmp_path / RESULTS).touch()
    (tmp_path / "figures" / "breakdown.png").mkdir(parents=True)
    with pytest.raises(UserError, match=r"breakdown.png: a file is in the place of a folder, or a folder"):
        tables(tmp_path)


def test_a_folder_that_holds_something_else_is_refused_before_anything_runs(
    tmp_path: Path, quick_runs: list[str]
) -> None:
    (tmp_path / "letter.txt").write_text("")
    with pytest.raises(UserError, match="holds something else already; give a new folder with --out"):
        tables(tmp_path)
    assert quick_runs == []


def test_an_output_folder_that_is_a_file_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="out is a file, but a folder belongs there; choose another"):
        tables(tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(quick_runs: list[str]) -> None:
    with pytest.raises(UserError, match=r"nothing can be written to /proc .*; choose another as --out"):
        tables(Path("/proc/out"))
    assert quick_runs == []


def test_an_error_of_a_library_without_a_number_is_one_sentence_too(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot be written \(encoder error\)"), disk.writing(tmp_path):
        raise OSError("encoder error")
    with pytest.raises(RunError, match=r"Read-only file system"), disk.writing(tmp_path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.mark.parametrize("line", ["what is this", '{"key":["another version","stated/Cluster0/0.1/64",0]}'])
def test_a_line_that_is_no_result_is_refused_with_its_number(
    tmp_path: Path, quick_runs: list[str], line: str
) -> None:
    tables(tmp_path)
    with open(tmp_path / RESULTS, "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=rf"line {2 * N_TABLES + 1} is no result .* remove that line"):
        tables(tmp_path)

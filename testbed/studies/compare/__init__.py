"""Two runs side by side: request by request, token by token, hop by hop (``docs/compare.md``).

- ``load`` reads a run directory of an emulation or a simulation; ``settings`` what differs between two scenarios
- ``align`` says which requests compare, and why the others do not; ``contrast`` sets two samples side by side
- ``tables`` makes the answer (one object); ``text`` prints it, ``figures`` draws it, ``files`` writes it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from testbed.rundir import check_new_folder
from testbed.studies.compare.align import align
from testbed.studies.compare.load import load_run
from testbed.studies.compare.tables import comparison
from testbed.studies.compare.text import comparison_text

__all__ = ["compare_command"]


def compare_command(path_a: Path, path_b: Path, out: Path | None) -> tuple[dict[str, Any], str]:
    """Line up the runs of two directories; returns (JSON object, text), and writes to the new folder ``out``.

    Differences are B - A, ratios of differences (B - A) / A. Raises ``UserError`` if the runs cannot be
    compared and ``RunError`` if ``out`` cannot be written.
    """
    if out is not None:
        check_new_folder(out)
    a, b = load_run(path_a), load_run(path_b)
    alignment = align(a, b)
    answer = comparison(a, b, alignment)
    if out is not None:
        from testbed.studies.compare.files import write_comparison

        write_comparison(out, answer, a, b, alignment)
    return answer, comparison_text(answer)

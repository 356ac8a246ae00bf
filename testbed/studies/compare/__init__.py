"""Two runs side by side: request by request, token by token, hop by hop (``docs/compare.md``).

- ``load`` reads a run directory of an emulation or a simulation; ``settings`` finds what differs between two
  scenarios
- ``align`` decides which requests are compared, and why the others are not; ``contrast`` compares two samples
- ``tables`` makes the comparison (one JSON object); ``text`` and ``notes`` print it, ``figures`` draws it,
  ``files`` writes it
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
    """Compare the runs of two directories, and write files to the new folder ``out`` if it is not None.

    Returns the object for ``--json`` and the text for the terminal. Differences are B - A, relative
    differences (B - A) / A. Raises ``UserError`` if the runs cannot be compared, ``RunError`` if ``out``
    cannot be written.
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

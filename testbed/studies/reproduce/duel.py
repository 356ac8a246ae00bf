"""The testbed's own policy compared with the proposed one on the same runs, in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from testbed.studies.reproduce.markdown import table
from testbed.studies.reproduce.runs import Results
from testbed.studies.reproduce.settings import Setting, Sweep, TableVariant

OURS, RIVAL = "foresight", "proposed"


def gains(results: Results, setting: Setting, setup: str) -> list[float]:
    """Returns 1 - ours / proposed of the time per token, one value for each run that has both policies."""
    found = []
    for run in results.runs(setting):
        ours, rival = (run.get(f"{policy}/{setup}/per_token_s") for policy in (OURS, RIVAL))
        if ours is not None and rival is not None:
            found.append(1 - ours / rival)
    return found


def duel_lines(results: Results, groups: Sequence[TableVariant | Sweep]) -> Iterator[str]:
    """Yields a table with one row per group: how much faster ours is."""
    yield f"## {OURS} against {RIVAL}, the same runs"
    yield (
        "Time per token saved, in percent; negative: ours is slower. Least and most are means of one "
        "setting. "
        "The last two columns count settings whose mean is slower by more than 0.1 %, and single runs that "
        "are."
    )
    rows = []
    for setup, words in (("reference", "with"), ("none", "without")):
        for group in groups:
            by_setting = [found for setting in group.settings if (found := gains(results, setting, setup))]
            if not by_setting:
                continue
            means = [math.fsum(found) / len(found) for found in by_setting]
            runs = [gain for found in by_setting for gain in found]
            rows.append(
                [
                    f"{group.title}, {words} the constants",
                    str(len(runs)),
                    *(
                        f"{100 * value:.1f}"
                        for value in (math.fsum(means) / len(means), min(means), max(means))
                    ),
                    f"{sum(mean < -0.001 for mean in means)} of {len(means)}",
                    f"{sum(gain < -0.001 for gain in runs)}",
                ]
            )
    yield table(["", "runs", "mean", "least", "most", "settings slower", "runs slower"], rows)

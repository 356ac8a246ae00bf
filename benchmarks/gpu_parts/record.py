"""The results of a part so far, in a file that is complete at any moment."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from testbed.results.verified import ties, too_many_ties
from testbed.rundir import write_json


@dataclass(frozen=True)
class Job:
    """The task of a part: the device, the size, and the time at which it must be done
    (``time.monotonic``).
    """

    device: str
    is_small: bool
    folder: Path
    """The folder of the whole benchmark, with the files of all parts."""
    ends_at_s: float
    checkpoint: Path | None = None
    """A checkpoint to serve in place of one with random weights."""

    @property
    def left_s(self) -> float:
        return max(0.0, self.ends_at_s - time.monotonic())


@dataclass
class Record:
    """The content of ``NAME.json``: ``values``, ``findings`` (sentences for people) and ``failures`` (wrong
    results).

    Each method writes the file, so that nothing is lost if the part ends early.
    """

    job: Job
    name: str
    values: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    unreached: list[str] = field(default_factory=list)
    """Sentences on what there was no time for."""

    @property
    def path(self) -> Path:
        return self.job.folder / f"{self.name}.json"

    def put(self, **values: Any) -> None:
        self.values.update(values)
        self._write()

    def append(self, key: str, row: dict[str, Any]) -> None:
        self.values.setdefault(key, []).append(row)
        self._write()

    def find(self, sentence: str) -> None:
        self.findings.append(sentence)
        self._write()

    def fail(self, sentence: str) -> None:
        self.failures.append(sentence)
        self._write()

    def leave(self, sentence: str) -> None:
        """Records what there was no time for: the part is then "not reached", with what it has."""
        self.unreached.append(sentence)
        self._write()

    def say_tokens(self, found: dict[str, Any]) -> None:
        """Records the result of comparing a run's tokens with the whole model's: a failure unless all are
        equal.
        """
        if found["tokens_unchecked_because"]:
            self.fail(f"The tokens were not compared: {found['tokens_unchecked_because']}.")
        elif found["n_tokens_altered"]:
            self.fail(
                f"{found['n_tokens_altered']} of {found['n_tokens_checked']} tokens are not the whole model's."
            )
        elif many := too_many_ties(found["n_tokens_checked"], found["n_tokens_tied"]):
            self.fail(f"{many}.")
        else:
            self.find(
                f"All {found['n_tokens_checked']} tokens are the whole model's on this device{ties(found['n_tokens_tied'])}."
            )

    def _write(self) -> None:
        write_json(
            self.path,
            {
                "part": self.name,
                "findings": self.findings,
                "failures": self.failures,
                "unreached": self.unreached,
                **self.values,
            },
        )

"""``testbed.score``: a policy's figures on a frozen suite of settings."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from threading import Event
from typing import Any

from testbed.api.choices import PolicyLike, chosen_of
from testbed.api.html import table_html
from testbed.api.paths import folder_of, path_of
from testbed.api.progress import Listener, heard
from testbed.api.scenarios import flag, whole
from testbed.api.sweeps import shown_to
from testbed.control.choice import check_policy
from testbed.errors import UserError
from testbed.rundir import scratch
from testbed.runtime.signals import outside_loop
from testbed.studies.score import command
from testbed.studies.score.suite import read_suite


class Score(Mapping[str, Any]):
    """A policy's score, with the keys of `testbed score --json` (docs/score.md).

    ``score``: the combined score, of which 1 is the best of the reference policies setting by setting; ``valid``: whether
    it broke no rule, and ``why`` not; ``settings``: a dict per setting.
    """

    def __init__(self, answer: Mapping[str, Any]) -> None:
        self._answer = answer

    @property
    def score(self) -> float:
        return float(self["combined_score"])

    @property
    def valid(self) -> bool:
        return bool(self["valid"])

    @property
    def why(self) -> str:
        return str(self["why"])

    @property
    def settings(self) -> list[dict[str, Any]]:
        return list(self["settings"])

    def __getitem__(self, key: str) -> Any:
        return self._answer[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._answer)

    def __len__(self) -> int:
        return len(self._answer)

    def __repr__(self) -> str:
        return f"<Score {self.score:.3f} of {self['policy']} on {self['suite']}>"

    def _repr_html_(self) -> str:
        names = ("score", "met_ratio", "ttft_p95_s", "tpot_p95_s", "place_cpu_s", "route_cpu_ms")
        rows = [
            [row["name"], *("" if row[name] is None else f"{row[name]:.3g}" for name in names), row["why"]]
            for row in self.settings
        ]
        return table_html(
            f"{self['policy']} on {self['suite']}: {self.score:.3f}", ["setting", *names, "why"], rows
        )


def score(
    policy: PolicyLike,
    suite: str | os.PathLike[str] = command.DEFAULT_SUITE,
    *,
    quick: bool = False,
    seeds: str | Sequence[int] = command.FROZEN,
    checks: bool = True,
    jobs: int | None = None,
    out: str | os.PathLike[str] | None = None,
    progress: Listener | None = None,
) -> Score:
    """Score a policy on a suite of settings, as `testbed score` does.

    - ``policy``: a pair by name or as objects (docs/python.md)
    - ``suite``: a shipped suite's name, or a folder with one
    - ``quick``: a few small settings, with one seed
    - ``seeds``: "frozen", "fresh" (both are scored), or numbers, [20, 21, 22] or "20,21,22"
    - ``checks``: serve some settings again, to find decisions that follow from more than what a policy is given
    - ``jobs``: worker processes; ``None``: one per CPU
    - ``out``: the folder that keeps runs, where a later call finds them; ``None``: nothing is kept
    - ``progress``: called with a ``Progress``, with ``n_done`` and ``n_total``

    A policy that fails, loops or breaks a rule has a score that is not ``valid``. Raises ``UserError`` for wrong input.
    """
    quick, checks = flag(quick, "quick"), flag(checks, "checks")
    of = str(path_of(suite, "suite is a shipped suite's name, or a folder"))
    found = read_suite(of)
    found.best()
    if policy is None:
        raise UserError("None is no policy: give a name, a pair or objects")
    stopped, given = Event(), _seeds_text(seeds)

    def do() -> Score:
        with heard(progress), chosen_of([policy]) as chosen, scratch("study") as temporary:
            (name,) = chosen.names
            assert name is not None, "it is a policy"
            if not chosen.objects:
                check_policy(name)
            folder = folder_of(out) or temporary / "score"
            options = command.Options(of, quick, given, whole(jobs, "jobs"), folder, chosen.objects, checks)
            answer, _ = command.score(found, name, options, folder, shown_to(progress, stopped))
            return Score(
                {**answer, "policy": chosen.label(name), "out": None if out is None else str(folder)}
            )

    return outside_loop(do, stopped.set)


def _seeds_text(seeds: str | Sequence[int]) -> str:
    """Return seeds as the command line has them. Raises ``UserError``."""
    if isinstance(seeds, str):
        return seeds
    if not isinstance(seeds, Sequence):
        raise UserError(f'seeds are "frozen", "fresh" or a list of numbers, not {seeds!r}')
    return ",".join(str(whole(seed, "a seed")) for seed in seeds)

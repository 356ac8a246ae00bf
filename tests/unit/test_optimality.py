"""The benchmark of bounds and algorithms over the optimum."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import optimality
from benchmarks.optimality import GROUPS, SHOWN, draw, instances, ratios, run, solved, table

REL = 1e-6


def test_every_figure_is_on_its_side_of_the_optimum() -> None:
    found = instances(8, seed=1)
    assert [one.group for one in found] == list(GROUPS) * 2
    for field in ("lp_paper", "lower_bound", "knapsack", "lp"):
        assert max(ratios(found, field)) <= 1 + REL
    for field in ("cg_bprr", "theorem1"):
        assert min(ratios(found, field)) >= 1 - REL
    rows = table(found).splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[2 : 2 + len(SHOWN)]] == [*SHOWN.values()]


def test_the_table_goes_below_its_heading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{optimality.HEADING}\nstale\n", encoding="utf-8")
    (found,) = instances(1, seed=1)
    monkeypatch.setattr(optimality, "instances", lambda n, seed: [found._replace(group=g) for g in GROUPS])
    assert run(["--instances", "4", "--into", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Page\n\n{optimality.HEADING}\n| over the optimum") and "stale" not in text


def test_programs_that_disagree_stop_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    group = next(iter(GROUPS))
    problem, requests = draw(optimality.Random(1), *GROUPS[group])
    solve = optimality.solve_bprr

    def wrong(*args: object, **options: object) -> object:
        answer = solve(*args, **options)  # type: ignore[arg-type]
        return answer._replace(objective_s=answer.objective_s * 1.1) if "program" in options else answer

    monkeypatch.setattr(optimality, "solve_bprr", wrong)
    with pytest.raises(RuntimeError, match=group):
        solved(group, problem, requests)

"""A linear or mixed-integer model, solved by HiGHS, which is imported only when a model is solved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from policies.problem import PolicyError

_TOLERANCE = 1e-9
"""For feasibility, optimality and integrality; costs and rows are scaled to about 1."""


class Solution(NamedTuple):
    """Values of the variables by number. ``bound`` is proven: no solution has a smaller objective."""

    values: tuple[float, ...]
    objective: float
    bound: float
    proven_optimal: bool


class LinearModel:
    """Minimise a linear objective over variables >= 0 under linear rows.

    A variable with a cost below 0 needs an upper limit, so that no objective is unbounded.
    """

    def __init__(self) -> None:
        self._costs: list[float] = []
        self._lowers: list[float] = []
        self._uppers: list[float] = []
        self._integer: list[bool] = []
        self._lower_sides: list[float] = []
        self._upper_sides: list[float] = []
        self._starts: list[int] = [0]
        self._columns: list[int] = []
        self._coefficients: list[float] = []

    def variable(
        self, cost: float, upper: float = math.inf, *, integer: bool = True, lower: float = 0.0
    ) -> int:
        """Adds a variable in ``[lower, upper]``; returns its number."""
        self._costs.append(cost)
        self._lowers.append(lower)
        self._uppers.append(upper)
        self._integer.append(integer)
        return len(self._costs) - 1

    @property
    def n_variables(self) -> int:
        return len(self._costs)

    def row(self, terms: Mapping[int, float], lower: float, upper: float) -> None:
        """Adds ``lower <= sum of coefficient * variable <= upper``; ``terms`` are coefficients by variable."""
        self._columns.extend(terms)
        self._coefficients.extend(terms.values())
        self._starts.append(len(self._columns))
        self._lower_sides.append(lower)
        self._upper_sides.append(upper)

    def solve(
        self,
        *,
        relaxed: bool = False,
        gap_ratio: float = 0.0,
        max_nodes: int | None = None,
        start: Sequence[float] | None = None,
    ) -> Solution | None:
        """Returns the optimum (``relaxed``: without integrality), or the best solution within ``max_nodes``.

        Returns ``None`` if there is no solution. A solution within ``gap_ratio`` of the bound counts as
        optimal. ``max_nodes`` limits the number of branches. No clock ends the search, so that the result is
        the same on every machine, however busy it is. ``start`` has the values of a solution to begin with.
        Raises ``PolicyError`` if the branches were too few to find a solution, or if HiGHS fails.
        """
        import highspy
        import numpy as np

        scale = max(map(abs, self._costs), default=0.0) or 1.0
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self._costs), len(self._lower_sides)
        lp.col_cost_ = np.array(self._costs) / scale
        lp.col_lower_ = np.array(self._lowers)
        lp.col_upper_ = np.array(self._uppers)
        lp.row_lower_ = np.array(self._lower_sides)
        lp.row_upper_ = np.array(self._upper_sides)
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self._starts)
        lp.a_matrix_.index_ = np.array(self._columns)
        lp.a_matrix_.value_ = np.array(self._coefficients)
        mixed = not relaxed and any(self._integer)
        if mixed:
            kinds = {True: highspy.HighsVarType.kInteger, False: highspy.HighsVarType.kContinuous}
            lp.integrality_ = [kinds[integer] for integer in self._integer]
        highs = highspy.Highs()  # type: ignore[no-untyped-call]
        options: dict[str, bool | int | float | str] = {
            "output_flag": False,
            "parallel": "off",
            "threads": 1,
            "random_seed": 0,
            "mip_rel_gap": gap_ratio,
            "mip_abs_gap": _TOLERANCE,
            "mip_feasibility_tolerance": _TOLERANCE,
            "primal_feasibility_tolerance": _TOLERANCE,
            "dual_feasibility_tolerance": _TOLERANCE,
        }
        if max_nodes is not None:
            options["mip_max_nodes"] = max_nodes
        for option, value in options.items():
            highs.setOptionValue(option, value)
        highs.passModel(lp)
        if start is not None:
            known = highspy.HighsSolution()
            known.col_value = list(start)
            highs.setSolution(known)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return None  # never unbounded: see the class
        optimal = status == highspy.HighsModelStatus.kOptimal
        if not (optimal or status == highspy.HighsModelStatus.kSolutionLimit):
            raise PolicyError(f"HiGHS ended with {highs.modelStatusToString(status)!r}")
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise PolicyError(
                f"HiGHS found no solution in {max_nodes} branches; allow more or make the instance smaller"
            )
        objective = info.objective_function_value
        # The bound of a search that was stopped early can be -inf; no objective is below ``least``.
        least = sum(
            c * (u if c < 0 else x)
            for c, x, u in zip(self._costs, self._lowers, self._uppers, strict=True)
            if c
        )
        bound = max(info.mip_dual_bound, least / scale) if mixed else objective if optimal else least / scale
        values = tuple(float(value) for value in highs.getSolution().col_value)
        return Solution(values, objective * scale, bound * scale, optimal)

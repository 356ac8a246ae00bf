"""The sources of the gain, and the effect of |R|, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from testbed.studies.reproduce.breakdown import PLACEMENT_FIRST, Breakdown, Share, break_down
from testbed.studies.reproduce.markdown import number, seconds, table
from testbed.studies.reproduce.runs import FACTORS, Results
from testbed.studies.reproduce.settings import CLOSEST, COLUMNS, PLACES, STATED, TableVariant

FACTOR_LABELS = {
    "placement": "placement",
    "order": "order of joining",
    "number": "blocks per server, cache room",
    "windows": "choice of windows",
    "routing": "routing (WS-RR)",
    "setup": "session-setup constants",
}
_CHOICES = {
    "formula": "the paper's formula",
    "formula+setup": "formula, setup counted",
    "one": "1",
    "bound": "memory bound",
    "searched": "searched",
    "hindsight": "best in hindsight",
}
EXPLAINED = (CLOSEST, STATED)


def breakdowns(
    results: Results, variant: TableVariant, *, with_setup: bool
) -> Mapping[str, Breakdown | None]:
    """Returns id of a setting -> its breakdown; None if no run has a placement for every combination."""
    return {
        setting.id: break_down(results.runs(setting), with_setup=with_setup) for setting in variant.settings
    }


def breakdown_lines(results: Results) -> Iterator[str]:
    """Yields Markdown: the shares of the gain per setting, and two orders of the changes step by step."""
    yield "## How much of the gain comes from what"
    yield (
        "From PETALS to the proposed policy, one change at a time: the order in which servers join; how "
        "many blocks "
        "each holds, with the cache room that goes with it; the rule by which it chooses its window; "
        "routing; the "
        "session-setup constants. How much a change saves depends on the changes made before it. A share "
        "is its mean "
        "saving over all orders of the changes (Shapley); in brackets are its least and largest saving in "
        "any order. "
        "Seconds per token; negative: the change makes it slower."
    )
    for variant in EXPLAINED:
        for with_setup, words in ((True, "with"), (False, "without")):
            found = breakdowns(results, variant, with_setup=with_setup)
            yield f"### {variant.title}: time per token [s], {words} the constants"
            if with_setup:
                yield "Each policy with its own session setup and with the other's:"
                yield _swapped(variant, found)
            yield "Placement as a whole, routing" + (", constants:" if with_setup else ":")
            yield _shares(variant, found, "groups")
            yield "Placement in its three steps:"
            yield _shares(variant, found, "shares")
            yield (
                "The same changes one after the other, "
                + " → ".join(f for f in PLACEMENT_FIRST if with_setup or f != "setup")
                + ", and in the reverse order [s saved per token]:"
            )
            yield _paths(variant, found)


def _rows(variant: TableVariant, found: Mapping[str, Breakdown | None]) -> Iterator[tuple[str, Breakdown]]:
    seen = set()
    for place in PLACES:
        for column, (_, n_output) in enumerate(COLUMNS):
            setting = variant.cells[place, column]
            breakdown = found[setting.id]
            if setting.id in seen or breakdown is None:
                continue
            seen.add(setting.id)
            where = f"{place}, {setting.rate:g}/s, {n_output}"
            if breakdown.n_runs < breakdown.n_all:
                where += f" ({breakdown.n_runs} of {breakdown.n_all} runs)"
            yield where, breakdown


def _swapped(variant: TableVariant, found: Mapping[str, Breakdown | None]) -> str:
    rows = []
    for where, b in _rows(variant, found):
        times_s = (b.before_s, b.setup_alone_s, b.without_setup_s, b.after_s)
        rows.append([where, *("-" if time_s is None else f"{time_s:.3f}" for time_s in times_s)])
    header = ["PETALS", "PETALS, setup of proposed", "proposed, setup of PETALS", "proposed"]
    return table(["", *header], rows)


def _shares(variant: TableVariant, found: Mapping[str, Breakdown | None], which: str) -> str:
    rows = []
    factors: list[str] = []
    for where, b in _rows(variant, found):
        by_factor: dict[str, Share] = b.groups if which == "groups" else b.shares
        factors = list(by_factor)
        total_s = b.before_s - b.after_s
        cells = [
            f"{share.mean_s:.3f} = {share.mean_s / total_s:.0%} ({share.least_s:.3f} to {share.most_s:.3f})"
            for share in by_factor.values()
        ]
        rows.append([where, f"{b.before_s:.3f}", f"{b.after_s:.3f}", *cells])
    return table(["", "PETALS", "proposed", *(FACTOR_LABELS[f] for f in factors)], rows)


def _paths(variant: TableVariant, found: Mapping[str, Breakdown | None]) -> str:
    rows = []
    for where, b in _rows(variant, found):
        rows.append([where, *(", ".join(f"{saved:+.3f}" for saved in path) for path in b.paths.values())])
    names = [" → ".join(path) for path in b.paths] if rows else []
    return table(["", *names], rows)


def mean_shares(
    results: Results, variant: TableVariant, *, with_setup: bool
) -> dict[str, tuple[float, float, dict[str, float]]]:
    """Returns place -> (PETALS, proposed, factor -> share), in mean seconds per token over the place's
    columns.
    """
    found = breakdowns(results, variant, with_setup=with_setup)
    answer = {}
    for place in PLACES:
        cells = [found[variant.cells[place, column].id] for column in range(len(COLUMNS))]
        known = [b for b in cells if b is not None]
        if known:
            factors = [f for f in FACTORS if f in known[0].shares]
            shares = {f: sum(b.shares[f].mean_s for b in known) / len(known) for f in factors}
            before_s = sum(b.before_s for b in known) / len(known)
            answer[place] = (before_s, sum(b.after_s for b in known) / len(known), shares)
    return answer


def concurrency_lines(results: Results) -> Iterator[str]:
    """Yields Markdown: the proposed policy with |R| chosen in different ways."""
    yield "## What |R| does"
    yield (
        "Time per token [s] of the proposed policy with |R| chosen in different ways, the mean |R| in brackets. "
        "The paper's formula leaves the session setup out of a request's time; with the setup it plans for "
        "the actual "
        "number of sessions. Searched: the best |R| on synthetic arrivals. Best in hindsight: the best |R| "
        "on the "
        "run's own arrivals, which no policy can know; it is a bound on the gain from choosing |R|."
    )
    for variant in EXPLAINED:
        for setup, words in (("reference", "with"), ("none", "without")):
            yield f"### {variant.title}: {words} the constants"
            rows = []
            seen = set()
            for place in PLACES:
                for column, (_, n_output) in enumerate(COLUMNS):
                    setting = variant.cells[place, column]
                    if setting.id in seen:
                        continue
                    seen.add(setting.id)
                    cells = []
                    for choice in _CHOICES:
                        time_s = results.mean(setting, choice, setup, "per_token_s")
                        chosen = results.mean(setting, choice, setup, "design_concurrency")
                        cells.append(
                            seconds(time_s)
                            + (
                                ""
                                if chosen is None
                                else f" ({number(chosen._replace(half_width=float('nan')), 0)})"
                            )
                        )
                    rows.append([f"{place}, {setting.rate:g}/s, {n_output}", *cells])
            yield table(["", *_CHOICES.values()], rows)

"""Tables of means and differences: Markdown and LaTeX for people, CSV with all digits for programs."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Sequence
from io import StringIO

from testbed.experiments.units import counted
from testbed.results.costs import ENERGY
from testbed.results.intervals import EQUAL, Mean
from testbed.simulator.engine import MAX_STEPS
from testbed.simulator.runs import drawn_text
from testbed.studies.sweep.axes import words_of
from testbed.studies.sweep.contrast import N_FAILED, Cell, Difference, baselines, holm, p_value
from testbed.studies.sweep.measures import label_of
from testbed.studies.sweep.study import Study

_ROUNDING_RATIO = 1e-9
"""A half-width below this share of its mean is no more than rounding."""
_MOST_WAYS = 4
"""Ways to choose recorded requests that are named."""
_LATEX = str.maketrans(
    {
        **{char: f"\\{char}" for char in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "|": r"\textbar{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r"$\pm$",
    }
)


def header_and_rows(study: Study, cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Returns the table for people: keys, policy, runs, then every metric's mean and its difference to the
    baseline.

    The columns of differences are left out if there is no policy but the baseline, and that of how many requests the
    means are of if all completed.
    """
    baseline = baseline_of(study, cells)
    of_base = baselines(cells, baseline)
    is_compared = any(cell.policy != baseline for cell in cells)
    printed = {one.metric for one in study.published}
    header = [*map(words_of, study.keys), "policy", "runs"]
    is_part = any(cell.n_of(N_FAILED) for cell in cells)
    header += ["of requests"] if is_part else []
    for metric in study.metrics:
        header += [label_of(metric), *(["published (deviation)"] if metric in printed else [])]
        header += [f"against {study.label(baseline)}"] if is_compared else []
    rows = []
    for cell in cells:
        n = (
            str(cell.n_measured)
            if cell.n_measured == len(cell.rows)
            else f"{cell.n_measured} of {len(cell.rows)}"
        )
        row = [*(cell.point[key].strip('"') for key in study.keys), study.label(cell.policy), n]
        row += [_completed(cell)] if is_part else []
        base = of_base.get(tuple(cell.point.values()))
        for metric in study.metrics:
            row.append(number(cell.mean(metric)))
            if metric in printed:
                row.append(_beside(study.printed(metric, cell.policy, cell.point), cell.mean(metric)))
            if is_compared:
                is_other = base is not None and base is not cell
                row.append(difference(cell.against(base, metric)) if base is not None and is_other else "")
        rows.append(row)
    return header, rows


def _completed(cell: Cell) -> str:
    return f"{cell.n_of('n_completed'):,} of {cell.n_of('n_requests'):,}"


def notes(study: Study, cells: Sequence[Cell]) -> list[str]:
    """Returns sentences on what the means are of: recorded requests, completed ones where others failed, runs with energy."""
    found = [f"{text[0].upper()}{text[1:]}." for text in _draws(cells)] if study.n_runs > 1 else []
    part = [cell for cell in cells if cell.n_of(N_FAILED)]
    if part:
        worst = max(part, key=lambda cell: cell.n_of(N_FAILED) / cell.n_of("n_requests"))
        at = "".join(f", {words_of(key)} {value.strip(chr(34))}" for key, value in worst.point.items())
        text = (
            f"Not all requests completed, at worst {_completed(worst)} ({study.label(worst.policy)}{at}): means and "
            "percentiles are of those that did"
        )
        baseline = baseline_of(study, cells)
        is_compared = any(cell.policy != baseline for cell in cells)
        found.append(
            f"{text}, and differences of times are not of the same requests." if is_compared else f"{text}."
        )
    served = [row for cell in cells for row in cell.rows if row.value("n_completed")]
    n_unknown = sum(row.value(ENERGY) is None for row in served if ENERGY in row.record.measures)
    if n_unknown:
        found.append(
            f"Energy is not known of {counted(n_unknown, 'runs')} with more than {MAX_STEPS:,} hops of tokens, which are "
            "not kept: lower workload.n_requests."
        )
    return found


def _draws(cells: Sequence[Cell]) -> list[str]:
    """Returns a text per way in which runs chose their recorded requests."""
    records = [row.record for cell in cells for row in cell.rows]
    ways = Counter(drawn_text(record.drawn) for record in records if record.drawn is not None)
    if len(ways) < 2:
        return list(ways)
    named = [f"{counted(n, 'runs')}: {text}" for text, n in list(ways.items())[:_MOST_WAYS]]
    return [*named, f"{len(ways) - _MOST_WAYS} more such numbers"] if len(ways) > _MOST_WAYS else named


def _beside(printed: float | None, mean: Mean | None) -> str:
    if printed is None:
        return ""
    return f"{printed:g}" + ("" if mean is None else f" ({100 * (mean.mean / printed - 1):+.1f} %)")


def baseline_of(study: Study, cells: Sequence[Cell]) -> str:
    """Returns the policy that others are compared with: the study's baseline, or else its first policy."""
    return study.baseline or (study.policies[0] if study.policies else cells[0].policy)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table; bars in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def latex(study: Study, cells: Sequence[Cell]) -> str:
    """Returns a LaTeX ``tabular`` for the package booktabs, with the names, columns and digits of ``[latex]``.

    Names that the study states are LaTeX; all else is escaped.
    """
    table, baseline = study.latex, baseline_of(study, cells)
    of_base = baselines(cells, baseline)
    metrics = table.columns or study.metrics
    is_compared = table.differences and any(cell.policy != baseline for cell in cells)

    def name(key: str, words: str) -> str:
        return table.names.get(key, words.translate(_LATEX))

    header = [*(name(key, words_of(key)) for key in study.keys), name("policy", "policy")]
    for metric in metrics:
        header.append(name(metric, label_of(metric)))
        header += [f"against {name(baseline, study.label(baseline))}"] if is_compared else []
    rows = []
    for cell in cells:
        row = [cell.point[key].strip('"').translate(_LATEX) for key in study.keys]
        row.append(name(cell.policy, study.label(cell.policy)))
        base = of_base.get(tuple(cell.point.values()))
        for metric in metrics:
            mean = cell.mean(metric)
            if mean is not None and not table.intervals:
                mean = mean._replace(half_width=math.nan)
            text = number(mean) if table.digits is None or mean is None else rounded(mean, table.digits)
            row.append(_in_latex(text))
            if is_compared:
                is_other = base is not None and base is not cell
                found = difference(cell.against(base, metric)) if base is not None and is_other else ""
                row.append(_in_latex(found))
        rows.append(row)
    lines = [
        "% needs \\usepackage{booktabs}",
        *(f"% {note}" for note in notes(study, cells)),
        f"\\begin{{tabular}}{{{'l' * len(header)}}}",
        "\\toprule",
    ]
    lines += [_latex_line(header), "\\midrule", *map(_latex_line, rows), "\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines) + "\n"


def _in_latex(text: str) -> str:
    """Returns numbers as LaTeX, exponents as powers of ten, and minus signs that are no hyphens."""
    text = re.sub(
        r"([-+]?[\d.]+)e([-+]\d+)",
        lambda found: rf"${found[1]}\cdot10^{{{int(found[2])}}}$",
        text.translate(_LATEX),
    )
    return re.sub(r"(?<![${])-(?=\d)", "$-$", text)


def rounded(mean: Mean, digits: int) -> str:
    """Returns a mean with so many significant digits, and the half-width with as many decimals, or else one digit of it."""
    size = abs(mean.mean)
    decimals = max(digits - 1 - math.floor(math.log10(size)), 0) if size else digits - 1
    text = f"{mean.mean:.{decimals}f}"
    if math.isnan(mean.half_width):
        return text
    half = f"{mean.half_width:.{decimals}f}"
    is_nothing = mean.half_width <= _ROUNDING_RATIO * size
    return f"{text} ± {half if float(half) or is_nothing else f'{mean.half_width:.1g}'}"


def many_text(study: Study, cells: Sequence[Cell]) -> str:
    """Returns a sentence on how many differences are resolved by chance; empty if there are not several."""
    of_base = baselines(cells, baseline_of(study, cells))
    p_values = []
    for cell in cells:
        base = of_base.get(tuple(cell.point.values()))
        for metric in study.metrics if base is not None and base is not cell else ():
            found = cell.against(base, metric) if base is not None else None
            p = None if found is None else p_value(found)
            p_values += [] if p is None else [p]
    n = len(p_values)
    if n < 2:
        return ""
    n_resolved = sum(p < 0.05 for p in p_values)
    return (
        f"Many comparisons: of {n} differences {n_resolved} are resolved, and {0.05 * n:.2g} would be by chance if there were "
        f"none. With Holm's correction (5 % for all together) {holm(p_values)} are."
    )


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def csv_text(study: Study, cells: Sequence[Cell]) -> str:
    """Returns a CSV table with every measure of the study, in full digits.

    A missing value is an empty cell. Columns with ``_ci95`` are half-widths of 95 % intervals.
    """
    of_base = baselines(cells, baseline_of(study, cells))
    names = ("", "_ci95", "_difference", "_difference_ci95", "_ratio", "_verdict")
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = [f"{measure}{name}" for measure in study.measures for name in names]
    writer.writerow([*study.keys, "policy", "n_runs", "n_measured", *columns])
    for cell in cells:
        line: list[object] = [*(cell.point[key].strip('"') for key in study.keys), cell.policy]
        line += [len(cell.rows), cell.n_measured]
        base = of_base.get(tuple(cell.point.values()))
        for measure in study.measures:
            mean = cell.mean(measure)
            line += [_cell(mean and mean.mean), _cell(mean and mean.half_width)]
            found = cell.against(base, measure) if base is not None and base is not cell else None
            line += [_cell(found and found.mean), _cell(found and found.half_width)]
            line += [_cell(found and found.ratio), (found and found.verdict) or ""]
        writer.writerow(line)
    return out.getvalue()


def _cell(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else repr(float(value))


def number(mean: Mean | Difference | None, sign: str = "") -> str:
    """Returns ``mean ± half-width`` as text.

    It has two significant digits of the half-width, but no more than four of the larger of the two.
    Without an interval it is the mean alone, with four significant digits; ``-`` if there is no mean.
    ``sign``: the sign option of the format, for example ``+``.
    """
    if mean is None:
        return "-"
    if math.isnan(mean.half_width) or mean.half_width <= _ROUNDING_RATIO * abs(mean.mean):
        text = f"{mean.mean:{sign}.4g}"
        return text if math.isnan(mean.half_width) else f"{text} ± 0"
    size = max(abs(mean.mean), mean.half_width)
    digits = min(
        max(1 - math.floor(math.log10(mean.half_width)), 0), max(3 - math.floor(math.log10(size)), 0)
    )
    half = f"{mean.half_width:.{digits}f}"
    return f"{mean.mean:{sign}.{digits}f} ± {half if float(half) else f'{mean.half_width:.1g}'}"


def difference(found: Difference | None) -> str:
    """Returns a difference as text, for example ``+0.12 ± 0.03 (+4.0 %), worse``.

    Differences that are only rounding errors are shown as ``equal``, without numbers; ``-`` if there is none.
    """
    if found is None:
        return "-"
    if found.verdict == EQUAL:
        return EQUAL
    ratio = "" if found.ratio is None else f" ({100 * found.ratio:+.1f} %)"
    verdict = "" if found.verdict is None else f", {found.verdict}"
    return f"{number(found, '+')}{ratio}{verdict}"

"""``testbed workload``: makes and describes recorded workloads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from policies.rules import PrefixRules
from policies.workload import RequestPlan
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.limits import MAX_DURATION_S
from testbed.experiments.problems import KeyedError
from testbed.experiments.prompts import implied_reuse
from testbed.experiments.traces import SHAREGPT, TRACE_KINDS, read_trace, trace_text
from testbed.experiments.units import counted
from testbed.rundir import replacing

_SHARES = (50, 90, 99)


def make_command(
    file: Path, scenario: str, kind: str | None, overrides: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """Write the requests of ``scenario`` to ``file`` in the format ``kind``; returns as ``show_command``, and where they are
    from.

    ``kind`` ``None``: mooncake, whose files are JSON Lines, for a name that ends so, else azure. Raises ``UserError``.
    """
    kind = kind or ("mooncake" if file.suffix == ".jsonl" else "azure")
    if kind not in TRACE_KINDS:
        raise UserError(f"--kind {kind}: choose one of {', '.join(TRACE_KINDS)}")
    if file.exists():
        raise UserError(f"{file} exists; give the name of a new file")
    experiment = load_experiment(scenario, overrides)
    if any(r.turn is not None and r.turn.after is not None for r in experiment.workload.requests):
        raise UserError(
            "workload.turns: further messages come after answers, so they have no arrivals to write; leave turns out, or "
            "take the requests.parquet of a run"
        )
    try:
        with replacing(file) as temporary:
            temporary.write_text(trace_text(kind, experiment.workload.requests), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; choose another file") from None
    answer, text = show_command(file)
    origin = f"{experiment.name}, seed {experiment.seed}: {experiment.workload.source}"
    return {**answer, "origin": origin}, f"requests of the scenario {origin}\n{text}"


def show_command(file: Path) -> tuple[dict[str, Any], str]:
    """Describe a recorded workload for ``--json`` and as text; times are in seconds. Raises ``UserError``."""
    try:
        trace = read_trace(file)
    except KeyedError as error:
        raise UserError(str(error)) from None
    at_s, *lengths = np.array(trace.requests, dtype=np.float64).T
    gaps_s = np.diff(at_s)
    answer: dict[str, Any] = {
        "file": str(file),
        "kind": trace.kind,
        "n_requests": len(at_s),
        "duration_s": float(at_s[-1]),
        "span_s": float(at_s[-1]),
        "rate_rps": float(len(gaps_s) / at_s[-1]) if at_s[-1] > 0 else None,
        "gap_variation": float(gaps_s.std() / gaps_s.mean()) if at_s[-1] > 0 else None,
    }
    for name, values in zip(("n_input_tokens", "n_output_tokens"), lengths, strict=True):
        answer[name] = {"mean": float(values.mean()), "max": int(values.max())}
        answer[name] |= {f"p{share}": float(np.percentile(values, share)) for share in _SHARES}
    if trace.places:
        n_talks = len({place.conversation for place in trace.places})
        answer["conversations"] = {"n": n_talks, "turns_mean": len(trace.places) / n_talks}
    if trace.prompts:
        try:
            trace.check_prompts()
        except KeyedError as error:
            raise UserError(str(error)) from None
        plans = [
            RequestPlan(
                n, 0, row[0], int(row[1]), int(row[2]), block_ids=prompt.ids, block_tokens=prompt.block_tokens
            )
            for n, (row, prompt) in enumerate(zip(trace.requests, trace.prompts, strict=True))
        ]
        n_reused = sum(implied_reuse(plans, PrefixRules.page_tokens))
        answer["prefix"] = {"tokens_reused": n_reused, "hit_ratio": n_reused / int(lengths[0].sum())}
    return answer, _text(answer)


def _text(answer: dict[str, Any]) -> str:
    rate = ""
    if answer["rate_rps"] is not None:
        rate = (
            f", {answer['rate_rps']:.4g} per second; standard deviation of the gaps over their mean "
            f"{answer['gap_variation']:.2f} (Poisson: 1)"
        )
    lines = [f"{answer['file']}: {answer['kind']}, {counted(answer['n_requests'], 'requests')}"]
    span_s = answer["span_s"]
    over = f"{span_s:,.1f}" if span_s <= MAX_DURATION_S else f"{span_s:.4g}"
    is_timed = answer["kind"] != SHAREGPT
    lines.append(f"  arrivals over {over} s{rate}" if is_timed else "  no arrivals: this format has no times")
    for name, key in (("input tokens", "n_input_tokens"), ("output tokens", "n_output_tokens")):
        row = answer[key]
        shares = ", ".join(f"p{share} {row[f'p{share}']:g}" for share in _SHARES)
        lines.append(f"  {name:<13} mean {row['mean']:.1f}, {shares}, max {row['max']}")
    if "conversations" in answer:
        talks = answer["conversations"]
        lines.append(f"  {counted(talks['n'], 'conversations')}, {talks['turns_mean']:.1f} turns each")
    if "prefix" in answer:
        lines.append(
            f"  {answer['prefix']['hit_ratio']:.2%} of the input tokens begin as an earlier prompt did, in whole pages of "
            f"{PrefixRules.page_tokens}"
        )
    return "\n".join(lines)

"""Decides which requests of two runs are compared. All others are listed with the reason why they are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from testbed.errors import UserError
from testbed.studies.compare.load import Run


@dataclass(frozen=True)
class Alignment:
    """Numbers of requests, ascending. Each request of either run is in exactly one list."""

    compared: list[int]
    """Requests of the same lengths that completed in both runs."""
    only_a: list[int]
    only_b: list[int]
    other_lengths: list[int]
    not_completed: list[int]
    """Requests of the same lengths that did not complete in one of the runs or in both."""


def align(a: Run, b: Run) -> Alignment:
    """Pair the requests of both runs by their number. Raises ``UserError`` if none can be compared."""
    both = sorted(a.requests.keys() & b.requests.keys())
    if not both:
        raise UserError(
            f"{a.path} and {b.path} have no request in common ({len(a.requests)} and {len(b.requests)} requests)"
        )
    same = [i for i in both if lengths(a, i) == lengths(b, i)]
    if not same:
        (in_a, out_a), (in_b, out_b) = lengths(a, both[0]), lengths(b, both[0])
        raise UserError(
            f"no request has the same lengths in both runs (request {both[0]}: {in_a} input and {out_a} "
            "output "
            f"tokens in {a.path}, {in_b} and {out_b} in {b.path}); run both with the same workload"
        )
    compared = [i for i in same if completed(a, i) and completed(b, i)]
    if not compared:
        counts = " and ".join(
            f"{run.path} completed {sum(completed(run, i) for i in same)}" for run in (a, b)
        )
        raise UserError(f"no request completed in both runs: of {len(same)}, {counts}")
    return Alignment(
        compared=compared,
        only_a=sorted(a.requests.keys() - b.requests.keys()),
        only_b=sorted(b.requests.keys() - a.requests.keys()),
        other_lengths=[i for i in both if lengths(a, i) != lengths(b, i)],
        not_completed=[i for i in same if not (completed(a, i) and completed(b, i))],
    )


def lengths(run: Run, request: int) -> tuple[int, int]:
    """Returns the request's lengths, (input tokens, output tokens): those that came if it completed, else the workload's."""
    row = run.requests[request]
    return row.n_input_tokens, row.n_tokens_done if row.is_completed else row.n_output_tokens


def completed(run: Run, request: int) -> bool:
    return run.requests[request].is_completed


def alignment_data(a: Run, b: Run, alignment: Alignment) -> dict[str, Any]:
    """Returns the alignment as a JSON object, with how many compared requests have another client, arrival or
    chain.
    """

    def n_other(name: str) -> int:
        return sum(a.requests[i][name] != b.requests[i][name] for i in alignment.compared)

    def end(run: Run, i: int) -> dict[str, str]:
        return {"status": run.requests[i].status, "reason": run.requests[i].reason}

    return {
        "n_compared": len(alignment.compared),
        "only_a": alignment.only_a,
        "only_b": alignment.only_b,
        "other_lengths": [
            {"request": i, "a": list(lengths(a, i)), "b": list(lengths(b, i))}
            for i in alignment.other_lengths
        ],
        "not_completed": [{"request": i, "a": end(a, i), "b": end(b, i)} for i in alignment.not_completed],
        "n_other_client": n_other("client"),
        "n_other_arrival": n_other("arrival_at_s"),
        "n_other_chain": n_other("chain"),
    }

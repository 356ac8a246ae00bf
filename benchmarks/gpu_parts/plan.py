"""What each part will do at full size on two cards, and for how long: ``python -m benchmarks gpu --plan``."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.gpu_parts import calibration, correctness, serving, streams
from benchmarks.gpu_parts.models import largest_cases
from benchmarks.gpu_parts.record import Job
from benchmarks.gpu_parts.run import SHARES
from benchmarks.gpu_parts.sizes import model_of

CARDS = {"H100 80 GB": 78 * 2.0**30, "H200 141 GB": 139 * 2.0**30}
"""The bytes that are free on each card before anything runs there."""


def plan_text(job: Job, parts: Sequence[str], minutes: float) -> str:
    """Returns a line per part: its limit at the beginning, and what it does; then blocks that fit on each card."""
    total = sum(SHARES[name] for name in parts)
    n_cases = len(correctness.cases_of(job.is_small))
    words = {
        "machine": "names the device, its driver and versions",
        "tests": "runs the project's tests marked gpu",
        "correctness": f"compares {n_cases} combinations of family, dtype, weights and kind of steps with transformers",
        "streams": f"compares one queue with a stream per session, {', '.join(map(str, streams.SESSIONS))} sessions",
        "graphs": "times decoding with and without CUDA graphs beside the roofline; int8 kernels",
        "steps": "times a block by sessions, context and prompt",
        "models": "checks tokens of whole models, and of as many blocks of BLOOM-176B as fit",
        "batches": "fits the times of steps of several sessions, and compares the stub with blocks",
        "calibration": f"calibrates up to {calibration.MOST_BLOCKS['nf4']} blocks in nf4 and "
        f"{calibration.MOST_BLOCKS['plain']} in plain weights",
        "serving": "serves as many blocks of BLOOM-176B as fit on five servers, with the stub beside them",
        "cluster": "kills servers of a cluster, and checks every token",
        "endpoint": "asks the endpoint for texts, one after another and as streams",
    }
    lines = [f"{minutes:g} minutes; what a part does not use goes to those after it"]
    lines += [f"{name}: about {60 * minutes * SHARES[name] / total:.0f} s; {words[name]}" for name in parts]
    model = model_of(job)
    cases = [(weights, n_servers) for _, weights, n_servers in largest_cases(model, ["plain", "int8", "nf4"])]
    for card, free_bytes in CARDS.items():
        fitting = []
        for weights, n_servers in [*cases, ("nf4", serving.N_SERVERS)]:
            shape = serving.shape_in(free_bytes, "cuda", model, weights, n_servers, n_output_tokens=128)
            fitting.append(f"{shape.n_blocks} in {weights} on {n_servers}")
        lines.append(f"{card}: blocks of {model.name}, by weights and servers: {', '.join(fitting)}")
    return "\n".join(lines)

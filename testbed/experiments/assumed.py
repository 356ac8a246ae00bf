"""What a scenario does not say, and is assumed."""

from __future__ import annotations

from testbed.experiments.experiment import Experiment


def assumed_batching(experiment: Experiment) -> str | None:
    """Return a sentence if ``compute.batching`` is not given and sessions may meet; else ``None``."""
    compute = getattr(experiment.tables, "compute", None)
    if compute is None or compute.backend != "stub" or experiment.compute.batching != "none":
        return None
    if compute.batching is not None or len(experiment.workload.requests) < 2:
        return None
    return (
        'compute.batching is not given: "none" is assumed, so that a server computes each session as if it '
        "were alone"
    )

"""A hardware profile in a few seconds: few cases of a calibration, without files and without batches."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

from testbed.studies.calibrate.backend import Device, Source
from testbed.studies.calibrate.client import fit_client
from testbed.studies.calibrate.command import measured_backend, subject_of
from testbed.studies.calibrate.fit import fit_times
from testbed.studies.calibrate.plan import N_STEPS, lengths_within, make_plan
from testbed.studies.calibrate.points import points_of
from testbed.studies.calibrate.profile import profile_text

_BLOCKS = 4
_LENGTHS = (8, 64)
_ROUNDS = 1
_NAME = "quick"


@dataclass(frozen=True)
class QuickProfile:
    """``hardware``: a ``[hardware.NAME]`` table as TOML data; ``hub_token``: the client's time per output token.

    Both have their quantities as text with units.
    """

    hardware: dict[str, Any]
    hub_token: str | None


def quick_profile(source: Source, device: Device) -> QuickProfile:
    """Measures block times of ``source`` on this machine's ``device``, and the client's own time.

    Raises ``UserError`` if the blocks cannot be opened, ``RunError`` if the measurement fails.
    """
    sizes = source.sizes
    plan = make_plan(
        min(_BLOCKS, sizes.n_blocks),
        sizes.max_tokens,
        lengths=lengths_within(_LENGTHS, N_STEPS, sizes.max_tokens) or None,
        sessions=(1,),
        n_output_tokens=1,
        rounds=_ROUNDS,
    )
    opened = measured_backend(source, device, plan)
    measured = opened.measured
    client = fit_client(measured.client) if measured.client else None
    subject = subject_of(source, device, opened.token_bytes, opened.memory_bytes)
    text = profile_text(_NAME, fit_times(points_of(measured.steps)), subject, client)
    tables = tomllib.loads(text)
    return QuickProfile(tables["hardware"][_NAME], tables.get("hub", {}).get("token"))

"""Prompts and histories that no message holds are refused before anything runs."""

from __future__ import annotations

import pytest

from testbed.errors import UserError
from testbed.runtime.wiring import check_frames
from testbed.scenario import load_experiment

KILL = 'fault=[{kind="kill",server="a100-0",at="1 s"}]'


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["workload.n_input_tokens=9362"], None),
        (
            ["workload.n_input_tokens=9363"],
            "a prompt of 9,363 tokens does not fit into one message, which holds 9,362",
        ),
        (["workload.n_input_tokens=9300", "workload.n_output_tokens=100"], None),
        (
            ["workload.n_input_tokens=9300", "workload.n_output_tokens=100", KILL],
            'a history of 9,400 .* "step_by_step"',
        ),
        (
            [
                "workload.n_input_tokens=9300",
                "workload.n_output_tokens=100",
                KILL,
                "recovery.replay=step_by_step",
            ],
            None,
        ),
    ],
)
def test_what_does_not_fit_into_one_message_is_refused_with_what_to_change(
    options: list[str], said: str | None
) -> None:
    experiment = load_experiment("clustered", ["workload.n_requests=1", *options])
    if said is None:
        check_frames(experiment)
    else:
        with pytest.raises(UserError, match=said):
            check_frames(experiment)

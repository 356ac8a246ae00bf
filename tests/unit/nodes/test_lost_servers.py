"""What a session records when its hops are lost."""

from __future__ import annotations

from typing import Any, cast

import pytest

from nodes.chain import Chain, HopFailed, OpenHop
from nodes.hub import HubModel
from nodes.records import AnyRecord, Detected
from nodes.recovery import Recovery
from nodes.request import Request, SessionError
from policies.rules import RecoveryRules
from tests.support.manual_clock import ManualClock


class LostChain:
    """A chain whose hops are all gone."""

    def is_there(self, hop: OpenHop) -> bool:
        return False

    def end_of_loss(self, hops: list[OpenHop], at: int) -> int:
        return len(hops)

    def failed(self, server: int) -> None:
        """Nothing depends on it here."""


@pytest.mark.parametrize(("failed", "expected"), [(0, [4, 7, 9]), (1, [7, 4, 9]), (2, [9, 4, 7])])
async def test_of_the_servers_that_are_lost_the_one_whose_failure_was_noticed_comes_first(
    failed: int, expected: list[int]
) -> None:
    """With forwarding an earlier hop may be gone, too; times of failure are those of the first."""
    hops = [OpenHop(server, i, i + 1, f"s{i}", 1) for i, server in enumerate((4, 7, 9))]
    records: list[AnyRecord] = []
    recovery = Recovery(
        Request(0, 0.0, 5, 3),
        cast(Chain, LostChain()),
        None,
        RecoveryRules(),
        cast(HubModel, cast(Any, None)),
        ManualClock(),
        records.append,
    )
    with pytest.raises(SessionError, match=f"server {hops[failed].server}: gone"):
        await recovery.replace(hops, 0, HopFailed(hops[failed], "gone", 1.0), 5, 0)
    (record,) = records
    assert isinstance(record, Detected) and record.servers == expected

"""What the endpoint gives its requests, apart from HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from testbed.serving.guests import Guests
from testbed.serving.metrics import Metrics


class Room:
    """A host whose chains hold so many tokens."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens

    def could_hold(self, client: int, n_input_tokens: int, n_output_tokens: int) -> bool:
        return n_input_tokens + n_output_tokens <= self.n_tokens


@pytest.mark.parametrize(("room", "found"), [(1000, 64), (84, 64), (83, 63), (64, 44), (21, 1), (20, 64)])
def test_an_answer_without_a_limit_has_as_many_tokens_as_a_chain_could_hold(room: int, found: int) -> None:
    async def nothing() -> None: ...

    host: Any = Room(room)
    guests = Guests(Metrics("model", 1.0), nothing, nothing, 10, host)
    assert guests.most_tokens(0, 20, 64) == found
    guests.host = None
    assert guests.most_tokens(0, 20, 64) == 64

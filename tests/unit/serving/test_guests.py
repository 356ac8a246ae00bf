"""What the endpoint gives its requests, apart from HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from nodes.messages import NewToken
from nodes.records import Arrived
from nodes.request import Generation
from testbed.serving.guests import Ended, Guests
from testbed.serving.metrics import Metrics


class Room:
    """A host whose chains hold so many tokens."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens = n_tokens

    def could_hold(self, client: int, n_input_tokens: int, n_output_tokens: int) -> bool:
        return n_input_tokens + n_output_tokens <= self.n_tokens

    def submit(self, *asked: Any) -> int:
        return 7


@pytest.mark.parametrize(("room", "found"), [(1000, 64), (84, 64), (83, 63), (64, 44), (21, 1), (20, 64)])
def test_an_answer_without_a_limit_has_as_many_tokens_as_a_chain_could_hold(room: int, found: int) -> None:
    async def nothing() -> None: ...

    host: Any = Room(room)
    guests = Guests(Metrics("model", 1.0), nothing, nothing, 10, host)
    assert guests.most_tokens(0, 20, 64) == found
    guests.host = None
    assert guests.most_tokens(0, 20, 64) == 64


async def test_a_token_that_comes_after_the_testbeds_end_does_not_open_its_request_again() -> None:
    async def nothing() -> None: ...

    guests = Guests(Metrics("model", 1.0), nothing, nothing, 10, Room(100))
    stream = guests.open(0, 1, 5, Generation())
    guests.recorded(Arrived(stream.index, 0.0, "c", 0.0, 1, 5))
    await guests.end()
    guests.token(NewToken(stream.index, 1, 3, 0.0))
    assert isinstance(await stream.get(), Ended)
    guests.close(stream, enough=False)
    assert guests.n_open == 0

"""Requests from outside: whoever brings them while a testbed runs (``testbed.serving``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nodes.messages import NewToken, ServerStatus
from nodes.records import States
from nodes.request import Generation
from testbed.scenario.experiment import Link


class Host(Protocol):
    """What a running testbed does for its guests."""

    def links_now(self) -> Mapping[tuple[str, str], Link]:
        """The scenario's links as they are now."""
        ...

    def could_hold(self, client: int, n_input_tokens: int, n_output_tokens: int) -> bool:
        """Whether there would be a chain for such a request if there were no other."""
        ...

    def submit(self, client: int, n_input_tokens: int, n_output_tokens: int, how: Generation) -> int:
        """Serve one more request at ``client`` now; returns its index."""
        ...

    def end_request(self, index: int, *, enough: bool) -> None:
        """A submitted request has tokens ``enough``, or else whoever asked for it has gone."""
        ...

    async def statuses(self) -> Mapping[str, ServerStatus | None]:
        """How every server is, by name; ``None``: it does not answer."""
        ...


class Guests(Protocol):
    """Brings requests to a ``Host``, and is told what becomes of them."""

    async def begin(self, host: Host) -> None:
        """The testbed takes requests. Raises ``TestbedError``."""
        ...

    def recorded(self, record: States) -> None:
        """What a client has recorded of a request, the workload's own included."""
        ...

    def token(self, message: NewToken) -> None: ...

    async def end(self) -> None:
        """The testbed takes no more requests, and will end. Safe in every phase."""
        ...

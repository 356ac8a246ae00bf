"""The interface between a running testbed and those who send requests from outside (``testbed.serving``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from nodes.messages import NewToken, ServerStatus
from nodes.records import States
from nodes.request import Generation
from policies.links import Link


class Host(Protocol):
    """What a running testbed provides to its guests."""

    def links_now(self) -> Mapping[tuple[str, str], Link]:
        """Return the scenario's links as they are now, by (from, to)."""
        ...

    def could_hold(self, client: int, n_input_tokens: int, n_output_tokens: int) -> bool:
        """Whether there would be a chain for such a request if it were the only one."""
        ...

    def submit(
        self, client: int, n_input_tokens: int, n_output_tokens: int, how: Generation, session: str = ""
    ) -> int:
        """Serve one more request at ``client`` now, of the conversation ``session`` ("": of none); returns its index."""
        ...

    def end_request(self, index: int, *, enough: bool, reason: str = "") -> None:
        """End a submitted request: it has tokens ``enough``, it fails for ``reason``, or else its sender has disconnected."""
        ...

    async def statuses(self) -> Mapping[str, ServerStatus | None]:
        """Return every server's status by name; ``None`` for a server that does not answer."""
        ...


class Guests(Protocol):
    """Submits requests to a ``Host``, and is notified of their progress."""

    async def begin(self, host: Host) -> None:
        """Called when the testbed accepts requests. Raises ``TestbedError``."""
        ...

    def recorded(self, record: States) -> None:
        """Called with what a client records of any request, the workload's own included."""
        ...

    def token(self, message: NewToken) -> None:
        """Called for every new output token."""
        ...

    async def end(self) -> None:
        """Called when the testbed accepts no more requests and will end. Can be called in every phase."""
        ...

"""Requests from outside: whoever brings them while a testbed runs (``testbed.serving``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nodes.messages import NewToken
from nodes.records import States

if TYPE_CHECKING:
    from testbed.runtime.emulation import Emulation


class Guests(Protocol):
    """Brings requests with ``Emulation.submit`` and ``Emulation.end_request``, and is told what becomes of them."""

    async def begin(self, emulation: Emulation) -> None:
        """The testbed takes requests. Raises ``TestbedError``."""
        ...

    def recorded(self, record: States) -> None:
        """What a client has recorded of a request, the workload's own included."""
        ...

    def token(self, message: NewToken) -> None: ...

    async def end(self) -> None:
        """The testbed takes no more requests, and will end. Safe in every phase."""
        ...

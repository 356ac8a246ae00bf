"""How the launcher sends changes of links to the running forwarder.

Messages are small, as the forwarder reads them between packets and must not be held up for long. Each is
acknowledged, so a change is in force when the launcher's call returns.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Mapping

from netem.spec import NetworkError
from policies.links import Link

_CHANGE = struct.Struct("<Idddd")  # number of the pair; delay, rate, jitter, loss
_BATCH = 32


class ChangeChannel:
    """Both ends of the channel, made before the forwarder is forked.

    The parent calls ``send``, the forwarder calls ``receive``. ``pairs`` are numbered in their order.
    ``patience_s``: how many real seconds ``send`` waits for each acknowledgement. Raises ``OSError`` if no
    socket pair can be made.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]], patience_s: float = 5.0) -> None:
        self._numbers = {pair: number for number, pair in enumerate(pairs)}
        self._asking, self._answering = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking.settimeout(patience_s)

    def fileno(self) -> int:
        """Returns the descriptor of the forwarder's end."""
        return self._answering.fileno()

    def send(self, links: Mapping[tuple[str, str], Link]) -> None:
        """Sends the changes, and returns when the forwarder has read them all. Raises ``NetworkError``."""
        for pair in links:
            if pair not in self._numbers:
                raise NetworkError(f"the network has no link from {pair[0]} to {pair[1]} that could change")
        changes = [
            _CHANGE.pack(self._numbers[pair], link.delay_s, link.rate_bps, link.jitter_s, link.loss_ratio)
            for pair, link in links.items()
        ]
        for first in range(0, len(changes), _BATCH):
            try:
                self._asking.send(b"".join(changes[first : first + _BATCH]))
                self._asking.recv(1)
            except OSError as error:
                raise NetworkError(f"the forwarder does not accept changes of links: {error}") from error

    def receive(self) -> list[tuple[int, Link]]:
        """Reads and acknowledges one message; returns (number of the pair, its new profile) for each change.

        Called in the forwarder when ``fileno`` is readable.
        """
        message = self._answering.recv(_BATCH * _CHANGE.size)
        changes = [(number, Link(*values)) for number, *values in _CHANGE.iter_unpack(message)]
        self._answering.send(b"+")
        return changes

    def close(self) -> None:
        self._asking.close()
        self._answering.close()

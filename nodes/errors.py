"""What a server's answer or its absence tells a client."""

from __future__ import annotations


class ServerError(Exception):
    """The server answered with an error frame. ``code`` is one of those in ``nodes.wire``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class ConnectionLost(Exception):
    """The connection to the server is gone."""

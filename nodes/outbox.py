"""What waits to be sent over one connection, and in which order it goes.

Small frames do not wait for large ones: whenever the connection can take a message, the first one of the first class
that has any is sent. A large frame goes in parts, of which every one is a message. Pure: no clock, no socket.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import Any, Generic, Protocol, TypeVar

M = TypeVar("M", covariant=True)
W = TypeVar("W", bound="Waiting[Any]")


class Class(IntEnum):
    """Classes of frames, in the order in which they are sent."""

    CONTROL = 0
    """Opens and closes sessions, or says how a request ended; no hidden states."""
    SMALL = 1
    """Hidden states of few tokens."""
    BULK = 2
    """Larger ones. One frame after another: the parts of two of a class never alternate."""


class Waiting(Protocol[M]):
    """A frame that waits. ``is_whole``: it is one message. ``is_done``: ``next`` has returned the last one."""

    kind: Class
    is_whole: bool
    is_done: bool

    def next(self) -> M:
        """Returns its next message."""
        ...

    def end(self, now_s: float, error: ConnectionError | None = None) -> None:
        """Notes that its last message was sent at ``now_s``, or that it never will be, because of ``error``."""
        ...


class Outbox(Generic[W]):
    """The frames that wait, first in, first out in each class."""

    __slots__ = ("_classes",)

    def __init__(self) -> None:
        self._classes: tuple[deque[W], ...] = tuple(deque() for _ in Class)

    def __bool__(self) -> bool:
        return any(self._classes)

    def put(self, frame: W) -> None:
        """Adds a frame."""
        self._classes[frame.kind].append(frame)

    def first(self) -> W | None:
        """Returns the frame whose message goes next; ``None`` if nothing waits. It stays until it is removed."""
        for waiting in self._classes:
            if waiting:
                return waiting[0]
        return None

    def remove(self, frame: W) -> None:
        """Removes a frame: its last message is sent, or nobody wants the rest."""
        self._classes[frame.kind].remove(frame)

    def clear(self) -> list[W]:
        """Removes all frames, and returns them."""
        left = [frame for waiting in self._classes for frame in waiting]
        for waiting in self._classes:
            waiting.clear()
        return left

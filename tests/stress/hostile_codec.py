"""Plays hostile bytes against the codecs alone: the data plane's frames and the control plane's messages."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import msgpack
from hypothesis import strategies as st

from nodes import control, wire
from tests.stress.hostile_control import MESSAGES, WRONG
from tests.stress.hostile_frames import ANY, CLAIMS, DEEP, RAW

_ALLOWED_BYTES = 4_000_000
"""The most memory to decode one frame of a few kilobytes, even if it claims to contain a thousand
times more.
"""
_LOOK_EVERY = 50


class CodecTarget:
    """Decodes bytes: each case must be a valid frame, or be refused with the protocol's own error."""

    name = "codec"
    cases = st.one_of(
        ANY,
        RAW,
        DEEP,
        CLAIMS,
        st.binary(max_size=200),
        MESSAGES.map(msgpack.packb),
        WRONG.map(msgpack.packb),
    )

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._n = 0

    def check(self, case: bytes) -> None:
        self._n += 1
        measured = self._n % _LOOK_EVERY == 0
        if measured:
            tracemalloc.start(1)
        self._read(case)
        if measured:
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak_bytes < _ALLOWED_BYTES, f"{peak_bytes} bytes of memory for a frame of {len(case)}"

    def _read(self, case: bytes) -> None:
        for unpack in (wire.unpack_request, wire.unpack_answer):
            try:
                frame = unpack(case)
            except wire.FrameError as error:
                self.counts[error.code] += 1
                assert len(str(error)) < wire.MAX_ERROR_CHARACTERS
                wire.pack(wire.Error(error.request_id, error.code, str(error)))
            else:
                self.counts[type(frame).__name__] += 1
        try:
            message = control.unpack(case)
        except control.ControlError:
            self.counts["refused control messages"] += 1
        else:
            self.counts[f"control messages {type(message).__name__}"] += 1

    def n_left(self) -> int:
        return 0

    def close(self) -> None:
        """Does nothing: the target holds no resources."""

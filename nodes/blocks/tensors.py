"""Hidden states on the wire: the tensor's bytes, row after row, in the model's dtype."""

from __future__ import annotations

import torch


def from_bytes(payload: bytes, n_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states ``[n_tokens, hidden size]``."""
    return torch.frombuffer(bytearray(payload), dtype=dtype).reshape(n_tokens, -1)


def to_bytes(states: torch.Tensor) -> bytes:
    """The bytes of ``[n_tokens, hidden size]``."""
    flat = states.contiguous().cpu().view(torch.uint8)
    return flat.numpy().tobytes()

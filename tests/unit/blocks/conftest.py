"""The tiny models that all tests of real blocks share."""

from collections.abc import Iterator

import pytest

from tests.support.blocks import DEVICE, models

__all__ = ["models"]


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    """On a GPU, a limit of memory that a test's server has set for the whole process ends with the test."""
    yield
    if DEVICE != "cpu":
        import torch

        torch.cuda.set_per_process_memory_fraction(1.0)

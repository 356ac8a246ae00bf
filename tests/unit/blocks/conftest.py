"""The tiny models that all tests of real blocks share."""

from tests.support.blocks import models

__all__ = ["models"]

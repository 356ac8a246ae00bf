"""Converts between quantities in text ("100 ms", "1 Gbit/s", "79.13 GB") and floats in a base unit.

Base units are seconds, bits per second and bytes. The arithmetic is decimal, so that
``parse(format(x)) == x`` for every float.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from testbed.experiments.limits import MAX_DURATION_S, MAX_RATE_BPS, MAX_SIZE_BYTES
from testbed.experiments.problems import shown

_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(.*?)\s*", re.ASCII)


_USUAL = {
    "msec": "ms", "usec": "us", "sec": "s", "secs": "s", "second": "s", "seconds": "s", "mins": "min", "minutes": "min",
    "hours": "h", "bps": "bit/s", "kbps": "kbit/s", "mbps": "Mbit/s", "gbps": "Gbit/s", "tbps": "Tbit/s",
}  # fmt: skip
"""Other spellings of units, in small letters."""


def counted(count: float, things: str) -> str:
    """Return ``1 token`` or ``2 tokens`` for ``things`` "tokens"."""
    return f"{count:.15g} {things.removesuffix('s') if count == 1 else things}"


@dataclass(frozen=True)
class Dimension:
    """A kind of quantity: its units with their factors to the base unit, and an example for messages.

    ``display`` are the units of ``format``, largest first; the last is used for all smaller values.
    ``largest`` is the largest accepted value in the base unit, ``smallest`` the smallest one above 0.
    """

    name: str
    units: Mapping[str, Decimal]
    display: tuple[str, ...]
    example: str
    largest: float
    smallest: float = 0.0

    def parse(self, text: str) -> float:
        """Return the value of ``text`` in the base unit. Raises ``ValueError`` with what is wrong."""
        match = _QUANTITY.fullmatch(text)
        if match is None:
            raise ValueError(f'must be a {self.name} with a unit such as "{self.example}", not {shown(text)}')
        number, unit = match.groups()
        if unit not in self.units:
            what = f"unknown unit {shown(unit)}" if unit else f"{shown(text)} has no unit"
            valid = ", ".join(self.units)
            usual = _USUAL.get(unit.lower(), unit).lower()
            meant = next(
                (name for name in self.units if name.lower() == usual), ""
            )  # else it would be a guess
            hint = f' (did you mean "{meant}"?)' if meant else ""
            raise ValueError(f"{what}{hint}; a {self.name} is given in {valid}")
        return self._checked(float(Decimal(number) * self.units[unit]), text)

    def _checked(self, value: float, text: str) -> float:
        if value < 0:
            raise ValueError(f"must not be negative, but is {shown(text)}")
        if value > self.largest:
            raise ValueError(f"{shown(text)} is too large; the most is {self.format(self.largest)}")
        if 0 < value < self.smallest:
            raise ValueError(f"{shown(text)} is too small; the least is {self.format(self.smallest)}")
        return value

    def of(self, number: float, unit: str) -> float:
        """Return ``number`` of ``unit`` in the base unit. Raises ``ValueError`` like ``parse``."""
        return self._checked(float(Decimal(repr(number)) * self.units[unit]), f"{number!r} {unit}")

    def format(self, value: float) -> str:
        """Return ``value`` (base unit, not negative) exactly, in the largest unit of at most that size."""
        exact = Decimal(repr(float(value)))
        if exact == 0:
            return f"0 {self.display[0]}" if self.units[self.display[0]] == 1 else f"0 {self.display[-1]}"
        unit = next((u for u in self.display if exact >= self.units[u]), self.display[-1])
        scaled = exact.scaleb(-self.units[unit].adjusted()).normalize()
        return f"{scaled:f} {unit}"


DURATION = Dimension(
    "duration",
    {
        "h": Decimal(3600),
        "min": Decimal(60),
        "s": Decimal(1),
        "ms": Decimal("1e-3"),
        "us": Decimal("1e-6"),
        "µs": Decimal("1e-6"),
        "ns": Decimal("1e-9"),
    },
    ("s", "ms", "us"),
    "100 ms",
    largest=MAX_DURATION_S,
)
RATE = Dimension(
    "rate",
    {
        "bit/s": Decimal(1),
        "kbit/s": Decimal("1e3"),
        "Mbit/s": Decimal("1e6"),
        "Gbit/s": Decimal("1e9"),
        "Tbit/s": Decimal("1e12"),
    },
    ("Gbit/s", "Mbit/s", "kbit/s", "bit/s"),
    "100 Mbit/s",
    largest=MAX_RATE_BPS,
    smallest=1e-6,
)
POWER = Dimension(
    "power",
    {"W": Decimal(1), "kW": Decimal("1e3")},
    ("kW", "W"),
    "300 W",
    largest=1e9,
)
SIZE = Dimension(
    "size",
    {
        "B": Decimal(1),
        "kB": Decimal("1e3"),
        "MB": Decimal("1e6"),
        "GB": Decimal("1e9"),
        "TB": Decimal("1e12"),
        "KiB": Decimal(1024),
        "MiB": Decimal(1024**2),
        "GiB": Decimal(1024**3),
        "TiB": Decimal(1024**4),
    },
    ("GB", "MB", "kB", "B"),
    "79.13 GB",
    largest=MAX_SIZE_BYTES,
    smallest=1e-6,
)

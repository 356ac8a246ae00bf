"""Axes: the values of one key, or of several keys that change together, and the syntax in which users write
them.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import product
from typing import Any, Literal

from testbed.errors import UserError
from testbed.experiments.sources import value_of

POLICY, SCENARIO = "policy", "scenario"
"""Axes that are not keys of the scenario file: their values are names of policies, and scenarios."""
LABEL = "label."
"""Keys that begin with this are no keys of the scenario file either: they name the values beside them."""
SEED = "seed"
MAX_VALUES = 100_000
_OWN_WORDS = {
    SEED: "seeds come from --runs and --seed",
    "policy.name": 'policies by name are the axis "policy": write policy=...',
}

Point = dict[str, str]
"""One combination of values: key -> value as text, in the syntax of ``--set``."""


@dataclass(frozen=True)
class Axis:
    """The values of one or more keys. Each of ``values`` has one text per key: several keys change together.

    ``is_drawn``: the values are points of a random or Sobol design.
    """

    keys: tuple[str, ...]
    values: tuple[tuple[str, ...], ...]
    is_drawn: bool = False

    @property
    def points(self) -> list[Point]:
        return [dict(zip(self.keys, value, strict=True)) for value in self.values]


@dataclass(frozen=True)
class Span:
    """The range from which a design draws a key's values, uniformly, or log-uniformly if ``log``.

    ``integer``: only integers are drawn; then ``high`` itself can be drawn, too.
    """

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def at(self, share: float) -> str:
        """Returns the value at ``share`` of the range (0 <= ``share`` < 1) as text.

        Values that are not integers have six digits, so that the text is the same on every machine.
        """
        if self.integer:
            steps = int(self.high) - int(self.low) + 1
            if self.log:
                value = self.low * ((self.high + 1) / self.low) ** share
                return str(min(int(value), int(self.high)))
            return str(int(self.low) + min(int(share * steps), steps - 1))
        value = (
            self.low * (self.high / self.low) ** share
            if self.log
            else self.low + share * (self.high - self.low)
        )
        return f"{value:.6g}"


def parse_over(text: str) -> Axis:
    """Parses ``KEY=VALUES`` of the command line. Raises ``UserError`` if it has another form."""
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or not key or not values.strip():
        raise UserError(
            f"--over {text}: must have the form KEY=VALUES, "
            "for example workload.rate=0.1:2:0.1 or policy=petals,proposed"
        )
    found = [value for part in _split(values) for value in _values(part.strip(), f"--over {text}")]
    return checked_axis((key,), [(value,) for value in found], f"--over {text}")


def checked_axis(
    keys: Sequence[str], values: Sequence[tuple[str, ...]], where: str, *, is_drawn: bool = False
) -> Axis:
    """Returns the axis, after checking it.

    Raises ``UserError``, with a message that begins with ``where``, if there are no values, if a value occurs
    twice, or if an axis must not have one of the keys.
    """
    for key in keys:
        if key in _OWN_WORDS:
            raise UserError(f"{where}: {_OWN_WORDS[key]}")
    if not values:
        raise UserError(f"{where}: there are no values; give at least one")
    seen: set[str] = set()
    for value in values:
        as_json = json.dumps([_alike(value_of(text)) for text in value], default=str)
        if as_json in seen:
            raise UserError(f"{where}: {', '.join(value)} is given twice; leave one out")
        seen.add(as_json)
    return Axis(tuple(keys), tuple(values), is_drawn)


def _alike(value: Any) -> Any:
    """Returns the same for equal numbers, such as 1 and 1.0."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def value_range(text: str, where: str) -> list[str]:
    """Returns the values of ``start:stop:step``, ``stop`` included, as texts.

    They are computed in decimal arithmetic, without rounding errors. Raises ``UserError`` if the range is
    malformed, empty or too long.
    """
    parts = text.split(":")
    if len(parts) != 3:
        raise UserError(f'{where}: the range "{text}" must be start:stop:step, for example 0.1:2:0.1')
    try:
        start, stop, step = (Decimal(part.strip()) for part in parts)
    except InvalidOperation:
        raise UserError(f'{where}: the range "{text}" must have three numbers, start:stop:step') from None
    if not all(number.is_finite() for number in (start, stop, step)) or not step:
        raise UserError(f'{where}: the range "{text}" needs finite numbers and a step other than 0')
    n_steps = (stop - start) / step
    if n_steps < 0:
        raise UserError(
            f'{where}: the range "{text}" is empty; exchange start and stop, or change the sign of the step'
        )
    if n_steps >= MAX_VALUES:
        raise UserError(f'{where}: the range "{text}" has more than {MAX_VALUES:,} values; take larger steps')
    return [_decimal(start + i * step) for i in range(int(n_steps) + 1)]


def drawn_axis(
    kind: Literal["random", "sobol"], n_points: int, seed: int, spans: Mapping[str, Span], where: str
) -> Axis:
    """Returns an axis of ``n_points`` points drawn from ``spans``; the same seed gives the same points.

    ``kind``: independent uniform draws, or a scrambled Sobol sequence. Points that are equal as text are kept
    once. Raises ``UserError`` for a span from which nothing can be drawn.
    """
    for key, span in spans.items():
        if span.low >= span.high:
            raise UserError(f"{where}: {key} is empty: low must be less than high")
        if span.log and span.low <= 0:
            raise UserError(f"{where}: {key} has log, so low must be more than 0, not {span.low:g}")
        if span.integer and not (float(span.low).is_integer() and float(span.high).is_integer()):
            raise UserError(f"{where}: {key} is an integer, so low and high must be whole numbers")
    if kind == "sobol":
        from scipy.stats.qmc import Sobol

        sampler = Sobol(len(spans), scramble=True, seed=seed)
        rows = sampler.random_base2(math.ceil(math.log2(n_points)))[:n_points].tolist()
    else:
        rng = random.Random(f"{seed}:design")
        rows = [[rng.random() for _ in spans] for _ in range(n_points)]
    values = [tuple(span.at(share) for span, share in zip(spans.values(), row, strict=True)) for row in rows]
    return checked_axis(tuple(spans), list(dict.fromkeys(values)), where, is_drawn=True)


def words_of(key: str) -> str:
    """Returns how tables and figures show a key."""
    return key.removeprefix(LABEL)


def combined(axes: Sequence[Axis]) -> Iterator[Point]:
    """Yields every combination of the axes' values; the last axis varies fastest."""
    for combination in product(*(axis.points for axis in axes)):
        yield {key: text for part in combination for key, text in part.items()}


_RANGE = re.compile(r"[\s\d.eE+-]*\d[\s\d.eE+-]*:.*")


def _values(text: str, where: str) -> list[str]:
    if not text:
        raise UserError(f"{where}: a value is empty; remove the comma")
    return value_range(text, where) if _RANGE.fullmatch(text) else [text]


def _decimal(value: Decimal) -> str:
    return f"{value.normalize():f}"


def _split(text: str) -> list[str]:
    """Splits ``text`` at the commas that are outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += char
    return parts

"""Types of the keys in scenario and topology files: strict tables, quantities with units, names, shares."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from nodes.clock import on_tick
from testbed.experiments.limits import MAX_NUMBER, MAX_TOKENS
from testbed.experiments.problems import nearest, shown
from testbed.experiments.units import DURATION, POWER, RATE, SIZE, Dimension


def rule(what: str, key: str | None = None) -> PydanticCustomError:
    """Return the error for a broken rule. The user sees ``what`` as it is, after the path of ``key``."""
    return PydanticCustomError("rule", "{what}", {"what": what, **({"key": key} if key else {})})


def quantity(dimension: Dimension) -> Callable[[Any], float]:
    """Return a validator that turns text with a unit into a float in the base unit of ``dimension``."""
    parse_text = lru_cache(4096)(dimension.parse)  # files with many events repeat a few values

    def parse(value: Any) -> float:
        if not isinstance(value, str):
            raise rule(f'must be text with a unit such as "{dimension.example}", not {shown(value)}')
        try:
            return parse_text(value)
        except ValueError as error:
            raise rule(str(error)) from None

    return parse


Seconds = Annotated[float, BeforeValidator(quantity(DURATION)), PlainSerializer(DURATION.format)]
BitsPerSecond = Annotated[float, BeforeValidator(quantity(RATE)), PlainSerializer(RATE.format), Field(gt=0)]
NonNegativeBytes = Annotated[
    float, BeforeValidator(quantity(SIZE)), PlainSerializer(SIZE.format), Field(ge=0)
]
Bytes = Annotated[NonNegativeBytes, Field(gt=0)]
Watts = Annotated[float, BeforeValidator(quantity(POWER)), PlainSerializer(POWER.format)]
PositiveSeconds = Annotated[Seconds, Field(gt=0)]
Instant = Annotated[Seconds, AfterValidator(on_tick)]
"""A time at which something happens: a whole nanosecond, as all instants of a run."""


def _not_tiny(value: float) -> float:
    # Code divides by these values (mean gaps, service times); the results must stay finite.
    if value < 1 / MAX_NUMBER:
        raise rule(f"must be at least {1 / MAX_NUMBER:g}, not {shown(value)}")
    return value


NOT_TINY = AfterValidator(_not_tiny)
Positive = Annotated[float, Field(gt=0, le=MAX_NUMBER), NOT_TINY]
Weight = Annotated[float, Field(ge=0, le=MAX_NUMBER)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]


def checked_name(value: str) -> str:
    """Return ``value`` if it can be a name; raise the broken rule otherwise."""
    if not (value.isascii() and value.replace("-", "").replace("_", "").replace(".", "").isalnum()):
        raise rule(f'{shown(value)} must consist of letters (a to z, A to Z), digits, ".", "_" and "-"')
    if not value[0].isalnum() or len(value) > 64:
        raise rule(f"{shown(value)} must start with a letter or digit and have at most 64 characters")
    return value


Name = Annotated[
    str, BeforeValidator(lambda v: checked_name(v) if isinstance(v, str) and v else v), Field(min_length=1)
]


_PERCENT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*", re.ASCII)


def ratio(value: Any) -> float:
    """Return a share given as "0.1 %" or as a number 0..1.

    Raises the broken rule (a ``ValueError``) otherwise.
    """
    percent = _PERCENT.fullmatch(value) if isinstance(value, str) else None
    if percent is not None:
        share = float(Decimal(percent[1]) / 100)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        share = float(value)
    else:
        raise rule(f'must be text such as "0.1 %" or a number from 0 to 1, not {shown(value)}')
    if not 0 <= share <= 1:
        raise rule(f"must be from 0 to 1, or from 0 % to 100 %, not {shown(value)}")
    return share


Ratio = Annotated[float, BeforeValidator(ratio)]
"""A share as "0.1 %" or 0.001."""


class Table(BaseModel):
    """A table of the file: no unknown keys, no conversions between types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            valid = [field.alias or name for name, field in cls.model_fields.items()]
            for key, value in data.items():
                texts = value if isinstance(value, list) else [value]
                if any(isinstance(text, str) and "\0" in text for text in texts):
                    raise rule(
                        'has a NUL character ("\\u0000"), which no name and no path can have; remove it', key
                    )
                if key not in valid:
                    cls._refuse_key_of_other_kind(key)
                    what = f"unknown key{nearest(key, valid)}; valid here: {', '.join(valid)}"
                    raise PydanticCustomError("unknown_key", "{what}", {"what": what, "key": key})
        return data

    @classmethod
    def _refuse_key_of_other_kind(cls, key: str) -> None:
        """Raise the broken rule if ``key`` is one of another kind of this table, such as of another network."""
        tag, kind = _tag(cls)
        siblings: Sequence[type[BaseModel]] = (cls.__base__ or cls).__subclasses__()
        others = (_tag(sibling)[1] for sibling in siblings if key in sibling.model_fields)
        if tag and (other := next(filter(None, others), None)):
            raise rule(
                f"is {shown(kind)}, but {key} is a key of {tag} = {shown(other)}: leave out {key}, change {tag}, or "
                f"give the whole table anew, as {{{tag} = ..., ...}}",
                tag,
            )


def _tag(table: type[BaseModel]) -> tuple[str, str]:
    """Return the key that tells kinds of a table apart, and the kind of ``table``; empty if there is one kind."""
    for name, field in table.model_fields.items():
        values = get_args(field.annotation)
        if field.is_required() and get_origin(field.annotation) is Literal and len(values) == 1:
            return name, values[0]
    return "", ""


def int_or(*words: str, most: int) -> BeforeValidator:
    """Return a check for one of ``words`` or a whole number from 1 to ``most``."""

    def check(value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        if value not in words and not whole:
            choice = ", ".join(f'"{word}"' for word in words)
            raise rule(
                f"must be {choice} or a whole number of at least 1 and at most {most:,}, not {shown(value)}"
            )
        return value

    return BeforeValidator(check)

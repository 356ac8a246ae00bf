"""The form of a stored result, so that a damaged one is found when it is read and not when it is averaged."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FiniteFloat, Tag, TypeAdapter, ValidationError


class _Form(BaseModel):
    model_config = ConfigDict(strict=True)


class _Infeasible(_Form):
    infeasible: str


class _Means(_Form):
    setup: str
    per_token_s: FiniteFloat
    ttft_s: FiniteFloat
    rest_s: FiniteFloat


class _Policy(_Means):
    policy: str
    decision_s: FiniteFloat
    blocks: dict[str, int]


class _Factors(_Means):
    on: list[str]


class _Concurrency(_Means):
    choice: str
    design_concurrency: int


def _kind(row: Any) -> str:
    return "infeasible" if isinstance(row, dict) and "infeasible" in row else "means"


_Row = TypeVar("_Row", bound=_Means)
_OrInfeasible = Annotated[
    Annotated[_Row, Tag("means")] | Annotated[_Infeasible, Tag("infeasible")], Discriminator(_kind)
]


class _Record(_Form):
    key: tuple[str, str, int]
    policies: list[_OrInfeasible[_Policy]]


class _Explained(_Record):
    factors: list[_OrInfeasible[_Factors]]
    concurrencies: list[_OrInfeasible[_Concurrency]]


_RECORD: dict[bool, TypeAdapter[Any]] = {False: TypeAdapter(_Record), True: TypeAdapter(_Explained)}


def fault_of(line: bytes, *, explained: bool) -> str | None:
    """What is wrong with a line of the results file; ``explained``: its setting has ``factors``."""
    try:
        _RECORD[explained].validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "means"]  # the tag is no key of the file
        return f"{'.'.join(where)}: {first['msg']}"
    return None

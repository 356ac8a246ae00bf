"""Hardware profiles from files of their own, as ``testbed calibrate`` writes them:

``hardware_files = [...]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from testbed.errors import ScenarioError
from testbed.experiments.fields import Name, Seconds, Table
from testbed.experiments.model_tables import HardwareTable
from testbed.experiments.problems import KeyedError, explain


class HubTable(Table):
    """``[hub]``: the client's own time per output token of the calibrated model."""

    token: Seconds


class HardwareFile(Table):
    """A file of ``[hardware.NAME]`` tables, and optionally the client's time per token."""

    hardware: dict[Name, HardwareTable] = Field(min_length=1)
    hub: HubTable | None = None


def with_hardware_files(
    own: Mapping[str, HardwareTable], files: Sequence[tuple[str, Path]]
) -> tuple[dict[str, HardwareTable], dict[str, float]]:
    """Return the scenario's ``own`` tables together with those of ``files``, and the client's times.

    ``files`` are (path, folder that a relative path starts from). The second result maps each file with a
    ``[hub]`` table to the client's seconds per output token. Raises ``KeyedError`` for a file that cannot be
    read or is wrong, and for a hardware name that is defined twice.
    """
    tables = dict(own)
    origin = dict.fromkeys(own, "the scenario itself")
    hub_tokens: dict[str, float] = {}
    for index, (file, folder) in enumerate(files):
        key = ("hardware_files", index)
        read = _read(folder / file, key)
        if read.hub is not None:
            hub_tokens[file] = read.hub.token
        for name, table in read.hardware.items():
            if name in tables:
                raise KeyedError(
                    key,
                    f'{file} defines hardware "{name}", which is also in {origin[name]}; rename one of them, '
                    f'or change it in the scenario under a new name with base = "{name}"',
                )
            tables[name] = table
            origin[name] = file
    return tables, hub_tokens


def one_hub_token(hub_tokens: Mapping[str, float]) -> float | None:
    """Return the client's seconds per output token, ``None`` without any.

    Raises ``KeyedError`` if files disagree.
    """
    if len(set(hub_tokens.values())) > 1:
        raise KeyedError(
            ("hardware_files",),
            f"{' and '.join(hub_tokens)} have different client times per token ([hub] token), but a "
            "scenario has only one; set it in compute.hub_token",
        )
    return next(iter(hub_tokens.values()), None)


def _read(path: Path, key: tuple[str, int]) -> HardwareFile:
    from testbed.experiments.sources import read_toml

    try:
        return HardwareFile.model_validate(read_toml(path))
    except ScenarioError as error:
        raise KeyedError(key, str(error)) from None
    except ValidationError as error:
        wrong = explain(error)
        where = ".".join(str(part) for part in wrong.key)
        raise KeyedError(key, f"{path}: {where}: {wrong.what}") from None

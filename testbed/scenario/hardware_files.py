"""Hardware profiles from files of their own, as ``testbed calibrate`` writes them: ``hardware_files = [...]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from testbed.errors import ScenarioError
from testbed.scenario.fields import Name, Table
from testbed.scenario.problems import KeyedError, explain
from testbed.scenario.schema import HardwareTable


class HardwareFile(Table):
    """A file of ``[hardware.NAME]`` tables and nothing else."""

    hardware: dict[Name, HardwareTable] = Field(min_length=1)


def with_hardware_files(
    own: Mapping[str, HardwareTable], files: Sequence[tuple[str, Path]]
) -> dict[str, HardwareTable]:
    """The scenario's ``own`` tables and those of ``files``: (path, folder where a relative one starts).

    Raises ``KeyedError`` for a file that cannot be read or is wrong, and for a name that is defined twice.
    """
    tables = dict(own)
    origin = dict.fromkeys(own, "the scenario itself")
    for index, (file, folder) in enumerate(files):
        key = ("hardware_files", index)
        for name, table in _read(folder / file, key).items():
            if name in tables:
                raise KeyedError(
                    key,
                    f'{file} defines hardware "{name}", which is also in {origin[name]}; rename one of them, '
                    f'or change it in the scenario under a new name with base = "{name}"',
                )
            tables[name] = table
            origin[name] = file
    return tables


def _read(path: Path, key: tuple[str, int]) -> dict[str, HardwareTable]:
    from testbed.scenario.sources import read_toml

    try:
        return HardwareFile.model_validate(read_toml(path)).hardware
    except ScenarioError as error:
        raise KeyedError(key, str(error)) from None
    except ValidationError as error:
        wrong = explain(error)
        where = ".".join(str(part) for part in wrong.key)
        raise KeyedError(key, f"{path}: {where}: {wrong.what}") from None

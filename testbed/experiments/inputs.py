"""``inputs/`` in a folder of results: copies of all files from which the results can be computed again.

- ``inputs.json``: ``Inputs``
- ``files/``: the user's files and the code of their policies, with the folders between them as they were
- ``shipped/``: those that come with the testbed, to read: the installed ones are used
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from policies.registry import OBJECT
from testbed.experiments.experiment import Experiment
from testbed.experiments.filesread import FilesRead
from testbed.experiments.policy import FIXED
from testbed.rundir import HALF_WRITTEN, write_json

INPUTS, CALL, FILES, SHIPPED = "inputs", "inputs.json", "files", "shipped"
_OURS = {"policies", "netem", "nodes", "scenarios", "testbed"}


class Inputs(msgspec.Struct, frozen=True):
    """What results were computed from.

    - ``call``: the command with its options, as data; its paths start in ``folder``
    - ``folder``, ``path``: below ``files/``, the folder where the command ran, and those where modules are found
    - ``renamed``: absolute paths in the call and in the files, and where below ``files/`` they are now
    - ``shipped``: SHA-256 (hex) of the files that come with the testbed, by name
    - ``installed``: the same of the module of each policy that is part of an installed package
    """

    call: dict[str, Any]
    folder: str
    path: list[str]
    renamed: dict[str, str]
    shipped: dict[str, str]
    installed: dict[str, str]


def keep_inputs(out: Path, call: Mapping[str, Any], read: FilesRead) -> None:
    """Copy what was ``read`` into the folder ``out``, in the place of earlier inputs. Raises ``OSError``.

    Of a policy all modules are copied that it imports from its own folder or package.
    """
    temporary = out / f"{INPUTS}{HALF_WRITTEN}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _copy_inputs(temporary, call, read)
        shutil.rmtree(out / INPUTS, ignore_errors=True)
        temporary.rename(out / INPUTS)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_inputs(to: Path, call: Mapping[str, Any], read: FilesRead) -> None:
    """Copy what was ``read`` into the new folder ``to``. Raises ``OSError``."""
    ours = Path(str(resources.files("scenarios"))).absolute()
    files = {path: _whole(path) for path in read.files}
    of_ours = {path for path in files.values() if path.is_relative_to(ours)}
    shipped = {path for path in of_ours if path.is_file()}
    here = Path.cwd()
    kept, roots = set(files.values()) - of_ours, []
    installed: dict[str, str] = {}
    for policy in sorted(read.policies):
        if policy.startswith((FIXED, OBJECT)):
            continue
        module = policy.partition(":")[0]
        root, sources = sources_of(module)
        if root is None:
            installed.update((module, digest_of_file(path)) for path in sources)
        elif module.partition(".")[0] not in _OURS:
            kept |= sources
            roots.append(root)
    top = Path(os.path.commonpath([here, *roots, *(path.parent for path in kept)]))
    (to / FILES / here.relative_to(top)).mkdir(parents=True)
    for path in sorted(kept):
        copy_file(path, to / FILES / path.relative_to(top))
    for path in sorted(shipped):
        copy_file(path, to / SHIPPED / path.relative_to(ours))
    inputs = Inputs(
        dict(call),
        str(here.relative_to(top)),
        list(dict.fromkeys(str(root.relative_to(top)) for root in roots)),
        {str(path): str(files[path].relative_to(top)) for path in sorted(files) if path.is_absolute() and files[path] in kept},
        {str(path.relative_to(ours)): digest_of_file(path) for path in sorted(shipped)},
        installed,
    )  # fmt: skip
    write_json(to / CALL, msgspec.to_builtins(inputs))


def keep_policies(run_dir: Path, experiment: Experiment) -> None:
    """Copy the users' policies of a run into its folder; all else stands in its ``scenario.toml``. Raises ``OSError``."""
    read = FilesRead()
    for name in (experiment.policy.placement, experiment.policy.routing, experiment.policy.online or ""):
        if name.startswith(FIXED) and name.endswith(".json"):
            read.files.add(Path(name.removeprefix(FIXED)))
        elif ":" in name and not name.startswith((FIXED, OBJECT)):
            read.policies.add(name)
    if read.files or read.policies:
        halves = {"placement": experiment.policy.placement, "routing": experiment.policy.routing}
        keep_inputs(run_dir, {"command": "run", **halves}, read)


def read_inputs(folder: Path) -> Inputs | None:
    """Return the inputs that a folder of results keeps; None if it keeps none that can be read."""
    try:
        return msgspec.json.decode((folder / INPUTS / CALL).read_bytes(), type=Inputs)
    except (OSError, msgspec.MsgspecError):
        return None


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file's bytes. Raises ``OSError``."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sources_of(module: str) -> tuple[Path | None, set[Path]]:
    """Return where the file of ``module`` is found from (a folder of ``sys.path``), and all files of its program.

    These are the module and what it imports from the same place. Of an installed package there is no place, but only
    the module's file; of a module that is not found, or has no file, there are none.
    """
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None, set()
    origin = _whole(Path(spec.origin))
    is_package = origin.name == "__init__.py"
    root = origin.parents[module.count(".") + is_package]
    paths = sysconfig.get_paths()
    if any(root.is_relative_to(paths[name]) for name in ("stdlib", "purelib", "platlib")):
        return None, {origin}
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        for path in _files_of(root, waiting.pop()):
            if path not in found:
                found.add(path)
                waiting += _imported(root, path)
    return root, found


def _files_of(root: Path, module: str) -> Iterator[Path]:
    """Yield the file of a module below ``root``, if it has one there, after those of the packages around it."""
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        place = root.joinpath(*parts[:n])
        for path in (place.with_suffix(".py"), place / "__init__.py"):
            if path.is_file():
                yield path


def _imported(root: Path, path: Path) -> Iterable[str]:
    """Return the names of the modules that a file may import, also inside of functions."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return []
    package = path.relative_to(root).parent.parts
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*start, *([node.module] if node.module else [])])
            names += [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
    return [name for name in names if name and name.partition(".")[0] not in _OURS]


def _whole(path: Path) -> Path:
    """Return the absolute path without "..": links stay, so that names beside them go on to hold."""
    return Path(os.path.normpath(path.absolute()))


def copy_file(path: Path, to: Path) -> None:
    """Copy the bytes of a file, and make the folders around the copy; nothing if there is no file. Raises ``OSError``."""
    if path.is_file():
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)

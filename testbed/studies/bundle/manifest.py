"""``bundle.json``: what a bundle is of, and the SHA-256 of every file in it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from testbed.errors import UserError
from testbed.experiments.inputs import digest_of_file

BUNDLE, RESULT = "bundle.json", "result"
"""Files of a bundle: the manifest, and the folder of the results with its ``inputs/``."""


class Manifest(msgspec.Struct, frozen=True):
    """``kind``: run, sweep or score. ``made_with``: the code that made the bundle. ``files``: path -> SHA-256 (hex)."""

    kind: str
    made_with: str
    files: dict[str, str]


def digests_of(folder: Path) -> dict[str, str]:
    """Return the SHA-256 (hex) of all files of a bundle but the manifest, by their path in it.

    It is empty for what is neither a file nor a folder, and for links that lead to no file: no bundle is made with such.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {
        path.relative_to(folder).as_posix(): digest_of_file(path) if path.is_file() else ""
        for path in paths
        if path != folder / BUNDLE
    }


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a bundle whose files are all as it states. Raises ``UserError``."""
    path = folder / BUNDLE
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except OSError:
        if not folder.exists():
            raise UserError(f"there is no folder {folder}; name one that `testbed bundle` has made") from None
        raise UserError(
            f"{folder} is not a bundle: it has no {BUNDLE}; make one with `testbed bundle RESULTS {folder}`"
        ) from None
    except msgspec.MsgspecError as error:
        raise UserError(f"{path} is damaged ({error}); copy the bundle again") from None
    there = digests_of(folder)
    for name in sorted(manifest.files.keys() | there.keys()):
        expected, found = manifest.files.get(name), there.get(name)
        if expected != found:
            what = "is missing" if found is None else "was added" if expected is None else "was changed"
            raise UserError(
                f"{folder}: {name} {what} since the bundle was made; use a fresh copy of the bundle"
            )
    return manifest

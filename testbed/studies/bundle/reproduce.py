"""``testbed reproduce FOLDER``: checks a bundle, computes its results again, and states what is not the same."""

from __future__ import annotations

import logging
from importlib import resources
from pathlib import Path
from typing import Any

from testbed.errors import UserError
from testbed.experiments.inputs import Inputs, digest_of_file, read_inputs
from testbed.experiments.provenance import provenance, read_provenance, source_digest
from testbed.rundir import scratch
from testbed.studies.bundle.again import Again, call_in, moved, run_again, score_again, sweep_again, unpacked
from testbed.studies.bundle.command import RUN
from testbed.studies.bundle.differences import differences_of
from testbed.studies.bundle.manifest import RESULT, read_manifest
from testbed.studies.sweep.pool import n_workers

log = logging.getLogger(__name__)


def reproduce_bundle(folder: Path, jobs: int | None) -> tuple[dict[str, Any], str, int]:
    """Compute the results of the bundle ``folder`` again, on copies of its inputs, and compare them.

    Returns the object for ``--json``, the text, and the exit code: 0 if all is the same, else 1. This runs the code of the
    policies in the bundle. Raises ``UserError`` if it is no bundle, is damaged, or cannot be repeated.
    """
    n_workers(jobs)
    folder = folder.absolute()
    manifest = read_manifest(folder)
    result = folder / RESULT
    inputs = read_inputs(result)
    with scratch("study") as temporary:
        files, out = temporary / "inputs", temporary / "result"
        with unpacked(result, inputs, files):
            again = _again(manifest.kind, result, inputs, files, out, jobs)
            versions = _versions(result, inputs)

        def renamed(text: str) -> str:
            return text if inputs is None else moved(text, inputs, files, files / inputs.folder)

        how = again.tolerance_s, again.measured, renamed
        found = {name: differences_of(name, again.bundled, again.found, *how) for name in again.files}
        same = [name for name, texts in found.items() if not texts]
        is_exact = all(
            (again.bundled / name).read_bytes() == (again.found / name).read_bytes() for name in same
        )
    different = [text for texts in found.values() for text in texts]
    answer = {
        "bundle": str(folder),
        "kind": manifest.kind,
        "same": not different,
        "files": list(again.files),
        "differences": different,
        "versions": versions,
        "note": again.note,
    }
    lines = [again.note] if again.note else []
    if same:
        near = f"the same to {again.tolerance_s * 1e6:.1f} µs" if again.tolerance_s else "the same figures"
        which = "the same bytes" if is_exact else near
        lines.append(f"{which}: {', '.join(same)}")
    lines += different
    if different:
        lines += versions or [
            "no version differs, so it follows from something else, such as a clock or draws without a seed"
        ]
    return answer, "\n".join(lines), 1 if different else 0


def _again(kind: str, result: Path, inputs: Inputs | None, files: Path, out: Path, jobs: int | None) -> Again:
    if inputs is not None and inputs.path:
        log.warning("notice: the bundle runs the code of its policies")
    if kind == RUN:
        return run_again(result, {} if inputs is None else call_in(files, inputs), out)
    if inputs is None:
        raise UserError(
            f"{result.parent} holds no inputs that this version reads; compute the {kind} and bundle it again"
        )
    do = score_again if kind == "score" else sweep_again
    return do(result, call_in(files, inputs), out, jobs)


def _versions(result: Path, inputs: Inputs | None) -> list[str]:
    """Return which code and packages differ from those that the results were computed with, in sentences."""
    then, now = read_provenance(result), provenance()
    packages = then.get("packages") or {}
    pairs = [
        (name, packages.get(name), now["packages"].get(name)) for name in {**packages, **now["packages"]}
    ]
    pairs += [(key, then.get(key), now[key]) for key in ("code", "commit", "kernel")]
    shipped = {} if inputs is None else inputs.shipped
    own = Path(str(resources.files("scenarios")))
    for name, digest in shipped.items():
        here = digest_of_file(own / name) if (own / name).is_file() else None
        pairs.append((f"shipped file {name}, SHA-256", digest, here))
    for module, digest in ({} if inputs is None else inputs.installed).items():
        pairs.append((f"module {module}, SHA-256", digest, source_digest(f"{module}:") or None))
    return [f"{name}: {a or 'none'} then, {b or 'none'} here" for name, a, b in pairs if a != b]

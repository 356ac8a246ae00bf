"""``testbed bundle``: a folder of results with all that they were computed from, which can be moved anywhere."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from policies.registry import OBJECT
from testbed.codeversion import code_version
from testbed.errors import RunError, UserError
from testbed.experiments.inputs import INPUTS, read_inputs
from testbed.experiments.provenance import read_provenance
from testbed.experiments.sources import read_toml
from testbed.experiments.units import counted
from testbed.records.plan import PLAN
from testbed.rundir import (
    ENDPOINT,
    HALF_WRITTEN,
    HOSTS,
    NETWORK,
    OWNER,
    PAGE,
    STUDY,
    check_new_folder,
    half_written,
    not_a_run,
    write_json,
)
from testbed.studies.bundle.again import why_not_again
from testbed.studies.bundle.manifest import BUNDLE, RESULT, Manifest, digests_of
from testbed.studies.score.command import RUNS as SCORES
from testbed.studies.score.command import SCORE
from testbed.studies.sweep.table import RESULTS

RUN = "run"
_OF_A_PROCESS = (OWNER, NETWORK, HOSTS, PAGE, ENDPOINT, "logs")
"""What a run leaves of its processes: it is no result."""


def bundle_command(results: Path, out: Path) -> tuple[dict[str, Any], str]:
    """Copy the folder ``results`` of a run, a sweep or a score into the new bundle ``out``.

    Returns the object for ``--json`` and the text. Raises ``UserError`` if it cannot be computed again from what it holds,
    or if ``out`` is in use; ``RunError`` if ``out`` cannot be written, which leaves nothing.
    """
    kind = kind_of(results)
    _check(results, kind)
    check_new_folder(out, "OUT")
    if out.absolute().is_relative_to(results.absolute()):
        raise UserError(f"{out} is in {results}, which is to be copied; give another OUT")
    why_not = why_not_again(results) if kind == RUN else None
    temporary = half_written(out)
    try:
        shutil.copytree(results, temporary / RESULT, ignore=partial(_left_out, results))
        manifest = Manifest(kind, code_version(), digests_of(temporary))
        write_json(temporary / BUNDLE, msgspec.to_builtins(manifest))
        temporary.replace(out)
    except OSError as error:
        # Copying goes on after an error, and has them all at the end: (from, to, reason).
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error
        raise RunError(
            f"cannot write the bundle {out}: {reason}; make room, or choose another OUT"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    n_bytes = sum((out / name).stat().st_size for name in manifest.files)
    answer = {"out": str(out), "kind": kind, "n_files": len(manifest.files), "n_bytes": n_bytes}
    then = (
        f"`testbed reproduce {out}` computes it again"
        if why_not is None
        else f"it is not computed again: {why_not}"
    )
    text = f"{out}: a {kind} in {counted(len(manifest.files), 'files')}, {n_bytes / 1e6:.1f} MB; {then}"
    return answer, text


def kind_of(results: Path) -> str:
    """Return what a folder of results is of. Raises ``UserError``."""
    for name, kind in ((PLAN, RUN), (SCORE, "score"), (STUDY, "sweep")):
        if (results / name).is_file():
            return kind
    if (results / BUNDLE).is_file():
        raise UserError(
            f"{results} is a bundle already; copy it, or compute it again with `testbed reproduce`"
        )
    if (results / SCORES).is_file():
        raise UserError(f"{results} has no {SCORE} yet; bundle it when the score has ended")
    raise not_a_run(results, others=", or the folder of a sweep or a score")


def _check(results: Path, kind: str) -> None:
    last = {RUN: "summary.json", "sweep": RESULTS}.get(kind)
    if last is not None and not (results / last).is_file():
        raise UserError(f"{results} has no {last} yet; bundle it when the {kind} has ended")
    if kind == RUN and _has_objects(results):
        raise UserError(
            f"{results} was made by a program with policies that are its objects, which nothing can make again; name them as "
            "module:Class there"
        )
    needs_inputs = kind != RUN or read_provenance(results).get("policies")
    if needs_inputs and read_inputs(results) is None:
        raise UserError(
            f"{results} does not hold what it was computed from (inputs/): a program made it with objects, or an earlier "
            "version of the testbed; compute it again with `testbed`"
        )


def _has_objects(run: Path) -> bool:
    """Return whether policies of a run were objects of the program that made it."""
    policy = read_toml(run / "scenario.toml").get("policy", {})
    return any(str(name).startswith(OBJECT) for name in policy.values())


def _left_out(results: Path, folder: str, names: Iterable[str]) -> set[str]:
    """Return what is not copied of a folder in ``results``: what processes left, and links, which may lead anywhere.

    In ``inputs/`` files of the user's may be called as those of processes.
    """
    is_users = INPUTS in Path(folder).relative_to(results).parts
    return {
        name
        for name in names
        if (Path(folder) / name).is_symlink()
        or (not is_users and (name in _OF_A_PROCESS or name.endswith(HALF_WRITTEN)))
    }

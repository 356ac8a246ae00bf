"""The executors by the names that the command line has for them."""

from __future__ import annotations

from importlib.util import find_spec

from testbed.errors import UserError
from testbed.studies.sweep.pool import Executor, Local, n_workers

LOCAL, RAY = "local", "ray"
EXECUTORS = (LOCAL, RAY)
"""The names of ``--executor``."""


def executor_of(name: str, jobs: int | None, *, is_apart: bool = False) -> Executor:
    """Returns the executor of ``--executor name`` with ``jobs`` workers (None: one per CPU).

    ``is_apart``: no task may be done by this process. Raises ``UserError`` if there is none of that name.
    """
    if name not in EXECUTORS:
        raise UserError(f"--executor must be {' or '.join(EXECUTORS)}, not {name}")
    n_local = n_workers(jobs)
    if name == LOCAL:
        return Local(n_local, is_apart=is_apart)
    if find_spec("ray") is None:
        raise UserError(
            "--executor ray needs the package ray, which is not installed: pip install '.[ray]' in the "
            "checkout"
        )
    from testbed.studies.sweep.on_ray import OnRay

    return OnRay(jobs)

"""Scenario files: from TOML to a resolved ``Experiment``, and back.

- ``sources``: finds and reads files, applies ``--set``
- ``changes``: a change that a command makes, as data
- ``schema``: the form of a file (strict tables, units through ``units``)
- ``topologies``: the form of a topology file, the shipped ones, and the choice of nodes
- ``shared_links``: links that pairs share, such as a site's own; ``link_traces``, ``events``: links over time
- ``profiles``, ``network``, ``workload``, ``traces``, ``draws``, ``policy``: look names up and make choices
- ``catalogue``, ``roofline``: GPUs and models by name, and the block times that follow
- ``fault_tables``, ``faults``: faults, churn, recovery and membership
- ``resolve``: puts the ``Experiment`` together
- ``problems``: turns what is wrong into one sentence for the user
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from policies.problem import PolicyError
from testbed.errors import ScenarioError
from testbed.experiments.changes import Change, Override
from testbed.experiments.experiment import Experiment
from testbed.experiments.problems import KeyedError, explain
from testbed.experiments.resolve import resolve
from testbed.experiments.schema import Scenario
from testbed.experiments.sources import Target, code_in_file, override, put, read_source, shipped_documents

__all__ = ["Change", "Override", "Target", "changed", "dump_toml", "load_experiment", "shipped_scenarios"]


LoadUsersPolicy = Callable[[str, str, bool], object]
"""Called with kind and name of a policy that is not shipped, and whether only the file names it; returns it."""


def load_experiment(
    target: Target, overrides: Sequence[Override] = (), load_policy: LoadUsersPolicy | None = None
) -> Experiment:
    """Read, check and resolve a scenario: the file at a path, a shipped one by name, or tables.

    This runs no code of a user's policy; what its traits would decide, the document leaves open. What is to
    be run is loaded by ``testbed.control.placing.load_to_run``, whose ``load_policy`` runs that code.

    ``overrides`` are ``key.path=value`` options as given to ``--set``, and changes that a command makes. List
    entries are named by their index (``servers.0.count=3``). Values of options are TOML, or else plain text
    (``clients.site=Cluster1``).
    Raises ``ScenarioError`` with one sentence: file, key path, what is wrong; or why a policy cannot be loaded.
    """
    source = read_source(target)
    override(source, overrides)
    of_file = code_in_file(source)
    load = None if load_policy is None else lambda kind, name: load_policy(kind, name, name in of_file)
    try:
        scenario = Scenario.model_validate(source.document)
        return resolve(scenario, source.stem, source.folder_of, of_file, load)
    except ValidationError as error:
        raise source.error(explain(error)) from None
    except KeyedError as wrong:
        raise source.error(wrong) from None
    except PolicyError as error:
        raise ScenarioError(str(error)) from error


def changed(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """Return the experiment with other values, as TOML data by key path; ``None`` leaves a key out.

    Only what follows from the changed keys differs. Raises ``ScenarioError``.
    """
    assert experiment.tables is not None, "an explicit instance has no tables to change"
    document = experiment.tables.model_dump(by_alias=True, exclude_none=True)
    try:
        for key, value in changes.items():
            put(document, tuple(key.split(".")), value)
        scenario = Scenario.model_validate(document)
        again = resolve(scenario, experiment.name, lambda *_: Path(), experiment.policy.code_in_file)
    except ValidationError as error:
        raise _unusable(experiment, explain(error)) from None
    except KeyedError as wrong:
        raise _unusable(experiment, wrong) from None
    if again.workload.requests != experiment.workload.requests:
        return again
    # How requests were chosen is not in the tables, which list the chosen ones.
    return replace(again, workload=replace(again.workload, sample=experiment.workload.sample))


def _unusable(experiment: Experiment, wrong: KeyedError) -> ScenarioError:
    return ScenarioError(f"{experiment.name}: {'.'.join(map(str, wrong.key))}: {wrong.what}")


def dump_toml(experiment: Experiment) -> str:
    """Return the resolved scenario as TOML text; loading it gives an equal experiment."""
    header = "# A resolved scenario: every name has become numbers, which profiles no longer change.\n\n"
    return header + tomli_w.dumps(dict(experiment.document))


def shipped_scenarios() -> list[tuple[str, str]]:
    """Return (name, description) of every scenario that is installed with the tool."""
    return [(name, str(document.get("description", ""))) for name, document in shipped_documents()]

"""Scenario files: from TOML to a resolved ``Experiment``, and back.

- ``sources``: finds and reads files, applies ``--set``
- ``schema``: the form of a file (strict tables, units through ``units``)
- ``topologies``: the form of a topology file, the shipped ones, and the choice of nodes
- ``profiles``, ``network``, ``workload``, ``traces``, ``draws``, ``policy``: look names up and make choices
- ``catalogue``, ``roofline``: GPUs and models by name, and the block times that follow
- ``fault_tables``, ``faults``: faults, churn, recovery and membership
- ``resolve``: puts the ``Experiment`` together
- ``problems``: turns what is wrong into one sentence for the user
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import tomli_w
from pydantic import ValidationError

from policies.problem import PolicyError
from testbed.errors import ScenarioError
from testbed.scenario.experiment import Experiment
from testbed.scenario.problems import KeyedError, explain
from testbed.scenario.resolve import resolve
from testbed.scenario.schema import Scenario
from testbed.scenario.sources import code_in_file, override, read_source, shipped_documents

__all__ = ["dump_toml", "load_experiment", "shipped_scenarios"]


LoadUsersPolicy = Callable[[str, str, bool], object]
"""Called with kind and name of a policy that is not shipped, and whether only the file names it; returns it."""


def load_experiment(
    name_or_path: str, overrides: Sequence[str] = (), load_policy: LoadUsersPolicy | None = None
) -> Experiment:
    """Read, check and resolve a scenario: the file at a path, or a shipped one by name.

    This runs no code of a user's policy; what its traits would decide, the document leaves open. What is to
    be run is loaded by ``testbed.control.placing.load_to_run``, whose ``load_policy`` runs that code.

    ``overrides`` are ``key.path=value`` options as given to ``--set``. List entries are named by their index
    (``servers.0.count=3``). Values are TOML, or else plain text (``clients.site=Cluster1``).
    Raises ``ScenarioError`` with one sentence: file, key path, what is wrong; or why a policy cannot be loaded.
    """
    source = read_source(name_or_path)
    override(source, overrides)
    of_file = code_in_file(source)
    load = None if load_policy is None else lambda kind, name: load_policy(kind, name, name in of_file)
    try:
        scenario = Scenario.model_validate(source.document)
        experiment = resolve(scenario, source.stem, source.folder_of, load)
        return replace(experiment, policy=replace(experiment.policy, code_in_file=of_file))
    except ValidationError as error:
        raise source.error(explain(error)) from None
    except KeyedError as wrong:
        raise source.error(wrong) from None
    except PolicyError as error:
        raise ScenarioError(str(error)) from error


def dump_toml(experiment: Experiment) -> str:
    """Return the resolved scenario as TOML text; loading it gives an equal experiment."""
    header = "# A resolved scenario: every name has become numbers, which profiles no longer change.\n\n"
    return header + tomli_w.dumps(dict(experiment.document))


def shipped_scenarios() -> list[tuple[str, str]]:
    """Return (name, description) of every scenario that is installed with the tool."""
    return [(name, str(document.get("description", ""))) for name, document in shipped_documents()]

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

from collections.abc import Sequence
from dataclasses import replace

import tomli_w
from pydantic import ValidationError

from testbed.scenario.experiment import Experiment
from testbed.scenario.problems import KeyedError, explain
from testbed.scenario.resolve import resolve
from testbed.scenario.schema import Scenario
from testbed.scenario.sources import code_in_file, override, read_source, shipped_documents

__all__ = ["dump_toml", "load_experiment", "shipped_scenarios"]


def load_experiment(name_or_path: str, overrides: Sequence[str] = ()) -> Experiment:
    """Read, check and resolve a scenario: the file at a path, or a shipped one by name.

    ``overrides`` are ``key.path=value`` options as given to ``--set``. List entries are named by their index
    (``servers.0.count=3``). Values are TOML, or else plain text (``clients.site=Cluster1``).
    Raises ``ScenarioError`` with one sentence: file, key path, what is wrong.
    """
    source = read_source(name_or_path)
    override(source, overrides)
    try:
        scenario = Scenario.model_validate(source.document)
        experiment = resolve(scenario, source.stem, source.folder_of)
        return replace(experiment, policy=replace(experiment.policy, code_in_file=code_in_file(source)))
    except ValidationError as error:
        raise source.error(explain(error)) from None
    except KeyedError as wrong:
        raise source.error(wrong) from None


def dump_toml(experiment: Experiment) -> str:
    """Return the resolved scenario as TOML text; loading it gives an equal experiment."""
    header = "# A resolved scenario: every name has become numbers, which profiles no longer change.\n\n"
    return header + tomli_w.dumps(dict(experiment.document))


def shipped_scenarios() -> list[tuple[str, str]]:
    """Return (name, description) of every scenario that is installed with the tool."""
    return [(name, str(document.get("description", ""))) for name, document in shipped_documents()]

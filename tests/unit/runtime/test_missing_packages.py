"""What is refused where the packages for real blocks are not installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testbed.errors import UserError
from testbed.experiments.families import make_config
from testbed.studies.fitted import fitted


def test_a_checkpoint_without_a_scenario_needs_packages_for_the_option_that_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config("llama", 30, 16, 2, 300)))
    monkeypatch.setattr("testbed.runtime.blocks.blocks_missing", lambda: "torch")
    with pytest.raises(UserError, match=r"^--model without a scenario needs packages .*\(torch\)"):
        fitted(str(tmp_path), None, [])

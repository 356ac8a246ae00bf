"""``network.wire``: hidden states that are narrower on the links than where they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.problem import wire_bytes
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.simulator.cases import Case
from testbed.simulator.engine import simulate
from testbed.simulator.hops import hop_table
from tests.unit.simulator.test_engines_agree import ASYMMETRIC, both, check_times


@pytest.mark.parametrize(
    ("wire", "n_bytes"), [(None, 16384), ("fp16", 8192), ("int8", 4100)], ids=["computed", "fp16", "int8"]
)
def test_a_hidden_state_takes_as_many_bytes_everywhere(
    wire: str | None, n_bytes: int, tmp_path: Path
) -> None:
    """Those of 4,096 values of four bytes, in the stub, the fast engine and what policies expect."""
    options = "model.value_bytes=4", *(() if wire is None else (f"network.wire={wire}",))
    fast, virtual = both(ASYMMETRIC, *options, folder=tmp_path)
    check_times(fast, virtual, 3e-3)
    problem = fast.case.experiment.problem
    assert wire_bytes(4096, 4, wire) == problem.model.token_bytes == n_bytes  # type: ignore[arg-type]
    assert problem.model.state_bytes == 16384
    table = hop_table(fast)
    assert set(table.up_bytes) == {n_bytes, 10 * n_bytes}
    base = load_experiment(str(tmp_path / "drawn.toml"), ["model.value_bytes=4"]).problem
    assert (problem.token_rtt_s[0][1] < base.token_rtt_s[0][1]) == (wire is not None)


def test_a_hidden_state_that_cannot_hold_the_stubs_value_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model.hidden_size: is 3, .* 7 bytes on the wire, .* need 8"):
        both(ASYMMETRIC, "model.hidden_size=3", "network.wire=int8", folder=tmp_path)


def test_narrower_hidden_states_are_faster_where_links_are_slow(tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text(ASYMMETRIC)
    wires = (), ("network.wire=int8",)
    times = [simulate(Case(load_experiment(str(path), each)), "testbed").rows[0].times for each in wires]
    assert times[1].tpot_s < times[0].tpot_s  # type: ignore[operator]

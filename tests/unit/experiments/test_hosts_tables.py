"""``[[hosts]]``: which tables of machines are refused."""

from __future__ import annotations

import pytest

from testbed.errors import ScenarioError
from testbed.experiments import load_experiment


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ('name="rome"', "hosts.1.name: 'rome' is also the name of another machine; change one of them"),
        ('name="this-machine"', "hosts.1.name: 'this-machine' is also the name of another machine"),
        ('address="10.0.0.1"', "hosts.1.address: 10.0.0.1 is also the address of another machine"),
    ],
)
def test_a_name_or_an_address_that_another_machine_has_is_refused(second: str, said: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        load_experiment("clustered", [f'hosts=[{{name="rome",address="10.0.0.1"}},{{{second}}}]'])
    assert said in str(refused.value)

"""Which clock and network a run uses, and which settings contradict each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from netem.networks import NETWORKS, Network
from testbed.errors import UserError
from testbed.experiments import load_experiment
from testbed.experiments.experiment import ComputePart
from testbed.runtime.stage import choose_stage


@pytest.fixture(autouse=True)
def _fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Network, "missing", lambda network: None)


@pytest.mark.parametrize(
    ("settings", "clock", "network", "why"),
    [
        ([], "virtual", "fabric", "nothing here needs real time"),
        (["network.backend=memory"], "virtual", "memory", "nothing here needs real time"),
        (["clock=virtual"], "virtual", "fabric", "asked for"),
        (["network.loss=0.01"], "virtual", "memory", "nothing here needs real time"),
        (
            ["network.loss=0.01", "network.backend=fabric"],
            "virtual",
            "fabric",
            "nothing here needs real time",
        ),
        (["network.loss=0.01", "clock=real"], "real", "auto", "asked for"),
        (["clock=real"], "real", "auto", "asked for"),
        (["time_scale=20"], "real", "auto", "a time scale of 20 needs real time"),
        (["network.backend=loopback"], "real", "loopback", "the loopback network needs real time"),
        (["network.backend=netem"], "real", "netem", "the netem network needs real time"),
        (["hosts=ray"], "real", "fabric", "several machines run in real time"),
        (["hosts=ray", "network.backend=hosts"], "real", "hosts", "several machines run in real time"),
    ],
)
def test_the_clock_is_virtual_unless_something_needs_real_time(
    settings: list[str], clock: str, network: str, why: str
) -> None:
    chosen = choose_stage(load_experiment("clustered", settings))
    assert (chosen.clock, chosen.wanted, chosen.why) == (clock, network, why)


@pytest.mark.parametrize(
    ("event", "network"),
    [('{at="5 s",link=[0,1],loss=0.1}', "memory"), ('{at="5 s",link=[0,1],down=true}', "fabric")],
)
def test_virtual_time_takes_memory_where_some_link_loses_packets_at_some_time(
    event: str, network: str
) -> None:
    names = load_experiment("clustered").network.links
    source, target = next(iter(names))
    event = event.replace("[0,1]", f'["{source}","{target}"]')
    chosen = choose_stage(load_experiment("clustered", [f"network.event=[{event}]"]))
    assert chosen.wanted == network
    assert ("it alone halves TCP's windows" in (chosen.network_why or "")) == (network == "memory")


def test_a_run_that_stays_up_for_its_users_is_in_real_time() -> None:
    assert choose_stage(load_experiment("clustered"), holds=True).clock == "real"


def test_real_blocks_compute_in_real_time() -> None:
    experiment = replace(load_experiment("clustered"), compute=ComputePart("blocks"))
    assert choose_stage(experiment).why == "real blocks compute in real time"


def test_virtual_time_takes_memory_where_fabric_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Network, "missing", lambda network: "no TUN here: modprobe tun" if network.has_namespaces else None
    )
    chosen = choose_stage(load_experiment("clustered"))
    assert chosen.network is NETWORKS["memory"]
    assert (
        chosen.network_why == "all nodes in one process; no fabric because no TUN here, see `testbed doctor`"
    )


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (
            ["hosts=ray", "clock=virtual"],
            "the clock cannot be virtual, since several machines run in real time",
        ),
        (
            ["hosts=ray", "network.backend=netem"],
            "the netem network works on one machine only; with several use fabric",
        ),
        (
            ["hosts=ray", "network.backend=hosts", "time_scale=2"],
            "the real one between the machines and cannot have a time scale other than 1",
        ),
        (
            ["clock=virtual", "time_scale=2"],
            "the clock cannot be virtual, since a time scale of 2 needs real time",
        ),
        (
            ["clock=virtual", "network.backend=loopback"],
            "the clock cannot be virtual, since the loopback network needs real time",
        ),
        (["clock=real", "network.backend=memory"], "the memory network has only virtual time"),
        (["time_scale=2", "network.backend=memory"], "has only virtual time, but a time scale"),
    ],
)
def test_clock_and_network_that_contradict_each_other_are_one_sentence(
    settings: list[str], what: str
) -> None:
    with pytest.raises(UserError) as caught:
        choose_stage(load_experiment("clustered", settings))
    assert what in str(caught.value) and "\n" not in str(caught.value)

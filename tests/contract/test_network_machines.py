"""``fabric`` over two and three machines: the network contract across the underlay, and what can go wrong with it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest

from netem.fabric import FabricBackend
from netem.probe import become_network_admin
from netem.spec import NetworkError, NetworkSpec
from policies.links import Link
from tests.contract.test_network_contract import nothing_is_left_in_the_hosts_own_network
from tests.support.children import best_s, in_child
from tests.support.machines import Links, Machines, as_list
from tests.support.runs import wait_until

__all__ = ["nothing_is_left_in_the_hosts_own_network"]  # a fixture

NODES = ("hub", "near", "far", "beside")
NEAR, FAR = Link(0.005, 100e6), Link(0.020, 1e9)
TWO = {"hub": "m0", "near": "m1", "far": "m1", "beside": "m0"}
THREE = {"hub": "m0", "near": "m1", "far": "m2", "beside": "m0"}


def both_ways(node: str, profile: Link) -> dict[tuple[str, str], Link]:
    return {("hub", node): profile, (node, "hub"): profile}


LINKS: Links = both_ways("near", NEAR) | both_ways("far", FAR) | both_ways("beside", NEAR)


@pytest.fixture(autouse=True)
def needs_fabric() -> None:
    missing = FabricBackend.missing()
    if missing is not None:
        if "fabric" in os.environ.get("TESTBED_REQUIRE", "").split(","):
            pytest.fail(f"the fabric network must work here, but: {missing}")
        pytest.skip(f"network fabric: {missing}")


def over(
    places: dict[str, str],
    work: Callable[[Machines], Any],
    links: Links = LINKS,
    missing: tuple[str, ...] = (),
) -> Any:
    """Return what ``work`` returns, with the machines up and an echo server in every node but the hub."""

    def whole() -> Any:
        become_network_admin()
        machines = Machines(NetworkSpec("machines", NODES, links, machines=places), missing)
        try:
            if not missing:
                for node in NODES[1:]:
                    machines[places[node]].ask("serve", node)
            return work(machines)
        finally:
            machines.kill()

    return in_child(whole)


def asked_s(node: str, n_bytes: int) -> float:
    """Return the RTT of an echo that follows from the links alone."""
    return sum(
        LINKS[pair].delay_s + LINKS[pair].transmission_s(n_bytes) for pair in (("hub", node), (node, "hub"))
    )


@pytest.mark.parametrize("places", [TWO, THREE], ids=["two", "three"])
def test_round_trips_and_rates_are_those_of_the_links_as_on_one_machine(places: dict[str, str]) -> None:
    def slow_s(node: str) -> float:
        """Slow start would add as much to a prompt."""
        return asked_s(node, 573_440) + 2 * LINKS["hub", node].delay_s

    def work(machines: Machines) -> dict[str, list[float]]:
        machines.check()

        def echoes_s(node: str, n_bytes: int, n: int) -> float:
            return min(machines["m0"].ask("within", "hub", "echo", node, n_bytes, n))

        return {
            node: [
                echoes_s(node, 28_672, 10),
                best_s(functools.partial(echoes_s, node, 573_440, 3), slow_s(node)),
            ]
            for node in NODES[1:]
        }

    times = over(places, work)
    for node in NODES[1:]:
        token_s, prompt_s = times[node]
        assert token_s > asked_s(node, 28_672) - 0.001
        assert asked_s(node, 573_440) - 0.001 < prompt_s < slow_s(node)


def test_the_other_machines_clocks_are_known_within_the_stated_bound() -> None:
    def work(machines: Machines) -> list[Any]:
        machines.check()
        ahead = {name: machines[name].ask("ahead") for name in ("m0", "m1", "m2")}
        seen = machines["m1"].ask("underlay")
        return [
            (abs(seen[name]["offset_s"] - (ahead[name] - ahead["m1"])), seen[name]["uncertainty_s"])
            for name in ("m0", "m2")
        ]

    for error_s, uncertainty_s in over(THREE, work):
        assert error_s <= uncertainty_s < 1


def test_what_the_underlay_loses_is_counted_and_tcp_repairs_it() -> None:
    def work(machines: Machines) -> list[Any]:
        machines.check()
        machines["m1"].ask("lose", 0.05)

        def echoed_with_loss() -> Any:
            machines["m0"].ask("within", "hub", "echo", "far", 100_000, 10)  # compares what comes back
            seen = machines["m1"].ask("underlay")["m0"]
            return seen["lost"] and seen

        # Losses are random: ten echoes of some 90 datagrams lose none once in a hundred times.
        seen = wait_until(echoed_with_loss, "a lost datagram")
        return [seen["lost"], machines["m0"].ask("underlay")["m1"]["lost"]]

    lost, lost_there = over(TWO, work)
    assert lost > 0
    assert lost_there == 0


@pytest.mark.parametrize("narrow", ["m0", "m1"])
def test_an_underlay_that_drops_long_packets_is_refused_and_named(narrow: str) -> None:
    """Every long message would be lost, and with it the run, which waits."""

    def work(machines: Machines) -> Any:
        machines[narrow].ask("narrow", 1300)
        with pytest.raises(NetworkError) as refused:
            machines["m0"].ask("check", None, 3.0)
        return str(refused.value)

    assert over(TWO, work).startswith(
        "short packets get from m0 to machine m1 and back, but none as long as "
    )


def test_an_underlay_that_was_cut_is_used_again() -> None:
    def work(machines: Machines) -> list[Any]:
        machines.check()
        machines["m1"].ask("lose", 1.0)
        during = machines["m0"].ask("within", "hub", "reaches", "near", 1.0)
        machines["m1"].ask("lose", 0.0)
        machines["m0"].ask("within", "hub", "echo", "near", 28_672, 3)
        return [during, machines["m1"].ask("underlay")["m0"]["n_forgotten"]]

    assert over(TWO, work) == [False, 0]


def test_a_killed_machine_takes_nobody_with_it() -> None:
    def work(machines: Machines) -> list[Any]:
        machines.check()
        assert machines["m0"].ask("within", "hub", "reaches", "near", 5.0)
        heard_at_s = machines["m0"].ask("underlay")["m1"]["heard_at_s"]
        machines["m1"].kill()
        reached = machines["m0"].ask("within", "hub", "reaches", "near", 1.0)
        took_s = min(machines["m0"].ask("within", "hub", "echo", "far", 28_672, 5))
        later = machines["m0"].ask("underlay")
        machines["m0"].ask("update", as_list(both_ways("near", FAR)))  # half of it is for the dead one
        return [
            reached,
            took_s,
            later["m1"]["heard_at_s"] - heard_at_s,
            later["m2"]["heard_at_s"] - heard_at_s,
        ]

    reached, took_s, heard_dead_s, heard_s = over(THREE, work)
    assert not reached
    assert took_s > asked_s("far", 28_672) - 0.001
    assert heard_s > heard_dead_s


def test_changes_reach_the_forwarder_of_the_sender_and_only_that() -> None:
    longer = Link(0.1, 100e6)

    def work(machines: Machines) -> list[float]:
        machines.check()
        times = []
        for names in (("m0",), ("m1",)):
            for name in names:
                machines[name].ask("update", as_list(both_ways("near", longer)))
            times.append(min(machines["m0"].ask("within", "hub", "echo", "near", 1, 3)))
        with pytest.raises(NetworkError, match="no link from near to far"):
            machines["m1"].ask("update", as_list({("near", "far"): longer}))
        return times

    one_way_s, both_s = over(TWO, work)
    assert 0.105 - 0.001 < one_way_s < 0.2
    assert both_s > 0.2 - 0.001


def test_a_link_that_is_shorter_than_the_underlay_is_refused_and_named() -> None:
    def work(machines: Machines) -> str:
        machines.check()
        with pytest.raises(NetworkError) as refused:
            machines["m0"].ask("check", as_list({("hub", "near"): Link(1e-6, 1e9), ("hub", "far"): FAR}))
        machines["m1"].ask("check", as_list({("hub", "near"): Link(1e-6, 1e9)}))  # not its own
        return str(refused.value)

    sentence = over(TWO, work)
    assert sentence.startswith(
        "the link from hub to near has a delay of 0.001 ms, but packets from machine m0 to m1 take "
    )
    assert (
        "put both nodes on one machine, give the link a longer delay, or use a smaller time_scale" in sentence
    )


def test_a_machine_whose_forwarder_does_not_run_is_named() -> None:
    def work(machines: Machines) -> str:
        with pytest.raises(NetworkError) as refused:
            machines["m0"].ask("check", None, 0.5)
        return str(refused.value)

    assert "the forwarder of machine m1 does not answer" in over(TWO, work, missing=("m1",))


def test_closing_leaves_no_device_and_no_descriptor() -> None:
    def work(machines: Machines) -> list[Any]:
        machines.check()
        return [machines[name].ask("close") for name in ("m0", "m1")]

    for n_descriptors, devices in over(TWO, work):
        assert (n_descriptors, devices) == (0, [])

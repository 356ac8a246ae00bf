"""Which network ``auto`` chooses, where nothing is probed; and what the registry states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from netem.networks import NETWORKS, Network, choose, instead, one_of
from netem.spec import NetworkError, NetworkUnavailable


def _only_works(monkeypatch: pytest.MonkeyPatch, *working: str) -> None:
    def missing(network: Network) -> str | None:
        return None if network.name in working else f"no {network.name}: get it"

    monkeypatch.setattr(Network, "missing", missing)


def test_auto_takes_the_most_faithful_network_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_works(monkeypatch, "netem", "fabric", "loopback")
    assert choose("auto") == (NETWORKS["netem"], "the most faithful one works here")


def test_auto_takes_fabric_where_pairs_share_links_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_works(monkeypatch, "netem", "fabric", "loopback")
    chosen, why = choose("auto", sharing=True)
    assert chosen is NETWORKS["fabric"]
    assert why == "pairs share links, which it alone emulates"


def test_auto_takes_another_network_where_none_that_shares_links_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _only_works(monkeypatch, "loopback")
    chosen, why = choose("auto", sharing=True)
    assert chosen is NETWORKS["loopback"]
    assert "no fabric because no fabric, see `testbed doctor`" in why


def test_a_network_that_is_asked_for_is_taken_also_if_it_shares_no_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _only_works(monkeypatch, "netem")
    assert choose("netem", sharing=True) == (NETWORKS["netem"], "asked for")


def test_auto_takes_fabric_for_several_machines_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_works(monkeypatch, "netem", "fabric", "loopback")
    why = "nodes are on several machines, which it alone joins"
    assert choose("auto", joining=True) == (NETWORKS["fabric"], why)
    _only_works(monkeypatch, "netem", "loopback")
    with pytest.raises(NetworkUnavailable, match="no fabric because no fabric"):
        choose("auto", joining=True)


def test_auto_takes_fabric_in_virtual_time_and_else_what_needs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _only_works(monkeypatch, "netem", "fabric", "memory", "loopback")
    assert choose("auto", "virtual") == (NETWORKS["fabric"], "processes and the kernel's TCP")
    _only_works(monkeypatch, "netem", "memory", "loopback")
    why = "all nodes in one process; no fabric because no fabric, see `testbed doctor`"
    assert choose("auto", "virtual") == (NETWORKS["memory"], why)


def test_auto_never_takes_the_real_network_between_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_works(monkeypatch, "hosts")
    with pytest.raises(NetworkUnavailable, match="no fabric because no fabric"):
        choose("auto", joining=True)


def test_an_unknown_network_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(NetworkError, match="use one of auto, netem, fabric, memory, loopback, hosts"):
        choose("fabrik")
    assert instead(network for network in NETWORKS.values() if network.has_namespaces) == "fabric or netem"
    assert one_of(NETWORKS.values()) == "netem, fabric, memory, loopback or hosts"


@pytest.mark.parametrize("network", NETWORKS.values(), ids=lambda network: str(network.name))
def test_a_network_is_the_class_that_its_entry_names(network: Network) -> None:
    assert network.load().network is network
    if network.nodes_are_processes:
        assert network.backend() is network.load()
    else:
        with pytest.raises(NetworkError, match=f"the {network.name} network has all nodes in one process"):
            network.backend()


def test_a_network_with_namespaces_needs_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    lacking = {name for name, network in NETWORKS.items() if network.missing() is not None}
    assert lacking == {"netem", "fabric"}


def test_the_documentation_lists_the_networks_and_what_auto_tries() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/networks.md").read_text(encoding="utf-8")
    emulated = [network for network in NETWORKS.values() if network.emulates]
    table = next(line for line in text.splitlines() if line.startswith("| | "))
    columns = [name for name in dict.fromkeys(re.findall(r"`(\w+)`", table)) if name in NETWORKS]
    assert columns == [network.name for network in emulated]
    flat = " ".join(text.split())
    virtual, real = ([f"`{n.name}`" for n in emulated if clock in n.clocks] for clock in ("virtual", "real"))
    assert f"In virtual time it tries {', then '.join(virtual)}." in flat
    assert f"In real time it tries {', '.join(real)}." in flat

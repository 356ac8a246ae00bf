"""Which backend ``auto`` chooses, with the test's own backends: nothing is probed."""

from __future__ import annotations

import pytest

from netem import choose
from netem.fabric import FabricBackend
from netem.kernel import NetemBackend
from netem.loopback import LoopbackBackend
from netem.spec import NetworkUnavailable


def _only_works(monkeypatch: pytest.MonkeyPatch, *working: str) -> None:
    for backend in choose.BACKENDS:
        missing = None if backend.name in working else f"no {backend.name}: get it"
        monkeypatch.setattr(backend, "missing", lambda missing=missing: missing)


def test_auto_takes_the_most_faithful_network_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_works(monkeypatch, "netem", "fabric", "loopback")
    assert choose.choose_backend("auto") == (NetemBackend, "the most faithful one works here")


def test_auto_takes_fabric_where_pairs_share_links_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_works(monkeypatch, "netem", "fabric", "loopback")
    chosen, why = choose.choose_backend("auto", sharing=True)
    assert chosen is FabricBackend
    assert why == "pairs share links, which it alone emulates"


def test_auto_takes_another_network_where_none_that_shares_links_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _only_works(monkeypatch, "loopback")
    chosen, why = choose.choose_backend("auto", sharing=True)
    assert chosen is LoopbackBackend
    assert "no fabric because no fabric, see `testbed doctor`" in why


def test_a_network_that_is_asked_for_is_taken_also_if_it_shares_no_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _only_works(monkeypatch, "netem")
    assert choose.choose_backend("netem", sharing=True) == (NetemBackend, "asked for")


def test_auto_takes_fabric_for_several_machines_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _only_works(monkeypatch, "netem", "fabric", "loopback")
    why = "nodes are on several machines, which it alone joins"
    assert choose.choose_backend("auto", joining=True) == (FabricBackend, why)
    _only_works(monkeypatch, "netem", "loopback")
    with pytest.raises(NetworkUnavailable, match="no fabric because no fabric"):
        choose.choose_backend("auto", joining=True)

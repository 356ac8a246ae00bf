"""Whether links may be shorter than the way between their machines: ``FabricBackend.check``."""

from __future__ import annotations

import pytest

from netem import fabric
from netem.fabric import EARLY_S, FabricBackend
from netem.forwarder_stats import MachineStats
from netem.forwarder_underlay import SETTLED_SAMPLES
from netem.spec import NetworkError, NetworkSpec
from policies.links import Link

DELAY_S = 0.005
SPEC = NetworkSpec(
    "check",
    ("hub", "far"),
    {("hub", "far"): Link(DELAY_S, 1e9), ("far", "hub"): Link(DELAY_S, 1e9)},
    machines={"hub": "m0", "far": "m1"},
)
QUIET = MachineStats(rtt_s=0.002, rtt_min_s=0.001, n_samples=SETTLED_SAMPLES)
BUSY = MachineStats(rtt_s=0.100, rtt_min_s=0.001, n_samples=SETTLED_SAMPLES)
FAR = MachineStats(rtt_s=0.100, rtt_min_s=2 * DELAY_S, n_samples=SETTLED_SAMPLES)


class Seeing(FabricBackend):
    """The part on m0, which sees m1 as ``looks`` have it; it has looked ``n_looks`` times."""

    def __init__(self, *looks: MachineStats) -> None:
        super().__init__(SPEC)
        self._looks, self.n_looks = looks, 0

    def underlay(self) -> dict[str, MachineStats]:
        look = self._looks[min(self.n_looks, len(self._looks) - 1)]
        self.n_looks += 1
        return {"m1": look}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "_LOOK_S", 0.0)


def checked(backend: Seeing, patience_s: float) -> dict[str, MachineStats]:
    backend.bind("m0", "127.0.0.1")
    try:
        return backend.check(patience_s=patience_s)
    finally:
        backend.close()


def test_a_machine_that_is_busy_for_a_moment_is_looked_at_again() -> None:
    backend = Seeing(MachineStats(n_samples=SETTLED_SAMPLES - 1), BUSY, BUSY, QUIET)
    assert checked(backend, 60.0) == {"m1": QUIET}
    assert backend.n_looks == 4


def test_a_machine_that_stays_busy_is_refused_in_the_end() -> None:
    with pytest.raises(
        NetworkError, match=r"from hub to far has a delay of 5 ms, but packets .* take 50\.1 ms"
    ):
        checked(Seeing(BUSY), 0.01)


def test_a_machine_that_was_never_near_enough_is_refused_at_once() -> None:
    backend = Seeing(FAR)
    assert FAR.rtt_min_s / 2 + EARLY_S > DELAY_S
    with pytest.raises(NetworkError, match="from hub to far"):
        checked(backend, 60.0)
    assert backend.n_looks == 1

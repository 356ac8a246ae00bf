"""A bounded share of ``python -m benchmarks fuzz``: hostile input crashes nothing, leaves nothing, touches nobody else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.stress.fuzz import TARGETS, descriptors, play
from tests.stress.hostile_files import CHANGES, FORMATS, FilesTarget, nets
from tests.support.effort import n_drawn
from tests.support.forked import asking

CASES = {
    "codec": 500,
    "files": 500,
    "server": 100,
    "control": 100,
    "packets": 170,
    "endpoint": 50,
    "serve": 5,
}
CASES = {target: n_drawn(n) for target, n in CASES.items()}
SEED = 20_261_121


class FourFilesTarget(FilesTarget):
    """The readers of files; each case is four files of one network, since drawing a network takes longer than reading it."""

    cases = st.tuples(
        nets(), st.lists(st.tuples(st.sampled_from(sorted(FORMATS)), CHANGES), min_size=4, max_size=4)
    )

    def check(self, case: Any) -> None:
        net, files = case
        for kind, changes in files:
            super().check((net, kind, changes))


@pytest.fixture
def quiet() -> Iterator[None]:
    """Servers log every connection that they close."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_is_refused_or_answered_and_nothing_of_it_is_left(name: str, quiet: None) -> None:
    asking()  # the process that forks commands stays
    before = descriptors()
    target = FourFilesTarget() if name == "files" else TARGETS[name]()
    try:
        play(target, n_drawn(20), SEED, shrink=name != "serve")
        n_left, n_open = target.n_left(), descriptors()
        play(target, CASES[name], SEED + 1, shrink=name != "serve")  # a failure of it waits for 20 s
        assert target.n_left() <= n_left
        assert descriptors() <= n_open
    finally:
        target.close()
    assert descriptors() <= before + 1, "an event loop's last socket may still be closing"
    assert sum(target.counts.values()) >= CASES[name] // 4, "cases must reach what they are meant for"

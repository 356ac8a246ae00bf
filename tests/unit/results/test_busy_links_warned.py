"""Links that were busy for most of the time are warned of, in one line."""

from __future__ import annotations

from testbed.records.links import busy_text
from testbed.records.summary import LinkRow, LinkWait


def link(source: str, target: str, use_ratio: float) -> LinkRow:
    return LinkRow(from_=source, to=target, use_ratio=use_ratio, wait_s=LinkWait(mean=1.25, p99=9.0))


def test_the_busiest_link_is_named_with_its_use_and_what_to_do() -> None:
    assert busy_text([link("a", "b", 0.7), link("b", "a", 0.1)]) == []
    (line,) = busy_text([link("a", "b", 0.71)])
    assert line.startswith(
        "the link a to b was busy 71% of the time: messages waited 1.25 s (mean); raise its rate"
    )
    (line,) = busy_text([link("a", "b", 0.8), link("home up", "", 1.0001), link("c", "a", 0.2)])
    assert line.startswith("the link home up was busy 100% of the time (and 1 more above 70%): ")

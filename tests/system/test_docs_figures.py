"""Outputs that documents state are those of the commands that they name."""

from __future__ import annotations

import pytest

from tests.support.docs_figures import ROOT, Stated, missing_lines, output_of, pages, stated

BLOCKS = [block for page in pages() for block in stated(page)]
QUICK = [block for block in BLOCKS if block.command is not None and not block.is_slow]
NO_OUTPUT = {
    ("docs/networks.md", ",Paris,Tokyo"),
    ("docs/networks.md", "time,rate,rtt,loss"),
    ("docs/gpu.md", "machine: ok"),
}
"""Plain blocks that are files, or the output of a machine with a GPU, by their beginnings."""


def where(block: Stated) -> str:
    return f"{block.page.relative_to(ROOT)}:{block.line}"


def test_every_plain_block_is_commands_or_names_the_command_that_printed_it() -> None:
    nameless = [
        where(block)
        for block in BLOCKS
        if block.kind == ""
        and block.command is None
        and not block.is_commands
        and not any(
            str(block.page.relative_to(ROOT)) == page and block.block.startswith(begin)
            for page, begin in NO_OUTPUT
        )
    ]
    assert nameless == []


@pytest.mark.parametrize("block", QUICK, ids=where)
def test_a_stated_output_is_the_commands(block: Stated) -> None:
    output = output_of(block.command or "")
    assert missing_lines(block.block, output) == [], output


def test_a_figure_that_the_command_does_not_print_is_found() -> None:
    printed = "mean 0.517   0.455\nstarted in 3.2 s; 20 decisions, and\n   a wrapped line\n"
    assert (
        missing_lines("mean 0.517 0.455\nstarted in 0.6 s; 20 decisions, and a\nwrapped line\n", printed)
        == []
    )
    assert missing_lines("mean 0.518 0.455\n", printed) == ["mean 0.518 0.455"]
    assert missing_lines("started in 0.6 s; 21 decisions\n", printed) == ["started in 0.6 s; 21 decisions"]


def test_a_run_by_hand_states_its_date_and_tree() -> None:
    assert [where(b) for b in BLOCKS if b.is_slow], "the slow ones are marked"

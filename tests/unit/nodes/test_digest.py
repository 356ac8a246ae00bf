from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from nodes.digest import DIGEST_BYTES, apply_blocks, apply_to_rows, embed, read_rows, token_of, write_rows

VALUES = st.builds(embed, st.integers(0, 250_879), st.integers(0, 100_000))
HISTORIES = st.lists(VALUES, min_size=1, max_size=8)
N_BLOCKS = 7


def outputs(values: list[int], cuts: list[int], n_blocks: int = N_BLOCKS) -> list[int]:
    """Returns a session's values after a chain that is cut before the blocks ``cuts``."""
    edges = [0, *cuts, n_blocks]
    caches = [[0] * (last - first) for first, last in pairwise(edges)]
    answers = []
    for value in values:
        for first, cache in zip(edges, caches, strict=False):
            value = apply_blocks(value, first, cache)
        answers.append(value)
    return answers


@given(HISTORIES, st.sets(st.integers(1, N_BLOCKS - 1)))
def test_any_split_of_the_blocks_gives_the_values_of_the_whole(values: list[int], cuts: set[int]) -> None:
    assert outputs(values, sorted(cuts)) == outputs(values, [])


@given(HISTORIES, st.integers(1, N_BLOCKS - 1))
def test_blocks_in_another_order_give_another_value(values: list[int], cut: int) -> None:
    low, high = [0] * cut, [0] * (N_BLOCKS - cut)
    swapped = [apply_blocks(apply_blocks(value, cut, high), 0, low) for value in values]
    assert swapped[-1] != outputs(values, [])[-1]


@given(HISTORIES, st.integers(0, N_BLOCKS - 1))
def test_a_block_that_is_skipped_changes_the_value(values: list[int], skipped: int) -> None:
    low, high = [0] * skipped, [0] * (N_BLOCKS - skipped - 1)
    without = [apply_blocks(apply_blocks(value, 0, low), skipped + 1, high) for value in values]
    assert without[-1] != outputs(values, [])[-1]


@given(st.lists(VALUES, min_size=2, max_size=8, unique=True))
def test_the_history_of_the_session_matters(values: list[int]) -> None:
    assert outputs(values, [])[-1] != outputs(values[-1:], [])[-1]


@given(st.lists(VALUES, min_size=3, max_size=8, unique=True))
def test_the_order_of_the_history_matters(values: list[int]) -> None:
    swapped = [values[1], values[0], *values[2:]]
    assert outputs(values, [])[-1] != outputs(swapped, [])[-1]


@given(HISTORIES, HISTORIES, st.integers(0, N_BLOCKS - 1))
def test_replaying_a_sessions_inputs_into_fresh_caches_restores_the_same_continuation(
    seen: list[int], to_come: list[int], first: int
) -> None:
    original, replacement = [0] * (N_BLOCKS - first), [0] * (N_BLOCKS - first)
    for value in seen:
        apply_blocks(value, first, original)
    for value in seen:
        apply_blocks(value, first, replacement)
    expected = [apply_blocks(value, first, original) for value in to_come]
    assert [apply_blocks(value, first, replacement) for value in to_come] == expected


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.integers(DIGEST_BYTES, 100))
def test_rows_carry_their_values_whatever_their_size(values: list[int], token_bytes: int) -> None:
    rows = write_rows(values, token_bytes)
    assert len(rows) == len(values) * token_bytes
    assert read_rows(rows, token_bytes) == values


@given(st.integers(0, 300_000), st.integers(0, 100_000))
def test_an_embedding_fits_a_row_and_depends_on_the_token_and_its_position(token: int, position: int) -> None:
    value = embed(token, position)
    assert 0 <= value < 2**64
    assert value != embed(token + 1, position)
    assert value != embed(token, position + 1)


@given(st.integers(0, 2**64 - 1), st.integers(1, 300_000))
def test_every_value_stands_for_a_token_of_the_vocabulary(value: int, vocabulary: int) -> None:
    assert 0 <= token_of(value, vocabulary) < vocabulary


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=100),
    st.integers(0, 100),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5),
)
def test_many_tokens_at_once_give_what_they_give_one_by_one(
    values: list[int], first: int, caches: list[int]
) -> None:
    alone, together = list(caches), list(caches)
    assert apply_to_rows(values, first, together) == [apply_blocks(value, first, alone) for value in values]
    assert together == alone

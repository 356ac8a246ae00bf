"""Text of a stream: stop sequences, characters of several tokens, made-up words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from testbed.errors import UserError
from testbed.serving.app import _Talk
from testbed.serving.guests import Ended, Generated, Stream
from testbed.serving.openai import CompletionBody
from testbed.serving.text import (
    SMALL,
    IncrementalDetokenizer,
    StopSequences,
    StubCodec,
    StubDetokenizer,
    plain_chat,
)

TEXT = st.text(alphabet="abn ", max_size=12)


@given(
    pieces=st.lists(TEXT, max_size=8),
    sequences=st.lists(st.text(alphabet="abn ", min_size=1, max_size=4), max_size=3),
)
def test_a_text_ends_before_the_first_stop_sequence_however_it_comes_in_pieces(
    pieces: list[str], sequences: list[str]
) -> None:
    stops, shown = StopSequences(sequences), ""
    for piece in pieces:
        shown += stops.add(piece)
        assert not any(sequence in shown for sequence in sequences)
        if stops.found:
            break
    shown += stops.rest()
    whole = "".join(pieces)
    ends = [whole.find(sequence) for sequence in sequences if sequence in whole]
    assert stops.found == bool(ends)
    if not ends:
        assert shown == whole
        return
    # It ended as soon as one was complete, before the first that was there then.
    assert whole.startswith(shown)
    assert any(whole.startswith(sequence, len(shown)) for sequence in sequences)


def test_what_may_begin_a_stop_sequence_is_held_back_until_it_does_not() -> None:
    stops = StopSequences(["END"])
    assert [stops.add(text) for text in ("a E", "N", "x", " EN")] == ["a ", "", "ENx", " "]
    assert (stops.rest(), stops.found) == ("EN", False)


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        return self.encode(plain_chat(messages))


@given(st.text(max_size=30))
def test_characters_come_whole_and_all_text_comes(text: str) -> None:
    codec = Bytes()
    detokenizer = IncrementalDetokenizer(codec)
    pieces = [detokenizer.add(token) for token in codec.encode(text)]
    assert "".join(pieces) + detokenizer.rest() == text
    assert "\N{REPLACEMENT CHARACTER}" in text or not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces)


def test_half_a_character_at_the_end_is_shown_as_one_that_is_unknown() -> None:
    detokenizer = IncrementalDetokenizer(Bytes())
    pieces = [detokenizer.add(token) for token in "é".encode()[:1]]
    assert (pieces, detokenizer.rest()) == ([""], "\N{REPLACEMENT CHARACTER}")


@given(request=st.integers(0, 10**6), n_tokens=st.integers(1, 300))
def test_made_up_text_has_exactly_as_many_tokens_as_were_computed(request: int, n_tokens: int) -> None:
    detokenizer = StubDetokenizer(CODEC, request)
    pieces = [detokenizer.add(0) for _ in range(n_tokens)]
    assert len(CODEC.encode("".join(pieces))) == n_tokens
    again = StubDetokenizer(CODEC, request)
    assert pieces == [again.add(0) for _ in range(n_tokens)]


CODEC = StubCodec(SMALL)


def test_the_small_tokenizer_gives_back_what_it_took() -> None:
    text = "Three servers, 24 blocks: ünïcode 日本 ok?\n"
    assert CODEC.decode(CODEC.encode(text)) == text


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no tokenizer.json; give a tokenizer's folder with --tokenizer"):
        StubCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"a": 1}), encoding="utf-8")
    with pytest.raises(UserError, match=r"tokenizer.json is not a tokenizer"):
        StubCodec(tmp_path)


def test_a_small_tokenizer_gives_texts_of_letters_or_of_any_tokens(tmp_path: Path) -> None:
    def codec(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> StubCodec:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        tokenizer.decoder = decoders.Fuse()
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        return StubCodec(tmp_path)

    letters = codec({"a": 0, "b": 1}, [])
    assert (sorted(letters.words), letters.counts_again) == (["a", "b"], True)
    assert len(letters.encode(letters.words[0] * 7)) == 7
    merging = codec({"a": 0, "aa": 1}, [("a", "a")])  # a text of single letters has half as many tokens
    assert (sorted(merging.words), merging.counts_again) == (["a", "aa"], False)
    with pytest.raises(UserError, match="has no token with a text"):
        codec({}, [])


@pytest.mark.parametrize(
    ("n_asked", "ends", "finish"), [(3, [9], "stop"), (4, [9], "stop"), (3, [], "length")]
)
async def test_a_text_that_the_model_ended_has_a_piece_per_token_and_stops(
    n_asked: int, ends: list[int], finish: str
) -> None:
    stream = Stream(0)
    body = CompletionBody(model="m", prompt="p")
    talk = _Talk(stream, body, StubDetokenizer(StubCodec(SMALL), 0), n_asked, ends)
    for event in (Generated(7), Generated(8), Generated(9), Ended(None)):
        stream.put(event)
    pieces = []
    while talk.finish is None:
        pieces.append(await talk.next())
    assert (len(pieces), talk.n_tokens, talk.finish) == (3, 3, finish)

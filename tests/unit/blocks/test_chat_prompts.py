"""Prompts of chats by a checkpoint's template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.blocks import need_blocks

need_blocks()

from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: E402

from testbed.serving.text import BlocksCodec  # noqa: E402

WORDS = {"<s>": 0, "hello": 1, "there": 2, "assistant": 3, "user": 4, ":": 5}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}assistant :"
)


def codec(folder: Path, template: str | None) -> BlocksCodec:
    """A tokenizer that begins every text with <s>, as Llama's does."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="there"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return BlocksCodec(folder)


def test_a_template_that_writes_the_first_token_gets_no_second_one(tmp_path: Path) -> None:
    assert codec(tmp_path, TEMPLATE).chat([("user", "hello there")]) == [0, 4, 5, 1, 2, 3, 5]


def test_without_a_template_a_chat_is_a_text_like_any_other(tmp_path: Path) -> None:
    found = codec(tmp_path, None)
    assert found.chat([("user", "hello")]) == found.encode("user: hello\nassistant:")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[5].content.x }}"]
)
def test_a_template_that_refuses_the_messages_is_the_clients_mistake(tmp_path: Path, template: str) -> None:
    with pytest.raises(ValueError, match="the model's chat template refuses these messages: "):
        codec(tmp_path, template).chat([("user", "hello")])

"""Compares a chain's tokens with those of the whole model on one machine, by ``generate`` of transformers.

``python -m nodes.blocks.whole`` reads a job as JSON from stdin and writes the result of ``compare`` as JSON
to stdout. ``testbed`` runs it as a process of its own after a run, when the servers have released their
memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from nodes.blocks.device import open_device
from nodes.blocks.family import family_of, kinds_of
from nodes.blocks.hub import prompt_of
from nodes.blocks.loading import fill, load_block
from nodes.blocks.spec import BlocksSpec, Sampling, WeightSource
from nodes.blocks.text import end_tokens
from nodes.blocks.weights import opened
from nodes.request import Generation, Request

TIE_RATIO = {"float32": 1e-5, "bfloat16": 2 * 2.0**-7, "float16": 2 * 2.0**-10}
"""Two tokens tie if their logits differ by at most this, as a ratio of the largest logit.

Then the order of additions decides which one a model chooses. In 16 bits: two of the steps in which the largest
logit itself is rounded. In float32, whose steps are finer than what thousands of additions leave: 84 of them.
"""
_MAX_LISTED = 20


@dataclass(frozen=True)
class Comparison:
    """An output compared with the whole model's. ``altered`` and ``tied`` are indices of its tokens, from 0.

    ``should_be``: the whole model's choice of every token, up to the first altered one after the same tokens,
    from there on after its own. -1 where its output had ended.
    """

    should_be: list[int]
    altered: list[int]
    tied: list[int]


class WholeModel:
    """The model of ``spec`` with all its blocks. Raises ``ComputeError``.

    A checkpoint with plain weights is loaded by transformers. Other weights, which it does not know, are made
    as on servers and put into its model.
    """

    def __init__(self, spec: BlocksSpec) -> None:
        self.device, dtype = open_device(spec.device, spec.dtype)
        self._tie_ratio = TIE_RATIO[spec.dtype]
        torch.set_num_threads(spec.n_threads)
        _, self.config = family_of(spec.source.config)
        if spec.source.folder is not None and spec.weights == "plain":
            model = AutoModelForCausalLM.from_pretrained(
                spec.source.folder, dtype=dtype, use_safetensors=True, local_files_only=True
            )
            self.model = model.to(self.device).eval()
        else:
            self.model = _assembled(spec, dtype, self.device)
        # Without a checkpoint's default settings: only a request's own settings count.
        self.model.generation_config = GenerationConfig()

    def tokens(
        self,
        prompt: Sequence[int],
        n_tokens: int,
        sampling: Sampling | None = None,
        min_tokens: int = 0,
        ends: Collection[int] = (),
    ) -> list[int]:
        """Returns at most ``n_tokens`` tokens after ``prompt``, the most probable ones or sampled.

        The first token in ``ends`` is the last one; the first ``min_tokens`` have none of these.
        """
        settings = GenerationConfig(max_new_tokens=n_tokens, do_sample=sampling is not None)
        if ends:
            settings.eos_token_id, settings.pad_token_id = sorted(ends), min(ends)
            settings.min_new_tokens = min_tokens
        if sampling is not None:
            settings.temperature = sampling.temperature
            settings.top_k = sampling.top_k
            settings.top_p = sampling.top_p
            torch.manual_seed(sampling.seed)
        ids = torch.tensor([list(prompt)], device=self.device)
        # With an explicit mask, because transformers would not attend to padding tokens in a prompt.
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
        return [int(token) for token in output[0, len(prompt) :]]

    def judge(
        self,
        prompt: Sequence[int],
        said: Sequence[int],
        sampling: Sampling | None = None,
        min_tokens: int = 0,
        ends: Collection[int] = (),
    ) -> Comparison:
        """Compares the output ``said`` after ``prompt`` with ``tokens``.

        After a tie the model continues ``said``.

        Sampled tokens have no ties, because a draw depends on all probabilities.
        """
        n_tokens = len(said)
        theirs: list[int] = []
        tied: list[int] = []
        while True:
            n_kept = len(theirs)
            if n_kept < n_tokens:
                found = self.tokens(
                    [*prompt, *said[:n_kept]], n_tokens - n_kept, sampling, max(0, min_tokens - n_kept), ends
                )
                theirs += found + [-1] * (n_tokens - n_kept - len(found))
            apart = [i for i in range(n_kept, n_tokens) if said[i] != theirs[i]]
            if not apart:
                return Comparison(theirs, [], tied)
            first = apart[0]
            may_tie = (
                sampling is None and theirs[first] >= 0 and not (said[first] in ends and first < min_tokens)
            )
            if (
                not may_tie
                or self._gap([*prompt, *said[:first]], said[first], theirs[first]) > self._tie_ratio
            ):
                return Comparison(theirs, apart, tied)
            tied.append(first)
            del theirs[first + 1 :]

    @torch.inference_mode()
    def _gap(self, tokens: Sequence[int], one: int, other: int) -> float:
        """Returns the difference of two tokens' logits after ``tokens``, as a ratio of the largest logit."""
        ids = torch.tensor([list(tokens)], device=self.device)
        logits = self.model(ids).logits[0, -1].float()
        return float((logits[one] - logits[other]).abs() / logits.abs().max())


def _assembled(spec: BlocksSpec, dtype: torch.dtype, device: torch.device) -> Any:
    family, config = family_of(spec.source.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    empty = model.base_model
    block_config = family.block_config(config)
    with opened(spec.source, family, config) as weights:
        blocks = [
            load_block(family, block_config, number, weights, dtype, device, spec.weights)
            for number in range(config.num_hidden_layers)
        ]
        base = family.with_blocks(config, blocks, kinds_of(config))
        for name in (family.embeddings, family.embeddings_norm, family.final_norm):
            if name is not None:
                setattr(base, name, fill(getattr(empty, name), name, weights, dtype, device))
        setattr(model, model.base_model_prefix, base.to(device))
        head = base.get_input_embeddings().weight
        own = weights.head(head.shape, dtype, device, head if config.tie_word_embeddings else None)
        model.lm_head.weight = head if own is head else torch.nn.Parameter(own, requires_grad=False)
        if family.has_head_bias:
            bias = weights.head_bias(own.shape[:1], dtype, device)
            model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    return model.eval()


def compare(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how many of a run's tokens differ from the whole model's, how many are ties, and examples.

    ``job`` has the fields of a ``BlocksSpec`` as ``spec``, and ``requests``, each with ``index``,
    ``n_input_tokens``, its ``tokens``, and the fields of a ``Generation`` as ``generation``; perhaps ``after``, the index of
    the turn before it, and the ``block_ids`` and ``block_tokens`` of its plan. If only one of
    the two outputs ends, they differ from there on. Tokens after the first one that differs are compared with
    the whole model's own output.
    """
    spec = BlocksSpec(**{**job["spec"], "source": WeightSource(**job["spec"]["source"])})
    whole = WholeModel(spec)
    ends = end_tokens(spec.source)
    n_checked = n_altered = n_tied = 0
    altered: list[dict[str, int]] = []
    said: dict[int, tuple[int, ...]] = {}
    """Prompt and output of each request, with which the next turn's prompt begins."""
    for entry in job["requests"]:
        ours = entry["tokens"]
        how = msgspec.convert(entry["generation"], Generation)
        request = Request(
            entry["index"],
            0.0,
            entry["n_input_tokens"],
            len(ours),
            how,
            history=said.get(entry.get("after"), ()),
            block_ids=tuple(entry.get("block_ids", ())),
            block_tokens=entry.get("block_tokens", 0),
        )
        prompt = prompt_of(request, whole.config.vocab_size)
        said[request.index] = (*prompt, *ours)
        found = whole.judge(prompt, ours, how.sampling, how.min_tokens, ends if how.stops else ())
        n_checked += len(ours)
        n_altered += len(found.altered)
        n_tied += len(found.tied)
        if found.altered and len(altered) < _MAX_LISTED:
            first = found.altered[0]
            altered.append(
                {
                    "request": request.index,
                    "token": first,
                    "is": ours[first],
                    "should_be": found.should_be[first],
                }
            )
    return {
        "n_tokens_checked": n_checked,
        "n_tokens_altered": n_altered,
        "n_tokens_tied": n_tied,
        "altered": altered,
    }


if __name__ == "__main__":
    answer = compare(json.load(sys.stdin))
    json.dump(answer, sys.stdout)

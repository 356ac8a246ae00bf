"""Small GGUF files of llamas, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def write_gguf(checkpoint: Path, file: Path, architecture: str = "llama", *, tokenizer: bool = True) -> None:
    """Writes the llama in the folder ``checkpoint`` with weights of 32 bits."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = model.config
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer, AutoTokenizer.from_pretrained(checkpoint))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        if name.endswith("q_proj.weight"):
            values = _permuted(values, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            values = _permuted(values, config.num_key_value_heads)
        stem, _, leaf = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(stem)}.{leaf}", values)
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _frequency_factors(config: Any) -> np.ndarray:
    """Returns by how much Llama 3 divides each frequency of its rotary positions."""
    rope, size = config.rope_parameters, config.head_dim
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, size, 2) / size)
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    return (1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))).astype(np.float32)


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    import json

    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(tokenizer.unk_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>")


def _permuted(matrix: np.ndarray, n_heads: int) -> np.ndarray:
    """Returns the rows of each head in llama.cpp's order: pairs that rotate together are neighbours."""
    halves = matrix.reshape(n_heads, 2, matrix.shape[0] // n_heads // 2, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)

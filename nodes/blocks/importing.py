"""Writes a plain checkpoint from a GGUF file or a folder of transformers, which transformers itself reads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "TQDM_DISABLE", "1"
)  # transformers has no other switch for the bars of its reader of GGUF

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_log

from nodes.blocks.family import family_of
from nodes.blocks.files import read_config
from nodes.blocks.memory import amount
from nodes.compute import ComputeError

_TOKENS = "tokenizer.ggml.tokens"
_SCALED_POSITIONS = "rope_freqs.weight"
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all of Meta's Llama 3.1 to 3.3 have; their ``factor`` differs."""
_SHARD = "5GB"


def import_model(source: Path, folder: Path, available_bytes: float) -> dict[str, Any]:
    """Writes safetensors, ``config.json``, tokenizer and chat template to the existing ``folder``.

    ``source`` is a GGUF file or a folder of transformers. Weights of a GGUF file are restored to float32; those
    of a folder keep their dtype. At most ``available_bytes`` of memory are used. Returns the content of
    ``config.json``. Raises ``ComputeError``.
    """
    transformers_log.set_verbosity_error()
    transformers_log.disable_progress_bar()
    frequency_factors = None
    if source.is_file():
        frequency_factors = _checked_gguf(source)
        place, named = source.parent, {"gguf_file": source.name}
    else:
        place, named = source, {}
        family_of(read_config(source))
    try:
        config = AutoConfig.from_pretrained(place, local_files_only=True, **named)
    except Exception as error:  # the readers raise errors of any kind
        raise _unreadable(source, error) from error
    if frequency_factors is not None:
        _scale_positions(config, frequency_factors, source)
    family_of(config.to_dict())
    dtype = torch.float32 if named else getattr(config, "dtype", None) or torch.float32
    _check_room(config, dtype, folder, available_bytes)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, **named)
    except Exception as error:
        raise ComputeError(f"{source} holds no tokenizer that can be read: {_reason(error)}") from error
    try:
        read, found = AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=dtype, local_files_only=True, output_loading_info=True, **named
        )
    except Exception as error:
        raise _unreadable(source, error) from error
    lacking = sorted(found["missing_keys"])
    if lacking:
        raise ComputeError(f"{source} has no tensor {lacking[0]}: give a file that holds the whole model")
    _write(read, tokenizer, folder)
    return read_config(folder)


def _write(read: Any, tokenizer: Any, folder: Path) -> None:
    # A model that was read from GGUF refuses to be saved, as a quantised one, so its tensors go into a new one.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = GenerationConfig.from_model_config(config)
    if read.generation_config is not None and read.generation_config.eos_token_id is not None:
        plain.generation_config.eos_token_id = read.generation_config.eos_token_id
    try:
        plain.save_pretrained(folder, max_shard_size=_SHARD)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:  # the library's own error for a full disk, too
        raise ComputeError(f"the weights cannot be written to {folder.parent}: {error}") from error
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # the library lets only the owner read them


def _checked_gguf(file: Path) -> torch.Tensor | None:
    """Returns by how much each frequency of the rotary positions is divided; ``None``: by nothing.

    Raises ``ComputeError`` for a file that is no GGUF, is cut short, or holds no tokenizer.
    """
    from gguf import GGUFReader

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ComputeError(f"{file} is no GGUF file: give one, or a folder of transformers")
    try:
        reader = GGUFReader(file)
    except Exception as error:  # the reader looks up what a file that is cut short does not hold
        raise ComputeError(f"{file} is cut short or broken ({_reason(error)}): download it again") from error
    if _TOKENS not in reader.fields:
        raise ComputeError(f"{file} holds no tokenizer: give a GGUF file of a whole language model")
    scaled = next((tensor for tensor in reader.tensors if tensor.name == _SCALED_POSITIONS), None)
    return None if scaled is None else torch.tensor(scaled.data.tolist(), dtype=torch.float32).flatten()


def _scale_positions(config: Any, factors: torch.Tensor, file: Path) -> None:
    """Sets the rotary positions of Llama 3 whose frequencies are divided by ``factors``, which transformers does not read.

    Raises ``ComputeError`` if there are none.
    """
    is_found = False
    if config.model_type == "llama":
        plain, size = dict(config.rope_parameters), config.head_dim
        expected = plain["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        config.rope_parameters = {**plain, "rope_type": "llama3", "factor": float(factors.max()), **_LLAMA_3}
        found, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        is_found = found.shape == factors.shape and torch.allclose(
            found, expected / factors, rtol=1e-3, atol=0.0
        )
    if not is_found:
        raise ComputeError(
            f"{file} has scaled rotary positions ({_SCALED_POSITIONS}) that are not those of Llama 3, and nothing else "
            "states them: import the model's folder of transformers"
        )


def _check_room(config: Any, dtype: torch.dtype, folder: Path, available_bytes: float) -> None:
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    n_bytes = dtype.itemsize * sum(parameter.numel() for parameter in empty.parameters())
    free_bytes = shutil.disk_usage(folder).free
    if n_bytes > free_bytes:
        raise ComputeError(
            f"the model needs {amount(n_bytes)}, and the disk of {folder.parent} has {amount(free_bytes)} free: "
            "make room, or give a folder on another disk"
        )
    if n_bytes > available_bytes:
        raise ComputeError(
            f"the model needs {amount(n_bytes)} of memory while it is read, and this machine has "
            f"{amount(available_bytes)} available: use a larger one"
        )


def _unreadable(source: Path, error: Exception) -> ComputeError:
    return ComputeError(f"{source} cannot be read as a language model of transformers: {_reason(error)}")


def _reason(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")

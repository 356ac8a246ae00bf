"""Builds modules of a model and fills them tensor by tensor, so that no weights are in memory twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nodes.blocks import quantised
from nodes.blocks.family import Family
from nodes.blocks.weights import Weights


def fill(
    module: torch.nn.Module,
    part: str,
    source: Weights,
    dtype: torch.dtype,
    device: torch.device,
    how: str = "plain",
) -> torch.nn.Module:
    """Fills ``module``, which was made on the meta device, with the weights of ``part``, and returns it.

    ``how`` is one of ``spec.Weights``: unless it is "plain", linear layers and experts are replaced by quantised ones.
    Raises ``ComputeError``.
    """
    layers = _linear_layers(module) if how != "plain" else {}
    experts = expert_tensors(module) if how != "plain" else {}
    shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
    # Matrices first: a quantised layer must be there before its bias is.
    ordered = {name: shapes[name] for name in sorted(shapes, key=lambda name: name not in layers)}
    for name, tensor in source.tensors(part, ordered, dtype, device):
        path, _, leaf = name.rpartition(".")
        if name in layers:
            module.set_submodule(path, quantised.LAYERS[how](tensor))
        elif name in experts:
            held = module.get_submodule(path)
            if not isinstance(held, quantised.QuantisedExperts):
                held = quantised.QuantisedExperts(held, quantised.LAYERS[how])
                module.set_submodule(path, held)
            held.hold(leaf, tensor)
        else:
            setattr(module.get_submodule(path), leaf, torch.nn.Parameter(tensor, requires_grad=False))
        del tensor  # else a quantised layer's full matrix would stay until the next one has been made
    if (
        scale := getattr(module, "scalar_embed_scale", None)
    ) is not None:  # of Gemma's embeddings, in no checkpoint
        module.embed_scale = torch.tensor(scale, device=device)
    return module.eval()


def load_block(
    family: Family,
    config: Any,
    number: int,
    source: Weights,
    dtype: torch.dtype,
    device: torch.device,
    how: str,
) -> torch.nn.Module:
    """Returns block ``number`` with its weights. ``config`` is that of the family's shell.

    Raises ``ComputeError``.
    """
    return fill(empty_block(family, config, number), f"{family.blocks}.{number}", source, dtype, device, how)


def empty_block(family: Family, config: Any, number: int) -> torch.nn.Module:
    """Returns block ``number`` on the meta device, without weights."""
    with torch.device("meta"):
        block: torch.nn.Module = family.block_class(config, number)
    return block


def planned_bytes(block: torch.nn.Module, dtype: torch.dtype, how: str) -> int:
    """Returns the bytes that a block takes once it is filled: exactly ``s_m`` of the performance model."""
    layers, experts = _linear_layers(block), expert_tensors(block)
    total = 0
    for name, tensor in block.state_dict().items():
        if name in layers:
            n_rows, n_columns = tensor.shape
            total += quantised.matrix_bytes(how, n_rows, n_columns, dtype)
        elif name in experts:
            parts = quantised.matrix_of(name.rpartition(".")[2], tensor[0])
            total += len(tensor) * sum(
                quantised.matrix_bytes(how, part.shape[0], part.shape[1], dtype) for part in parts
            )
        else:
            total += tensor.numel() * dtype.itemsize
    return total


def largest_matrix_bytes(block: torch.nn.Module, dtype: torch.dtype) -> int:
    """Returns the bytes in ``dtype`` of the largest matrix, which a quantised layer may have to restore."""
    return max(tensor.numel() * dtype.itemsize for tensor in block.state_dict().values())


def real_bytes(block: torch.nn.Module) -> int:
    """Returns the bytes that a filled block takes."""
    matrices = sum(
        layer.n_bytes
        for layer in block.modules()
        if isinstance(layer, quantised.Int8Linear | quantised.Nf4Linear)
    )
    return matrices + sum(parameter.nbytes for parameter in block.parameters())


def expert_tensors(module: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
    """Returns the modules of experts that can be quantised, by the names of their tensors; empty if there are none."""
    return {
        f"{path}.{name}": held
        for path, held in module.named_modules()
        if tuple(name for name, _ in held.named_parameters(recurse=False)) == quantised.EXPERTS
        for name in quantised.EXPERTS
    }


def _linear_layers(module: torch.nn.Module) -> Mapping[str, torch.nn.Linear]:
    """Returns the linear layers of ``module`` by the names of their matrices."""
    found = module.named_modules()
    return {f"{name}.weight": layer for name, layer in found if isinstance(layer, torch.nn.Linear)}

"""Real blocks in a run: checks whether they can be computed here, and finds or makes the model."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nodes.blocks.memory import amount
from nodes.blocks.spec import BlocksSpec, HubSpec, WeightSource
from nodes.request import Generation
from policies.decoding import Decoding
from policies.problem import Placement
from policies.workload import longest_tokens
from testbed.errors import UserError
from testbed.experiments.checkpoints import (
    INSTALL,
    checkpoint_folder,
    checkpoint_sizes,
    read_config,
    require_computable,
    require_stored,
    require_weights,
)
from testbed.experiments.experiment import BlocksSettings, Experiment
from testbed.experiments.families import ModelSizes
from testbed.runtime.gpus import shared_out

_MAX_MADE_BYTES = 2e9
"""Largest checkpoint, in bytes, that is made in a run directory."""


@dataclass(frozen=True)
class BlocksModel:
    """The model of a run.

    ``generations`` are the prompts and settings of requests that have their own, by index.
    """

    settings: BlocksSettings
    source: WeightSource
    generations: Mapping[int, Generation] = field(default_factory=dict)

    def blocks_spec(self, server: int, memory_bytes: float) -> BlocksSpec:
        """Return how server number ``server`` computes; it uses at most ``memory_bytes``."""
        settings = self.settings
        return BlocksSpec(
            source=self.source,
            device=settings.device_of(server),
            dtype=settings.dtype,
            wire=settings.wire,
            weights=settings.weights,  # type: ignore[arg-type]  # checked where the scenario is read
            n_threads=settings.n_threads,
            memory_bytes=memory_bytes,
            n_streams=settings.n_streams,
            is_batched=settings.is_batched,
            chunk_tokens=settings.chunk_tokens,
            has_graphs=settings.has_graphs,
        )

    def hub_spec(self, decoding: Decoding | None = None, draft_model: str | None = None) -> HubSpec:
        """Return how the client computes its part of the model (embedding and head), and how it drafts."""
        settings = self.settings
        return HubSpec(
            source=self.source,
            device=settings.devices[0],
            dtype=settings.dtype,
            wire=settings.wire,
            n_threads=settings.n_threads,
            decoding=decoding,
            draft_folder=None if draft_model is None else str(checkpoint_folder(draft_model)),
        )

    @property
    def sizes(self) -> ModelSizes:
        return checkpoint_sizes(self.source.config, self.source.folder or "the model")

    def end_tokens(self) -> frozenset[int]:
        """Return the tokens that end an output. Imports torch, as a tokenizer does, but no model; raises ``UserError``."""
        from nodes.blocks.text import end_tokens
        from nodes.compute import ComputeError

        try:
            return end_tokens(self.source)
        except ComputeError as error:
            raise UserError(str(error)) from error


def blocks_missing() -> str | None:
    """Return the packages that real blocks need and that are not installed; ``None`` if all are."""
    needed = ("torch", "transformers", "safetensors", "tokenizers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return ", ".join(missing) or None


def require_blocks(what: str) -> None:
    """Raise ``UserError`` with what to install if packages are missing that ``what`` needs."""
    missing = blocks_missing()
    if missing is not None:
        raise UserError(f"{what} needs packages that are not installed ({missing}): {INSTALL}")


def blocks_model(experiment: Experiment, run_dir: Path) -> BlocksModel | None:
    """Return the model of a run with real blocks; ``None`` for the stub.

    Without a checkpoint, a small one is made in ``run_dir``. Raises ``UserError`` if there is no usable
    model.
    """
    settings = shared_out(experiment, lambda _: None)
    if settings is None:
        return None
    if settings.random_weights:
        source = WeightSource(settings.config, seed=settings.seed)
    elif settings.checkpoint is None:
        folder = run_dir / "model"
        make_checkpoint(folder, settings.config, settings.seed)
        source = WeightSource(read_config(str(folder)), str(folder), settings.seed)
    else:
        folder = checkpoint_folder(settings.checkpoint)
        source = WeightSource(read_config(str(folder)), str(folder), settings.seed)
    blocks = BlocksModel(settings, source)
    _check(experiment, blocks.sizes, source.folder or "the model")
    _check_drafts(experiment, blocks.sizes)
    if source.folder is not None:
        require_weights(source.folder, blocks.sizes.n_blocks)
    return blocks


def check_model(experiment: Experiment) -> None:
    """Raise ``UserError`` if the run's model cannot be used; of one on the hub only its ``config.json`` is checked."""
    settings = experiment.compute.blocks
    if settings is None:
        return
    if settings.config:  # of a stored run whose checkpoint cannot be read it is empty
        require_computable(settings.config)
        require_stored(settings.config, settings.weights, has_graphs=settings.has_graphs)
        sizes = checkpoint_sizes(settings.config, settings.checkpoint or "[model]")
        if settings.checkpoint is None and not settings.random_weights:
            _check_made(sizes)
        _check_drafts(experiment, sizes)
    _check_files(settings.checkpoint)


def _check_files(checkpoint: str | None) -> None:
    """Raise ``UserError`` if the files in a checkpoint's folder do not hold the model."""
    if checkpoint is not None and Path(checkpoint).is_absolute():
        config = read_config(str(checkpoint_folder(checkpoint)))
        require_weights(checkpoint, checkpoint_sizes(config, checkpoint).n_blocks)


def _check_made(sizes: ModelSizes) -> None:
    """Raise ``UserError`` if the run would have to make a checkpoint that is too large."""
    n_bytes = sizes.n_blocks * sizes.block_bytes("plain", 4) + 4.0 * sizes.vocabulary * sizes.hidden_size
    if n_bytes > _MAX_MADE_BYTES:
        raise UserError(
            f"a model of {n_bytes / 1e9:.1f} GB is too large to be made for one run; give a checkpoint with "
            "--model DIR, or add --random-weights, with which every server makes its own blocks"
        )


def make_checkpoint(folder: Path, config: Mapping[str, object], seed: int, n_shards: int = 1) -> None:
    """Make a checkpoint with ``nodes.blocks.tiny.make_tiny``.

    Raises ``UserError`` if the configuration is wrong or the disk cannot be written.
    """
    from nodes.blocks.tiny import make_tiny
    from nodes.compute import ComputeError

    try:
        make_tiny(folder, config, seed, n_shards)
    except (ComputeError, ValueError) as error:
        raise UserError(f"the model cannot be made: {error}") from error
    except OSError as error:
        raise UserError(f"cannot write the model to {folder}: {error.strerror or error}") from error


def _check(experiment: Experiment, sizes: ModelSizes, name: str) -> None:
    """Raise ``UserError`` if the model does not match the scenario, or is made for shorter sequences.

    The folder that a stored scenario names may contain another checkpoint by now.
    """
    model = experiment.problem.model
    if (sizes.n_blocks, sizes.hidden_size) != (model.n_blocks, model.hidden_size):
        raise UserError(
            f"{name} has {sizes.n_blocks} blocks of hidden size {sizes.hidden_size}, but the scenario has "
            f"{model.n_blocks} of {model.hidden_size}; give the checkpoint that the scenario was made for"
        )
    if sizes.max_tokens is not None and experiment.workload.endpoint_tokens > sizes.max_tokens:
        raise UserError(
            f"endpoint.max_model_len is {experiment.workload.endpoint_tokens}, but the model is made for "
            f"{sizes.max_tokens} tokens at most; lower it"
        )
    longest = longest_tokens(experiment.workload.requests)
    if sizes.max_tokens is not None and longest > sizes.max_tokens:
        raise UserError(
            f"a request has {longest} tokens, input and output, but the model is made for "
            f"{sizes.max_tokens} at most; lower workload.n_input_tokens or n_output_tokens"
        )


def _check_drafts(experiment: Experiment, sizes: ModelSizes) -> None:
    """Raise ``UserError`` if the model that drafts has other tokens, or is made for shorter sequences."""
    draft_model = experiment.compute.draft_model
    if draft_model is None:
        return
    try:
        config = read_config(draft_model)
        require_computable(config)
        _check_files(draft_model)
    except UserError as error:
        raise UserError(f"decoding.draft_model: {error}") from None
    drafts = checkpoint_sizes(config, draft_model)
    if drafts.vocabulary != sizes.vocabulary:
        raise UserError(
            f"decoding.draft_model: {draft_model} has a vocabulary of {drafts.vocabulary:,} tokens, but the model has "
            f"one of {sizes.vocabulary:,}; give a checkpoint with the same tokens"
        )
    longest = max(longest_tokens(experiment.workload.requests), experiment.workload.endpoint_tokens)
    if drafts.max_tokens is not None and longest > drafts.max_tokens:
        raise UserError(
            f"decoding.draft_model: {draft_model} is made for {drafts.max_tokens} tokens at most, but a request may have "
            f"{longest}; lower the lengths of requests, or give another checkpoint"
        )


def available_bytes() -> float:
    """Return the available memory of this machine in bytes; infinite if unknown."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"))
    return float(found[1]) * 1024 if found else float("inf")


def check_fits(experiment: Experiment, placement: Placement) -> None:
    """Raise ``UserError`` if the servers' blocks on the CPU need more memory than this machine has available.

    Each server checks this for itself, too, but all of them load at the same time.
    """
    settings = shared_out(experiment, lambda _: None)
    if settings is None or experiment.machines:
        return
    n_held = sum(held.n_blocks for n, held in enumerate(placement.ranges) if settings.device_of(n) == "cpu")
    wanted_bytes, left_bytes = n_held * experiment.problem.model.block_bytes, available_bytes()
    if wanted_bytes > left_bytes:
        raise UserError(
            f"the servers' {n_held} blocks on the CPU need {amount(wanted_bytes)}, but this machine has "
            f"{amount(left_bytes)} available; use a GPU (compute.device), a smaller model, or fewer blocks "
            "on each server (servers' memory)"
        )

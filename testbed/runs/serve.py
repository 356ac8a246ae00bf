"""``testbed serve``: a testbed that serves requests from outside, at an endpoint with OpenAI's API."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nodes.request import Generation
from testbed.errors import UserError
from testbed.page.beside import bind_page, page_beside
from testbed.page.serve import bind
from testbed.results.served import with_guests
from testbed.results.text import summary_text
from testbed.rundir import ENDPOINT, make_run_dir, write_json
from testbed.runs.twin import run_twin
from testbed.runs.up import (
    check_can_run,
    finish,
    has_begun,
    left_to_report,
    placed_experiment,
    undone_unless_begun,
)
from testbed.runs.verify import verify_tokens
from testbed.runtime.blocks import BlocksModel, blocks_model
from testbed.runtime.running import emulate
from testbed.runtime.stage import choose_stage
from testbed.scenario import Change, Override, load_experiment
from testbed.scenario.checkpoints import checkpoint_sizes
from testbed.scenario.experiment import Experiment
from testbed.serving.app import Endpoint, Rules
from testbed.serving.text import SMALL, BlocksCodec, Codec, StubCodec
from testbed.terminal import say

_MAX_MODEL_LEN = 4096
"""Tokens of the longest request, unless --max-model-len is given or the model's own limit is lower."""


@dataclass(frozen=True)
class ServeOptions:
    """Options of the endpoint. ``tokenizer`` is a folder; ``max_model_len`` is in tokens."""

    host: str
    port: int
    api_key: str | None
    no_auth: bool
    workload: str
    """"also" or "none"."""
    admission: str
    """"wait" or "reject"."""
    max_requests: int
    max_model_len: int | None
    tokenizer: Path | None
    page_port: int | None
    """Port of the run's page; None: no page."""


def serve_command(
    scenario: str,
    overrides: Sequence[Override],
    options: ServeOptions,
    out: Path | None,
    *,
    report: bool,
    trace: bool,
    with_twin: bool,
    echo: Callable[[str], None],
) -> None:
    """Serve until interrupted, and write a run directory. ``echo`` gets the URL once it can be used.

    Raises ``UserError`` before anything runs, or the ``TestbedError`` that broke the testbed.
    """
    _check_host(options)
    experiment = experiment_to_serve(scenario, overrides, options)
    check_can_run(experiment)
    stage = choose_stage(experiment, holds=True)
    placed = placed_experiment(experiment)
    words = StubCodec(options.tokenizer or SMALL) if experiment.compute.blocks is None else None
    bound = bind(options.port, options.host)
    listener = bind_page(options.page_port)
    run_dir = make_run_dir(out, experiment.name)
    with page_beside(run_dir, listener, say):
        launcher = stage.begin(experiment, run_dir)
        with undone_unless_begun(run_dir, launcher):
            blocks = blocks_model(experiment, run_dir)
            codec = words or _codec(blocks, options.tokenizer)
            rules = Rules(options.api_key, options.admission == "reject", options.max_requests)
            endpoint = Endpoint(experiment, codec, rules, bound)
        say(f"run {run_dir}")

        def ready() -> None:
            host, port = bound.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            url = f"http://{shown}:{port}/v1"
            write_json(run_dir / ENDPOINT, {"url": url})
            echo(url)

        endpoint.when_ready(ready)
        error, _ = stage.run(
            launcher,
            emulate(
                *(experiment, placed, run_dir, stage, launcher, blocks, False, say), guests=endpoint.guests
            ),
        )
        (run_dir / ENDPOINT).unlink(missing_ok=True)
        if not has_begun(run_dir, error):
            say(f"interrupted before any request; logs are in {run_dir}")
            return
        experiment = with_guests(experiment, run_dir)
        with left_to_report(run_dir):
            if blocks is not None and error is None:
                asked: dict[int, Generation] = endpoint.generations
                verify_tokens(run_dir, experiment, dataclasses.replace(blocks, generations=asked), say)
            if with_twin and stage.has_twin and error is None and experiment.workload.requests:
                say("running the twin in virtual time (--no-twin leaves it out)")
                run_twin(experiment, placed, run_dir, say)
            summary = finish(run_dir, experiment, report=report, trace=trace)
        say(summary_text(summary))
        if error is not None:
            raise error


def experiment_to_serve(scenario: str, overrides: Sequence[Override], options: ServeOptions) -> Experiment:
    """Load the scenario with an ``[endpoint]`` table of these options.

    With ``--admission reject`` no request waits in a queue.
    """
    queue = [Change("policy.queue", "none")] if options.admission == "reject" else []

    def load(max_model_len: int) -> Experiment:
        table = {"max_model_len": max_model_len, "workload": options.workload}
        return load_experiment(scenario, [*overrides, *queue, Change("endpoint", table)])

    if options.max_model_len is not None:
        return load(options.max_model_len)
    experiment = load(_MAX_MODEL_LEN)
    if experiment.compute.blocks is None:
        return experiment
    sizes = checkpoint_sizes(experiment.compute.blocks.config, experiment.problem.model.name)
    return load(min(_MAX_MODEL_LEN, sizes.max_tokens or _MAX_MODEL_LEN))


def _codec(blocks: BlocksModel | None, folder: Path | None) -> Codec:
    assert blocks is not None, "the stub has its own tokenizer"
    if folder is not None:
        return BlocksCodec(folder)
    if blocks.source.folder is None:
        raise UserError("a model of random weights has no tokenizer: give one with --tokenizer DIR")
    return BlocksCodec(Path(blocks.source.folder))


def _check_host(options: ServeOptions) -> None:
    """Raise ``UserError`` if other machines could use the testbed without a key, but for ``no_auth``."""
    if options.api_key is not None and options.no_auth:
        raise UserError("--api-key and --no-auth contradict each other: leave one of them out")
    if options.api_key == "":
        raise UserError("--api-key must not be empty: give a key, or leave it out")
    try:
        is_open = not ipaddress.ip_address(options.host).is_loopback
    except ValueError:
        is_open = options.host != "localhost"
    if is_open and options.api_key is None and not options.no_auth:
        raise UserError(
            f"--host {options.host} can be reached from other machines: give --api-key KEY, or --no-auth if "
            "everybody may use it"
        )

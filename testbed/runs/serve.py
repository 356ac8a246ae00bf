"""``testbed serve``: a testbed that serves requests from outside, at an endpoint with OpenAI's API."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from testbed.control.placing import load_to_run
from testbed.errors import EXIT_INTERRUPTED, UserError
from testbed.experiments import Change, Override
from testbed.experiments.checkpoints import checkpoint_sizes
from testbed.experiments.experiment import Experiment
from testbed.experiments.limits import MAX_TOKENS
from testbed.page.serve import bind
from testbed.results.served import with_guests
from testbed.results.text import summary_text
from testbed.rundir import ENDPOINT, write_json
from testbed.runs.session import Ended, RunOptions, RunSession, check_can_run, exit_code
from testbed.runtime.blocks import BlocksModel
from testbed.runtime.launching import Launcher
from testbed.runtime.running import Outcome
from testbed.runtime.signals import Interruption
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
    served_model_name: str = ""
    """How the endpoint calls the model; "": as the scenario does."""
    cors: tuple[str, ...] = ()
    """Origins whose pages may use the endpoint from a browser; "*" are all."""

    @staticmethod
    def local(port: int, tokenizer: Path | None = None) -> ServeOptions:
        """Return the options of an endpoint for this machine alone, without a page."""
        return ServeOptions("127.0.0.1", port, None, False, "none", "wait", 1024, None, tokenizer, None)


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
) -> int:
    """Serve until interrupted, and write a run directory. ``echo`` gets the URL once it can be used.

    Returns the exit code. Raises ``UserError`` before anything runs, or the ``TestbedError`` that broke the testbed.
    """
    _check_host(options)
    _check_names(options)
    experiment = experiment_to_serve(scenario, overrides, options)
    page = options.page_port
    run_options = RunOptions(report=report, trace=trace, with_twin=with_twin, page_port=page)
    return say_ended(ServedRun(experiment, out, run_options, options, echo).run())


def say_ended(ended: Ended) -> int:
    """Print the summary, if there is one; returns the exit code. Raises the error that ended the run early.

    Ctrl-C is how such a run ends, and changes nothing of the code unless it cuts short what comes after that.
    """
    if ended.summary is None:
        return 0
    say(summary_text(ended.summary))
    if ended.error is not None:
        raise ended.error
    return EXIT_INTERRUPTED if ended.interrupted else exit_code(ended.summary)


class ServedRun(RunSession):
    """A run with an endpoint."""

    codec: Codec
    missing = "any request"
    stays_open = True

    def __init__(
        self,
        experiment: Experiment,
        out: Path | None,
        run_options: RunOptions,
        options: ServeOptions,
        echo: Callable[[str], None],
    ) -> None:
        super().__init__(experiment, out, run_options, say)
        self._of_endpoint = options
        self._echo = echo

    def check(self) -> None:
        check_can_run(self.experiment)

    def place(self) -> None:
        super().place()
        options = self._of_endpoint
        self._words = (
            StubCodec(options.tokenizer or SMALL) if self.experiment.compute.blocks is None else None
        )
        self._bound = bind(options.port, options.host)

    def prepare(self) -> None:
        options = self._of_endpoint
        self.codec = codec = self._words or _codec(self.blocks, options.tokenizer)
        rules = Rules(
            *(options.api_key, options.admission == "reject", options.max_requests),
            *(options.served_model_name, options.cors),
        )
        ends = () if self.blocks is None else self.blocks.end_tokens()
        self._endpoint = Endpoint(self.experiment, codec, rules, self._bound, ends)
        self._endpoint.when_ready(self._ready)
        self.guests = self._endpoint.guests

    def _ready(self) -> None:
        host, port = self._bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{port}/v1"
        write_json(self.run_dir / ENDPOINT, {"url": url})
        self._echo(url)

    async def serve(self, launcher: Launcher) -> Outcome:
        try:
            return await super().serve(launcher)
        finally:
            (self.run_dir / ENDPOINT).unlink(missing_ok=True)

    def served(self) -> None:
        self._interruption = Interruption()  # what has ended the serving does not end the twin
        self.experiment = with_guests(self.experiment, self.run_dir)
        if self.blocks is not None:
            self.blocks = dataclasses.replace(self.blocks, generations=self._endpoint.generations)


def experiment_to_serve(scenario: str, overrides: Sequence[Override], options: ServeOptions) -> Experiment:
    """Load the scenario with an ``[endpoint]`` table of these options.

    With ``--admission reject`` no request waits in a queue. Raises ``UserError``.
    """
    if options.max_model_len is not None and options.max_model_len > MAX_TOKENS:
        raise UserError(f"--max-model-len must be at most {MAX_TOKENS:,}, not {options.max_model_len}")
    queue = [Change("policy.queue", "none")] if options.admission == "reject" else []

    def load(max_model_len: int) -> Experiment:
        table = {"max_model_len": max_model_len, "workload": options.workload}
        return load_to_run(scenario, [*overrides, *queue, Change("endpoint", table)])

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


def _check_names(options: ServeOptions) -> None:
    """Raise ``UserError`` for a name that clients could not send, and for origins that no browser has."""
    name = options.served_model_name
    if name and ("@" in name or not name.isprintable() or name != name.strip()):
        raise UserError(f"--served-model-name must be printable text without @, not {name!r}")
    for origin in options.cors:
        parts = urlsplit(origin)
        if origin != "*" and (
            not parts.scheme or not parts.netloc or parts.path or parts.query or parts.fragment
        ):
            raise UserError(f"--cors must be an origin such as http://localhost:3000, or *, not {origin!r}")


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

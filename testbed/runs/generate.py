"""``testbed generate``: generates one text with real blocks on an emulated network."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nodes.blocks.spec import Sampling
from nodes.eventlog import LogReader
from nodes.records import Token
from nodes.request import Generation
from testbed.control.placing import load_to_run
from testbed.errors import EXIT_INTERRUPTED, UserError
from testbed.experiments import Change, Override
from testbed.experiments.checkpoints import checkpoint_sizes
from testbed.experiments.experiment import Experiment
from testbed.experiments.families import ModelSizes
from testbed.experiments.units import counted
from testbed.records.summary import Verification
from testbed.results.logs import RequestRecord, read_logs
from testbed.results.verified import verdict
from testbed.runs.hoptimes import blocks_text, hop_times, last_chain, times_text
from testbed.runs.session import RunOptions, RunSession, exit_code, silent
from testbed.runtime.blocks import BlocksModel, require_blocks
from testbed.runtime.launching import Launcher
from testbed.runtime.running import Outcome
from testbed.serving.text import UNFINISHED
from testbed.terminal import say

_STREAM_PERIOD_S = 0.05
_CHECKED = ("n_tokens_checked", "n_tokens_altered", "n_tokens_tied", "tokens_unchecked_because")


@dataclass(frozen=True)
class GenerateOptions:
    """The request: ``prompt`` or ``prompt_ids``, the number of tokens at most, and how to sample them."""

    prompt: str | None
    prompt_ids: str | None
    max_new_tokens: int
    temperature: float | None
    top_k: int | None
    top_p: float | None
    seed: int | None

    def check(self) -> None:
        """Check what needs no model. Raises ``UserError``."""
        self.sampling()
        self.given_ids()

    def given_ids(self) -> list[int] | None:
        """Return the prompt's token ids if they are given. Raises ``UserError``."""
        if (self.prompt is None) == (self.prompt_ids is None):
            raise UserError("give either --prompt TEXT or --prompt-ids 1,2,3")
        if self.prompt_ids is None:
            return None
        try:
            return [int(part) for part in self.prompt_ids.split(",") if part.strip()]
        except ValueError:
            raise UserError(f"--prompt-ids {self.prompt_ids}: must be whole numbers such as 1,2,3") from None

    def sampling(self) -> Sampling | None:
        """Return how to sample, or None for the most probable token each time. Raises ``UserError``."""
        if self.temperature == 0 or (self.temperature, self.top_k, self.top_p) == (None, None, None):
            if self.seed is not None:
                raise UserError("--seed is for sampling: give --temperature, --top-k or --top-p with it")
            return None
        sampling = Sampling(
            1.0 if self.temperature is None else self.temperature,
            self.top_k or 0,
            1.0 if self.top_p is None else self.top_p,
            self.seed or 0,
        )
        if wrong := sampling.wrong():
            raise UserError(f"--{wrong[0].replace('_', '-')} {wrong[1]}")
        return sampling


def generate_command(
    scenario: str,
    overrides: Sequence[Override],
    options: GenerateOptions,
    out: Path | None,
    *,
    as_json: bool,
    report: bool,
    echo: Callable[[str], None],
) -> tuple[int, dict[str, Any]]:
    """Start the testbed and generate a text; returns the exit code and the answer for ``--json``.

    Unless ``as_json``, ``echo`` is called with each new piece of the text. Raises ``TestbedError``.
    """
    require_blocks("testbed generate")
    sampling = options.sampling()
    given_ids = options.given_ids()
    if any(str(change).partition("=")[0].strip() == "compute.backend" for change in overrides):
        raise UserError("testbed generate computes real blocks: leave out --set compute.backend")
    changes: list[Override] = [*overrides, Change("compute.backend", "blocks")]

    def load(n_input_tokens: int) -> Experiment:
        return load_to_run(scenario, [*changes, request_of(n_input_tokens, options.max_new_tokens)])

    show: Callable[[str], None] = silent if as_json else echo
    run = _GenerateRun(
        load, options, given_ids, sampling, show, out, RunOptions(report=report, with_twin=False, live=False)
    )
    ended = run.run()
    if ended.summary is None:
        return EXIT_INTERRUPTED, {}
    if ended.error is not None:
        raise ended.error
    records = read_logs(ended.run_dir).requests
    if ended.interrupted or not records:
        say(f"interrupted: the record up to now is in {ended.run_dir}")
        return EXIT_INTERRUPTED, {}
    answer = _answer(ended.run_dir, records[0], run.ids, run.text)
    assert run.blocks is not None, "generate computes real blocks"
    answer["ended_by"] = ended_by(answer["token_ids"], run.blocks.end_tokens())
    names = [server.name for server in ended.experiment.problem.servers]
    chain = last_chain(run.tokens) or records[0].chain
    answer["chain"] = [
        {"server": names[server], "first_block": first, "last_block": last} for server, first, last in chain
    ]
    answer["hops"] = [{**vars(hop), "server": names[hop.server]} for hop in hop_times(run.tokens)]
    if not as_json and run.tokens:
        say(times_text(run.tokens, names, records[0].arrived_at_s))
    for key in _CHECKED:
        answer[key] = ended.summary[key]
    return exit_code(ended.summary), answer


class _GenerateRun(RunSession):
    """A run with one request, whose prompt is known once there is a tokenizer.

    ``load`` returns the experiment for a prompt of so many tokens. ``ids`` are those of the prompt if they
    are given. ``show`` is called with each new piece of the text.
    """

    missing = "the request was sent"
    tokens: Sequence[Token] = ()
    """What the client logged of each output token, once they have been served."""

    def __init__(
        self,
        load: Callable[[int], Experiment],
        request: GenerateOptions,
        ids: list[int] | None,
        sampling: Sampling | None,
        show: Callable[[str], None],
        out: Path | None,
        options: RunOptions,
    ) -> None:
        super().__init__(load(1), out, options, say)
        self._load, self._request, self._sampling, self._show = load, request, sampling, show
        self._given_ids = ids

    def check(self) -> None:
        """Check before anything slow begins. A text has one token or more."""
        at_least = [0] if self._request.prompt else []
        self._check_prompt(at_least if self._given_ids is None else self._given_ids)
        super().check()

    def _check_prompt(self, ids: list[int]) -> None:
        assert self.experiment.compute.blocks is not None, "generate computes real blocks"
        config, model = self.experiment.compute.blocks.config, self.experiment.problem.model
        _check_prompt(ids, self._request.max_new_tokens, checkpoint_sizes(config, model.name))

    def place(self) -> None:
        """See ``prepare``: the experiment has not its prompt yet."""

    def prepare(self) -> None:
        assert self.blocks is not None, "generate computes real blocks"
        self.text = _Text(self.blocks)
        given = self._given_ids
        self.ids = given if given is not None else self.text.encode(self._request.prompt or "")
        self._check_prompt(self.ids)
        self.experiment = self._load(len(self.ids))
        super().place()
        generation = Generation(tuple(self.ids), self._sampling, stops=True)
        self.blocks = dataclasses.replace(self.blocks, generations={0: generation})

    async def serve(self, launcher: Launcher) -> Outcome:
        stream = _Stream(self.run_dir, self.text, self._show)
        streaming = asyncio.create_task(stream.run())
        try:
            return await super().serve(launcher)
        finally:
            streaming.cancel()
            stream.show()
            self._show("\n")
            self.tokens = stream.tokens


def answer_text(answer: dict[str, Any]) -> str:
    """Return what is printed after text and times: the comparison with the whole model, blocks by server."""
    n_tokens = len(answer["token_ids"])
    if answer["status"] != "completed":
        return (
            f"the request did not complete ({answer['status']} after {counted(n_tokens, 'tokens')}): "
            f"{answer['reason']}"
        )
    chain = ", ".join(
        f"{h['server']} {blocks_text(h['first_block'], h['last_block'])}" for h in answer["chain"]
    )
    found = verdict(Verification(**{key: answer[key] for key in _CHECKED}))
    return f"ended by {answer['ended_by']}; {found}\nblocks by server: {chain}"


def ended_by(tokens: Sequence[int], ends: Collection[int]) -> str:
    """Return what ended an output: one of the model's tokens ``ends``, or the option."""
    return "the model" if tokens and tokens[-1] in ends else "--max-new-tokens"


def request_of(n_input_tokens: int, n_output_tokens: int) -> Change:
    """Return the workload of a single request."""
    requests = [[0.0, n_input_tokens, n_output_tokens]]
    return Change("workload", {"arrivals": "listed", "rate": 1.0, "requests": requests})


def _check_prompt(ids: list[int], n_new_tokens: int, sizes: ModelSizes) -> None:
    if not ids:
        raise UserError("the prompt is empty: give at least one token with --prompt or --prompt-ids")
    foreign = next((token for token in ids if not 0 <= token < sizes.vocabulary), None)
    if foreign is not None:
        raise UserError(
            f"token {foreign} of the prompt is not in the model's vocabulary: give ids from 0 to "
            f"{sizes.vocabulary - 1}"
        )
    if sizes.max_tokens is not None and len(ids) + n_new_tokens > sizes.max_tokens:
        raise UserError(
            f"a prompt of {counted(len(ids), 'tokens')} and {n_new_tokens} new ones are more than the "
            f"model's limit of {sizes.max_tokens}: shorten the prompt, or lower --max-new-tokens"
        )


class _Text:
    """The model's tokenizer. A model without a checkpoint has none, and its tokens have no text."""

    def __init__(self, model: BlocksModel) -> None:
        from nodes.blocks.text import Text
        from nodes.compute import ComputeError

        self._text: Text | None = None
        self._missing = "a model of random weights has no tokenizer"
        if model.source.folder is not None:
            try:
                self._text = Text(Path(model.source.folder))
            except ComputeError as error:
                self._missing = str(error)

    def encode(self, prompt: str) -> list[int]:
        """Return the prompt's token ids. Raises ``UserError`` if there is no tokenizer."""
        if self._text is None:
            raise UserError(f"{self._missing}: give tokens with --prompt-ids")
        return self._text.encode(prompt)

    def decode(self, tokens: list[int]) -> str | None:
        """Return the text of token ids, or None if there is no tokenizer."""
        return None if self._text is None else self._text.decode(tokens)


class _Stream:
    """Prints the text while it is generated, from the client's log."""

    def __init__(self, run_dir: Path, text: _Text, echo: Callable[[str], None]) -> None:
        self._folder, self._text, self._echo = run_dir / "events", text, echo
        self._shown = ""
        self._logs: dict[Path, LogReader] = {}
        self.tokens: list[Token] = []

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_STREAM_PERIOD_S)
            self.show(whole=False)

    def show(self, whole: bool = True) -> None:
        """Print the text of the tokens since the last call; half a character only if ``whole``."""
        text = self._text.decode(self._all_tokens())
        if text is None or (text.endswith(UNFINISHED) and not whole):
            return
        if text.startswith(self._shown):
            self._echo(text[len(self._shown) :])
            self._shown = text

    def _all_tokens(self) -> list[int]:
        for path in self._folder.glob("*.log"):
            log = self._logs.setdefault(path, LogReader(path))
            self.tokens += [record for record in log if isinstance(record, Token)]
        return [token.token_id for token in self.tokens]


def _answer(run_dir: Path, record: RequestRecord, ids: list[int], text: _Text) -> dict[str, Any]:
    tokens = [token.token_id for token in record.tokens]
    return {
        "token_ids": tokens,
        "text": text.decode(tokens),
        "prompt_ids": ids,
        "status": record.status,
        "reason": record.reason,
        "ttft_s": record.tokens[0].at_s - record.arrived_at_s if tokens else None,
        "token_s": [token.at_s - token.ready_at_s for token in record.tokens],
        "run": str(run_dir),
    }

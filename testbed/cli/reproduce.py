"""``testbed bundle`` and ``testbed reproduce``: results that can be computed again, and papers' evaluations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from testbed.cli.helptext import Group, group
from testbed.cli.options import FirstSeedOption, JobsOption, JsonOption, out_option, print_answer, runs_option
from testbed.errors import UserError

RunsOption = Annotated[int, runs_option(" of every setting")]


def paper(
    only: Annotated[str | None, typer.Option(metavar="WHAT", help="tables or figures; default both.")] = None,
    runs: RunsOption = 20,
    seed: FirstSeedOption = 0,
    out: Annotated[
        Path | None,
        out_option("The results' folder; default runs/reproduce-paper. Runs in it are not run again."),
    ] = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the paper's evaluation and compare its printed numbers with ours.

    A stopped evaluation continues when it is started again.
    """
    from testbed.studies.reproduce.command import reproduce_command

    answer, text = reproduce_command(only, runs, seed, out, jobs)
    print_answer(answer, lambda: text, as_json)


def chain(
    runs: RunsOption = 20,
    seed: FirstSeedOption = 0,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the response times in Table I of the paper's successor with simulated ones."""
    from testbed.studies.reproduce.chain import chain_command

    answer, text = chain_command(runs, seed, jobs)
    print_answer(answer, lambda: text, as_json)


def helix(
    log: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with events.txt and query_route.txt (or .gz).")
    ] = None,
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="The cluster's .ini file.")] = None,
    tables: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with KIND_prompt.csv and KIND_decode.csv.")
    ] = None,
    warm_up: Annotated[
        float, typer.Option(metavar="SECONDS", help="Seconds at the log's start to leave out.")
    ] = 30.0,
    step_base: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time of a step besides its layers; default 0.004."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the queries of a log of Helix on their logged routes; compare measured and simulated latencies.

    --log, --cluster and --tables are files of Helix' artifact.
    """
    from testbed.studies.reproduce.helix import STEP_BASE_S, helix_command

    if log is None or cluster is None or tables is None:
        raise UserError("reproduce helix needs --log DIR, --cluster FILE and --tables DIR of Helix' artifact")
    answer, text = helix_command(
        log, cluster, tables, warm_up, STEP_BASE_S if step_base is None else step_base
    )
    print_answer(answer, lambda: text, as_json)


def of_bundle(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder that `testbed bundle` has written.")
    ],
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the results of a bundle again, and compare: exit code 0 if they are the same, else 1.

    The name may be left out: `testbed reproduce FOLDER`. Runs the code of the bundle's policies. What differs is
    named, with the versions that do.
    """
    from testbed.studies.bundle.reproduce import reproduce_bundle

    answer, text, code = reproduce_bundle(folder, jobs)
    print_answer(answer, lambda: text, as_json)
    raise typer.Exit(code)


def bundle(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULTS", help="The folder of a run, of a simulation (--out), of a sweep or of a score."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The bundle: a new folder.")],
    as_json: JsonOption = False,
) -> None:
    """Copy results with all that they were computed from into one folder, which `testbed reproduce` checks anywhere."""
    from testbed.studies.bundle.command import bundle_command

    answer, text = bundle_command(results, out)
    print_answer(answer, lambda: text, as_json)


_BUNDLE = "bundle"


class _OrFolder(Group):
    """Reads what is no name of a command as the folder of a bundle."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            if "/" not in args[0] and not Path(args[0]).exists():
                ctx.fail(f"No such command '{args[0]}', and there is no bundle in a folder of that name")
            args = [_BUNDLE, *args]
        return super().resolve_command(ctx, args)


reproduce_app = group(
    "Compute a bundle's results again, or a paper's evaluation, and put its printed numbers beside ours "
    "(docs/validation.md).\n\n`testbed reproduce FOLDER` is short for `testbed reproduce bundle FOLDER`.",
    {_BUNDLE: of_bundle, "paper": paper, "chain": chain, "helix": helix},
    cls=_OrFolder,
)

"""The `compress` command. A verb parses its arguments, calls one function and prints; heavy imports are inside the verbs.

Exit status: 0 finished; 3 finished with a missed goal, 4 with one that was not judged as the machine was busy (everything is
written); 2 wrong input (one line for each problem); 1 internal error.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compress.commands import arguments, launch
from compress.commands.arguments import Out, Project, RecipeFile, RunFolder, Settings, Tracked, Uri, Verbose, Version
from compress.commands.exit_status import end_now, finish
from compress.commands.options import (
    AnswerOptions,
    DecodingOptions,
    LoadOptions,
    OutputOptions,
    PortOptions,
    RowOptions,
    ServerOptions,
    with_options,
)
from foundation.core.errors import InputError
from foundation.core.shown import pasted
from foundation.machine.parallel import is_launched, joined
from foundation.machine.waits import bounded_spin

if TYPE_CHECKING:
    from compress.commands.run_json import RunJson
    from compress.recipe import Recipe
    from compress.report.model.contents import Contents

app = typer.Typer(
    name="compress",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Compress fine-tuned Transformers to true int8, serve them with Triton, and measure accuracy and latency on the way.",
    epilog="Try it: compress run quickstart. "
    "Your model: compress init --task text-classification -o recipe.yaml; compress plan recipe.yaml; compress run recipe.yaml",
)


@app.callback()
def main(
    version: Version = False,
) -> None:
    """Does nothing: the options of `compress` itself end the command."""
    os.environ.update(bounded_spin())  # torch reads it when it is loaded


@app.command()
def init(
    task: Annotated[str | None, typer.Option("--task", help="What the model is for: a line of `compress list tasks`.")] = None,
    recipe: Annotated[str | None, typer.Option("--recipe", metavar="NAME", help="Copy a shipped recipe instead.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The file to write; never overwritten.")] = Path("recipe.yaml"),
) -> None:
    """Write a commented recipe to edit: one for a task, or a copy of a shipped one."""

    def work() -> None:
        from compress.commands.init import write_copy, write_template

        if (task is None) == (recipe is None):
            raise InputError(
                "init", "give either --task TASK or --recipe NAME", remedy="`compress list tasks` and `compress list recipes` show them"
            )
        written = write_copy(recipe, output) if recipe else write_template(str(task), output)
        typer.echo(f"{written}: edit it, then run: {pasted('compress', 'plan', output)}")

    finish(work)


@app.command()
def plan(
    recipe: RecipeFile,
    settings: Settings = None,
    out: Out = None,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="8x80GB[,nvlink][,3.35TB/s]", help="Devices to fit training and serving on.")
    ] = None,
    streams: Annotated[int | None, typer.Option("--streams", min=1, help="With --devices: answers, or rows, served at once.")] = None,
    budget: arguments.Budget = False,
    verbose: Verbose = False,
) -> None:
    """Check the recipe and predict size, FLOPs, disk space, memory and time, without loading weights; with --budget, train a little."""

    def work() -> None:
        checked = _read(recipe, settings)
        from compress.commands.plan import plan as look_ahead

        found = look_ahead(checked, out, devices, streams)
        typer.echo(found.text)
        if found.refused:
            raise InputError.of(found.refused)
        if budget:
            from compress.budget.page import describe

            typer.echo("\n" + describe(checked))

    finish(work, verbose)


@app.command(
    epilog="Examples: compress run recipe.yaml --set data.max_length=64; compress run recipe.yaml --from quantize; "
    "torchrun --nproc_per_node=2 $(which compress) run recipe.yaml; compress run recipe.yaml --json | jq .event"
)
@with_options
def run(
    recipe: RecipeFile,
    out: Out = None,
    settings: Settings = None,
    start: Annotated[str | None, typer.Option("--from", metavar="ID", help="Run this stage and every later one again.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Run every stage again.")] = False,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Processes that train together, on this machine.")] = 1,
    *,
    output: OutputOptions,
) -> None:
    """Run a recipe. Resumable: finished stages are skipped."""
    os.environ.update(launch.from_slurm(os.environ))
    launches, first = processes > 1 and not is_launched(), os.environ.get("RANK", "0") == "0"
    events = None
    if output.as_json and not launches:  # the processes that are launched have events
        from compress.commands.run_json import RunJson

        events = RunJson.on_stdout(first)

    def work() -> int:
        if launches:
            return launch.start(processes, [sys.executable, *sys.argv])
        checked = launch.refused_once(partial(_read, recipe, settings), first)
        progress = output.progress() if events is None else events.progress(output.quiet)
        if first:
            progress.log(f"{checked.name}: loading libraries")
        with progress.alive("loading libraries"):
            from compress.pipeline import run as run_recipe

        with joined(partial(end_now, events)) as team:
            outcome = run_recipe(checked, out, start=start, force=force, progress=progress, team=team)
        if not team.is_first:
            return 0
        return _conclude(outcome.folder, outcome.contents, events)

    finish(work, output.verbose, events)


@app.command(
    epilog="Examples: compress search sst2-minilm-search; compress search recipe.yaml --set search.budget.trials=60; "
    "the same command resumes where it was stopped, and a second one next to it helps"
)
def search(
    recipe: RecipeFile,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="The search folder; default: searches/<name>.")] = None,
    settings: Settings = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only warnings and the result.")] = False,
    verbose: Verbose = False,
) -> None:
    """Search for the best settings of a recipe; its key `search` lists what may change. Resumable, and shared by several processes."""

    def work() -> int:
        checked = _read(recipe, settings)
        from compress.search.search import search as search_recipe
        from compress.search.summary import summary
        from foundation.core.progress import ConsoleProgress

        outcome = search_recipe(checked, out, progress=ConsoleProgress("quiet" if quiet else "verbose" if verbose else "normal"))
        for line in summary(outcome.contents, outcome.folder):
            typer.echo(line)
        return 3 if outcome.missed else 0

    finish(work, verbose)


@app.command()
def report(folder: RunFolder, verbose: Verbose = False) -> None:
    """Rebuild report.html and report.json from the manifests of a run."""

    def work() -> int:
        from compress.commands.verify import rebuild

        return _conclude(folder, rebuild(folder))

    finish(work, verbose)


@app.command(epilog="Examples: compress track runs/sst2-minilm; compress track runs/sst2-minilm --mlflow http://127.0.0.1:5000")
def track(folder: RunFolder, mlflow: Uri = None, experiment: Tracked = "compress", wandb: Project = None, verbose: Verbose = False) -> None:
    """Send a run to MLflow or W&B: what is missing there, or all of it."""

    def work() -> None:
        from compress.commands.track import track as send

        typer.echo(send(folder, mlflow, experiment, wandb=wandb))

    finish(work, verbose)


@app.command(epilog="Examples: compress compare runs/ptq runs/qat; compress compare runs/6-layers runs/3-layers runs/2-layers --out layers")
def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Two or more run folders, of one task; the first is the reference.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder to write; default: comparisons/<names of the runs>.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Compare runs on one page, compare.html: accuracy against latency, ledgers, recipe differences, and paired intervals."""

    def work() -> None:
        from compress.compare.document import compare as compare_runs
        from compress.compare.summary import summary

        for line in summary(*compare_runs(folders, out)):
            typer.echo(line)

    finish(work, verbose)


@app.command(
    epilog="Examples: compress bench runs/my-classifier; "
    "compress bench --server 127.0.0.1:8001 --data reviews.jsonl --rate 50 --rate 100 --seconds 30; "
    "compress bench runs/my-classifier --server http://127.0.0.1:8000 --concurrency 1 --concurrency 16 --json load.json"
)
@with_options
def bench(
    folder: Annotated[Path | None, typer.Argument(help="A run folder; with --server, its evaluation rows are sent.")] = None,
    *,
    at: ServerOptions,
    load: LoadOptions,
    source: RowOptions,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures, with machine and versions.")] = None,
    verbose: Verbose = False,
) -> None:
    """Measure the latency of every engine of a run again, at every shape; or, with --server, a running Triton server under load."""

    def work() -> int:
        if folder is None or (at, load, source, out) != (ServerOptions(), LoadOptions(), RowOptions(), None):
            raise InputError(
                "bench", "", remedy="give a run folder alone, or --server URL with a run folder or --data FILE, and what is to be sent"
            )
        from compress.pipeline import measure_again
        from foundation.core.progress import ConsoleProgress

        outcome = measure_again(folder, ConsoleProgress("verbose" if verbose else "normal"))
        return _conclude(outcome.folder, outcome.contents)

    def load_test() -> None:
        from compress.commands.load_test import Rows, load_test

        if load.rate and load.concurrency:
            raise InputError("bench", "--rate and --concurrency given", remedy="give one of the two, each as often as you like")
        rows = Rows(folder, source.data, tuple(source.column or ()))
        load_test(str(at.server), rows, load.loads(), model=at.model, protocol=at.protocol, ca=at.ca, out=out, say=typer.echo)

    finish(work if at.server is None else load_test, verbose)


@app.command(
    epilog='Examples: compress generate runs/my-language-model --prompt "Once upon a time"; '
    'compress generate runs/my-language-model --prompt "Once" --compare baseline; '
    'compress generate runs/my-language-model --prompt "Once" --beams 4 --answers 3 --length-penalty 0.7; '
    'compress generate runs/my-language-model --prompt "Once" --stop "." --stop-token 2'
)
@with_options
def generate(
    folder: RunFolder,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="The prompt; repeatable. Default: every line of standard input.")
    ] = None,
    *,
    wanted: AnswerOptions,
    decoding: DecodingOptions,
    verbose: Verbose = False,
) -> None:
    """Let a language model of a run answer prompts, token by token."""

    def work() -> None:
        from compress.commands.generate import generate as answer

        prompts = iter(prompt) if prompt else (line.rstrip("\n") for line in sys.stdin if line.strip())

        def note(line: str) -> None:
            typer.echo(line, err=True)

        answer(folder, prompts, decoding.decoding(), wanted, write=_write, note=note)

    finish(work, verbose)


@app.command()
@with_options
def serve(
    folder: RunFolder,
    *,
    at: PortOptions,
    everything: Annotated[bool, typer.Option("--all", help="Load every model, not only the served ones.")] = False,
    address: Annotated[
        str, typer.Option("--address", metavar="IP", help="Address to listen on; any but loopback needs keys and TLS.")
    ] = "127.0.0.1",
    tls: Annotated[
        tuple[Path, Path] | None, typer.Option("--tls", metavar="CERTIFICATE KEY", help="Certificate with its chain, and its key, as PEM.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Start Triton on the model repository of a run or a deployment, in the foreground; stop it with Ctrl-C."""

    def work() -> None:
        from compress.commands.serve import serve as serve_run
        from triton_repo.entrance import Entrance

        certificate, key = ("", "") if tls is None else map(str, tls)
        ports = at.grpc_port, at.http_port, at.metrics_port
        serve_run(folder, typer.echo, ports, everything, Entrance(address, certificate, key, at.grpc))

    finish(work, verbose)


@app.command(epilog="Example: compress serve runs/a, and in another terminal: compress rollout runs/a runs/b")
def rollout(
    served: Annotated[Path, typer.Argument(metavar="SERVED", help="The folder that `compress serve` serves.")],
    new: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run with the new versions, or a deployment of one.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The model; default: every served one that the run has.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Roll the models of a running server over to another run's: loaded, checked on its golden rows, then served; none fails."""

    def work() -> None:
        from compress.commands.rollout import rollout as roll_out

        roll_out(served, new, model=model, log=typer.echo)

    finish(work, verbose)


@app.command()
def verify(
    folder: RunFolder,
    live: Annotated[bool, typer.Option("--live", help="Also start Triton and check the served models.")] = False,
    url: arguments.CheckedServer = None,
    ca: arguments.TrustedCertificates = "",
    kept: arguments.StoredReport = None,
    verbose: Verbose = False,
) -> None:
    """Check hashes, manifests, links and report, reload the engines and compare their logits on the golden rows."""

    def work() -> int:
        from compress.commands.verify import verify as verify_run

        problems = verify_run(folder, live=live, url=url, ca=ca, report=kept, log=typer.echo)
        for problem in problems:
            typer.echo(problem, err=True)
        return 2 if problems else 0

    finish(work, verbose)


@app.command()
def deploy(
    folder: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write, outside of the run.")],
    everything: Annotated[bool, typer.Option("--all", help="Copy every model, not only the served ones.")] = False,
    verbose: Verbose = False,
) -> None:
    """Copy the served models of a run's model repository to a new folder, every byte checked; the run is never written to."""

    def work() -> None:
        from compress.commands.serve import deploy as deploy_run

        deploy_run(folder, out, typer.echo, everything)

    finish(work, verbose)


@app.command(
    epilog="Examples: compress publish runs/sst2-minilm --variant quantize --as onnx sst2-onnx; "
    "HF_TOKEN=... compress publish runs/sst2-minilm --variant quantize --as openvino sst2-openvino --push my-team/sst2-int8"
)
def publish(
    folder: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write, new or empty, outside of the run.")],
    *,
    variant: Annotated[str, typer.Option("--variant", metavar="ID", help="The variant: the id of the stage that made it, or baseline.")],
    form: Annotated[str, typer.Option("--as", metavar="FORMAT", help="transformers, compressed-tensors, onnx, openvino or gguf.")],
    push: arguments.Pushed = None,
    licence: arguments.Licence = None,
    verbose: Verbose = False,
) -> None:
    """Write a variant as a folder that other programs load, with a model card; nothing is sent anywhere without --push."""

    def work() -> None:
        from compress.commands.publish import publish as publish_variant

        publish_variant(folder, out, variant=variant, form=form, push=push, licence=licence, log=typer.echo)

    finish(work, verbose)


@app.command()
def mcp(verbose: Verbose = False) -> None:
    """Serve plan, run, status, stop, report and verify as tools of the Model Context Protocol, on standard input and output."""

    def work() -> None:
        from compress.commands.mcp import serve as serve_tools

        serve_tools()

    finish(work, verbose)


@app.command()
def clean(folder: RunFolder, verbose: Verbose = False) -> None:
    """Remove stages that the last recipe no longer uses."""

    def work() -> None:
        from compress.commands.clean import clean as clean_run

        for removed in clean_run(folder):
            typer.echo(f"removed {removed}")

    finish(work, verbose)


@app.command("list")
def list_(
    what: Annotated[str, typer.Argument(help="stages, methods, engines, tasks or recipes.")] = "stages",
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of a recipe, for editors.")] = False,
    verbose: Verbose = False,
) -> None:
    """List what a recipe can name."""

    def work() -> None:
        from compress.commands.list import catalogue, schema_text

        typer.echo(schema_text() if schema else catalogue(what))

    finish(work, verbose)


@app.command()
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="Build the server environment if it is missing.")] = False, verbose: Verbose = False
) -> None:
    """Show what works on this machine, what is missing, and how to install it."""

    def work() -> None:
        from compress.commands.doctor import examine

        for line in examine(fix=fix):
            typer.echo(line)

    finish(work, verbose)


def _write(piece: str) -> None:
    """Prints a piece of an answer at once."""
    typer.echo(piece, nl=False)
    sys.stdout.flush()


def _read(recipe: Path, settings: list[str] | None) -> "Recipe":
    """Checks the recipe before a verb imports what runs it: a typo is reported without waiting for torch."""
    from compress.api import load_recipe

    return load_recipe(recipe, settings or [])


def _conclude(folder: Path, contents: "Contents", events: "RunJson | None" = None) -> int:
    """Prints the outcome of the run from the contents of `report.json`, or hands it to the events; returns the exit status."""
    from compress.report.goals import missed, unjudged_busy
    from compress.report.summary import summary

    if events is not None:
        events.finished(folder, contents)
    else:
        for line in summary(contents, folder):
            typer.echo(line)
    return 3 if missed(contents) else 4 if unjudged_busy(contents) else 0


if __name__ == "__main__":
    app()

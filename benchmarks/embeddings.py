"""Sentence vectors in int8, ours beside those that sentence-transformers itself exports: Spearman, cosines with fp32, latency.

    python benchmarks/embeddings.py --model FOLDER --data FOLDER --packages FOLDER [--run RUN] [--out FOLDER] [--no-latency]

`--model` is a model of sentence-transformers, `--data` holds the files of STS-B as their authors distribute them. `--packages` is a folder
that sentence-transformers, Optimum and the Transformers that they ask for were installed in, with `pip install --target FOLDER --no-deps`;
they share torch, ONNX Runtime and OpenVINO with us. `--run` takes a finished run of the recipe stsb-embedding in place of a new one.

Every engine answers all texts of the test split. Interval: paired bootstrap over pairs, against fp32 in torch. Latency: tokens to vectors,
every engine in a process of its own, the processes take turns. Writes OUT/embeddings.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.pipeline import run
from compress.reading.load import load_data
from compress.recipe import Recipe, read
from compress.report import evaluations
from compress.report.intervals import paired
from export.engines.spec import spec_of
from foundation.artifacts.run_folder import Run, open_run
from foundation.core.progress import ConsoleProgress
from foundation.data.splits import Data
from foundation.labels.vectors import cosines
from foundation.machine.environment import fingerprint
from foundation.measure.answers import load_logits
from foundation.measure.engine_process import EngineProcess
from foundation.measure.latency import measure
from foundation.measure.metrics import METRICS
from foundation.stage.context import Job

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).parent / "workers" / "sentence_transformers_worker.py"
SHAPES = [(1, 32), (8, 128)]
CALIBRATION_ROWS = 300
"""As many as sentence-transformers takes by default; ours takes its own default from the same split."""
FLOAT = "torch fp32"
SPEARMAN = METRICS["spearman"]
THEIRS = {
    "sentence-transformers, torch fp32": ("torch", "", "fp32"),
    "sentence-transformers, ONNX fp32": ("onnx", "onnx/model.onnx", "fp32"),
    "sentence-transformers, ONNX dynamic int8": ("onnx", "onnx/model_qint8_avx512_vnni.onnx", "int8"),
    "sentence-transformers, OpenVINO fp32": ("openvino", "openvino/openvino_model.xml", "fp32"),
    "sentence-transformers, OpenVINO static int8": ("openvino", "openvino/openvino_model_qint8_quantized.xml", "int8"),
}
"""Backend, file and precision of each of their models."""


@dataclass(frozen=True)
class Theirs:
    """A model of sentence-transformers as `measure` and `EngineProcess` take it."""

    backend: str
    file: str
    precision: str
    model: Path
    folder: Path
    """Where our preprocess.json lies: texts of made-up tokens are the same for all."""
    max_length: int
    threads: int

    @property
    def labels(self) -> dict[str, str]:
        """What messages name it by."""
        labels = {"engine": self.backend, "mode": "sentence-transformers", "precision": self.precision}
        return {**labels, "float_precision": "fp32", "device": "cpu"}

    @property
    def command(self) -> list[str]:
        """Command line of its process."""
        return [sys.executable, str(WORKER), "serve"]

    def message(self) -> dict[str, Any]:
        """What opens it."""
        names = ("backend", "file", "max_length", "threads")
        return {**{name: getattr(self, name) for name in names}, "model": str(self.model), "folder": str(self.folder)}


def main() -> None:
    """Exports ours and theirs, asks all of them, prints the table."""
    arguments = parse()
    recipe, progress = recipe_of(arguments), ConsoleProgress()
    ours = open_run(arguments.run or run(recipe, arguments.out / "run", progress=progress).folder)
    data = load_data(recipe.data, recipe.model.task, None, print)
    with packages(arguments.packages):
        theirs = exported(arguments.model, data, arguments.out / "theirs")
        jobs = engines(ours, recipe, arguments.model, theirs)
        answers = {FLOAT: load_logits(ours.predictions("baseline"))}
        for name, job in jobs.items():
            with EngineProcess(job) as process:
                answers[name] = process.predict(data.evaluation.rows, 32)
        rows = measure(list(jobs.values()), SHAPES, progress) if arguments.latency else []
    document = {
        "environment": fingerprint(),
        "accuracy": {name: judged(answers[FLOAT], vectors, data) for name, vectors in answers.items()},
        "latency": [{"name": list(jobs)[job], **row.written()} for job, row in rows],
    }
    (arguments.out / "embeddings.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(table(document))


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model of sentence-transformers")
    parser.add_argument("--data", type=Path, required=True, help="folder with the files of STS-B")
    parser.add_argument("--packages", type=Path, required=True, help="folder that sentence-transformers is installed in")
    parser.add_argument("--run", type=Path, help="a finished run of stsb-embedding with this model")
    parser.add_argument("--out", type=Path, default=Path("runs/embeddings"), help="where to work")
    parser.add_argument("--no-latency", dest="latency", action="store_false", help="leave latencies out: for a machine with other work")
    return parser.parse_args()


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    """Returns the recipe of our int8."""
    test = "{file: sts-test.tsv, header: false, columns: {text: 5, text_pair: 6, label: 4}}"
    settings = [
        f"model.path={arguments.model}",
        f"data.path={arguments.data}",
        "data.subset=null",
        "data.columns={text: sentence1, text_pair: sentence2, label: score}",
        f"data.files={{train: train.tsv.gz, validation: dev.tsv, test: {test}}}",
        "target.batch_sizes=[1, 8]",
        "target.sequence_lengths=[32, 128]",
        "stages=[{quantize: {mode: ptq}}, {export: {}}]",
    ]
    return read(ROOT / "recipes" / "stsb-embedding.yaml", settings)


@contextmanager
def packages(folder: Path) -> Iterator[None]:
    """Puts a folder of packages, and the root of this project, on the import path of processes that are started."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(folder), *([before] if before else [])])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if before is None else {"PYTHONPATH": before})


def exported(model: Path, data: Data, out: Path) -> Path:
    """Returns the folder of everything that sentence-transformers exports; a finished export is taken as it is."""
    if not (out / THEIRS["sentence-transformers, OpenVINO static int8"][1]).exists():
        out.mkdir(parents=True, exist_ok=True)
        sentences = out / "calibration.txt"
        sentences.write_text("\n".join(map(str, data.calibration(CALIBRATION_ROWS, 0).rows)) + "\n", encoding="utf-8")
        subprocess.run([sys.executable, str(WORKER), "export", str(model.resolve()), str(sentences), str(out)], check=True)
    return out


def engines(ours: Run, recipe: Recipe, model: Path, theirs: Path) -> dict[str, Job]:
    """Returns every engine by the name that it has in the table."""
    artifact = ours.of_kind("engine")
    assert artifact is not None
    jobs: dict[str, Job] = {}
    for build in evaluations.exported(ours).builds:
        for entry in build.engines:
            static = entry.mode == "static" or entry.engine != "openvino"  # OpenVINO's dynamic shapes answer as its static ones
            if static and entry.engine != "torch" and (build.precision == "int8" or entry.float_precision == "fp32"):
                rest = f", rest {entry.float_precision}" if build.precision == "int8" else ""
                name = f"ours: {entry.engine} {build.precision}, {entry.mode}{rest}"
                jobs[name] = spec_of(artifact.path, build, entry, recipe.target)
    folder = artifact.path / evaluations.exported(ours).builds[0].folder
    for name, (backend, file, precision) in THEIRS.items():
        source = model.resolve() if backend == "torch" else theirs
        jobs[name] = Theirs(backend, file, precision, source, folder, recipe.data.max_length, recipe.target.num_threads)
    return jobs


def judged(reference: Any, vectors: Any, data: Data) -> dict[str, Any]:
    """Returns Spearman of the pairs, what it lost against fp32 with its interval, and the cosines with the vectors of fp32."""
    alike, labels = cosines(reference, vectors), data.evaluation.labels
    change = paired(SPEARMAN, reference, vectors, labels)
    return {
        "spearman": SPEARMAN.of(*labels.values(vectors)),
        **{key: getattr(change, key) for key in ("difference", "low", "high", "n")},
        "cosine": float(np.mean(alike)),
        "lowest_cosine": float(np.min(alike)),
    }


def table(document: Mapping[str, Any]) -> str:
    """Returns the result as a Markdown table."""
    shapes = [f"{batch}x{sequence}" for batch, sequence in SHAPES] if document["latency"] else []
    heads = ["vectors", "Spearman", "points lost, 95 %", "mean cosine with fp32", "lowest", *(f"{shape}, p50 ms" for shape in shapes)]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    times = {(row["name"], f"{row['batch']}x{row['sequence']}"): f"{row['p50_ms']:.2f}" for row in document["latency"]}
    for name, found in document["accuracy"].items():
        lost = "" if name == FLOAT else f"{100 * found['difference']:+.2f} ({100 * found['low']:+.2f} to {100 * found['high']:+.2f})"
        cells = [name, f"{found['spearman']:.4f}", lost, f"{found['cosine']:.6f}", f"{found['lowest_cosine']:.6f}"]
        lines.append(f"| {' | '.join([*cells, *(times.get((name, shape), '') for shape in shapes)])} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

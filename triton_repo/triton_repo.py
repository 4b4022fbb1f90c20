"""The stage `triton_repo`: a Triton model repository that has been started, asked the whole evaluation set, and timed.

    exported engines -> model_repository/ -> real server -> every evaluation row over gRPC -> metrics, agreement with the engine, latency

Each model is served alone while it is asked, so that no other one takes its memory or its cores. Its answers have to be those of the
engine that was evaluated: the label of at most max(1, 0.1 %) rows may differ, and the median |dlogit| is at most 0.02, or the stage fails.
(In static mode they are equal to the bit; a larger difference means that something else is served than was measured.) Everything that
was measured stands in triton.json, the logits beside it.

For a target with a GPU the repository is that of `triton_repo.plans`: its plans are built where TensorRT is; nothing is started here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from compress.artifacts.artifact import Artifact, Kind, write_json
from compress.core.engines import served_on
from compress.core.errors import InputError
from compress.core.tasks import TASKS, Task
from compress.stage.context import Context
from compress.stage.stage import Stage

if TYPE_CHECKING:
    from triton_repo.server import TritonServer

REPOSITORY, GPU_REPOSITORY, RESULTS, SCHEMA = "model_repository", "model_repository_gpu", "triton.json", 1
GPU_SPEC = "gpu.json"
EVALUATION_CONCURRENCY = 16
"""Requests under way while the evaluation set is sent: enough that batches form."""
MEDIAN_LIMIT = 0.02
GOLDEN_ROWS = 64


class ServedWrong(RuntimeError):
    """The server does not answer what the engine answered; one line."""


class TritonRepo(Stage):
    """Writes a Triton model repository, starts the server on it and measures it."""

    NAME: ClassVar[str] = "triton_repo"
    PRODUCES: ClassVar[Kind] = "model_repository"

    serve: bool = True
    """Whether to start the server and measure; false only writes the files. Never done for `target.device: cuda`."""
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Most rows of one request and of merged ones; the largest of `target.batch_sizes`, and at least 8, where absent."""
    instances: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that run a model side by side, each with all of the target's threads and its own copy of the weights."""
    max_queue_delay_us: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """How long (microseconds) a request waits for others to be merged with. 0: only those are merged that came while the model was busy."""
    concurrency: Annotated[tuple[Annotated[int, Field(ge=1, le=256)], ...], Field(min_length=1)] = (1, 4)
    """Numbers of requests under way at a time, at which latency is measured."""

    def depends(self, context: Context) -> Any:
        """Returns the versions of what the server runs on.

        Raises:
            InputError: The server environment is missing or does not work.
        """
        from triton_repo import environment

        return dict(environment.check().versions) if self._starts(context) else None

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes `model_repository/`, `triton.json` and the logits of every model.

        Returns:
            `models`: name, metrics and number of disagreements of each.

        Raises:
            InputError: No engine that can be served was exported, or the server environment is missing.
            ServerError: The server did not start.
            RequestError: It did not answer a row.
            ServedWrong: Its answers are not the engine's.
        """
        if context.target.device == "cuda":
            gpu, layout = self._write_gpu(parent, context, out / REPOSITORY)
            results: dict[str, Any] = {"schema": SCHEMA, "layout": layout, "models": [gpu]}
        else:
            results = self._write_cpu(parent, context, out)
            if served_on("cuda") in context.target.engines:  # for the machines that have a GPU: beside the repository that was checked here
                results["gpu"], _ = self._write_gpu(parent, context, out / GPU_REPOSITORY)
        write_json(out / RESULTS, results)
        return _summary(results)

    def _write_cpu(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes the repository for the CPU, asks the server where it may, and returns the contents of triton.json."""
        from triton_repo.layout import served_models, write_repository

        models = served_models(parent)
        write_repository(
            out / REPOSITORY,
            models,
            pairs=isinstance(context.data.evaluation.rows[0], tuple),
            batch_sizes=context.target.batch_sizes,
            max_batch_size=self.max_batch_size,
            instances=self.instances,
            max_queue_delay_us=self.max_queue_delay_us,
        )
        results: dict[str, Any] = {"schema": SCHEMA, "layout": "single", "models": []}
        if self.serve:
            from triton_repo import environment

            results["versions"] = dict(environment.check().versions)
        for model in models:
            entry = {"model": model.name, "variant": model.variant, "precision": model.precision, "engine": model.engine["engine"]}
            entry["mode"] = model.engine["mode"]
            results["models"].append(entry | (self._measure(model, context, out) if self.serve else _unasked("serve: false")))
        return results

    def _write_gpu(self, parent: Artifact, context: Context, folder: Path) -> tuple[dict[str, Any], str]:
        """Writes the repository for GPUs from the last variant, its int8 where there is one; returns its part of triton.json and layout."""
        from compress.measure.answers import load_predictions
        from compress.standalone.preprocess import Preprocessor
        from triton_repo.config import MIN_BATCH
        from triton_repo.layout import EXPORTED
        from triton_repo.plans import write_gpu_repository

        builds = json.loads((parent.path / EXPORTED).read_text(encoding="utf-8"))["builds"]
        build = [one for one in builds if one["precision"] != "bf16"][-1]
        known = next((engine for engine in build["engines"] if engine.get("predictions")), None)
        if known is None:
            raise InputError("target.engines: no engine that runs here was built, so there are no golden answers; add torch or onnxruntime")
        logits, _ = load_predictions(parent.path / known["predictions"])
        rows = context.data.evaluation.rows
        chosen = np.linspace(0, len(rows) - 1, min(GOLDEN_ROWS, len(rows))).round().astype(np.int64)
        name = f"{build['variant']}-{build['precision']}"
        figures = write_gpu_repository(
            folder,
            parent.path / build["onnx"],
            Preprocessor.load(parent.path / build["folder"]),
            [rows[index] for index in chosen],
            logits[chosen],
            name=name,
            max_batch_size=self.max_batch_size or max(MIN_BATCH, *context.target.batch_sizes),
        )
        entry = {"model": name, "variant": build["variant"], "precision": build["precision"], "engine": served_on("cuda"), "mode": "static"}
        return entry | _unasked(str(figures["reason"])), str(figures["layout"])

    def _starts(self, context: Context) -> bool:
        return self.serve and context.target.device == "cpu"

    def _measure(self, model: Any, context: Context, out: Path) -> dict[str, Any]:
        """Serves one model alone, asks it everything, and returns its part of triton.json."""
        from compress.measure.answers import save_predictions
        from compress.measure.metrics import metrics
        from triton_repo import client, environment
        from triton_repo.server import TritonServer

        split = context.data.evaluation
        log = context.scratch / f"triton-{model.name}.log"
        with TritonServer(out / REPOSITORY, environment.check(), log, models=[model.name]) as server:
            with context.progress.bar(f"triton {model.name}", len(split.rows)) as advance:
                answers = client.evaluate(server.grpc_address, model.name, split.rows, EVALUATION_CONCURRENCY, advance)
            latency = [client.latency(server.grpc_address, model.name, split.rows, concurrency) for concurrency in self.concurrency]
        predictions = f"{model.name}.safetensors"
        save_predictions(out / predictions, answers.logits, split.labels)
        figures = metrics(context.task, answers.logits, split.labels)
        compared = compare(model, context.task, answers, split.labels)
        context.progress.log(
            f"  {model.name} in Triton: {TASKS[context.task].metric} {figures[TASKS[context.task].metric]:.4f} (n={len(split.rows)}), "
            f"{_told(compared)}, p50 {latency[0]['p50_ms']:.2f} ms"
        )
        return {"metrics": figures, "n": len(split.rows), "predictions": predictions, **compared, "latency": latency}


def compare(model: Any, task: Task, answers: Any, labels: NDArray[Any]) -> dict[str, Any]:
    """Compares what the server answered with its own logits, and these with the engine's.

    Args:
        model: The `Served` model.
        task: Regression has no classes that could differ; its differences are in standard deviations of the labels.
        answers: The `Answers` of the server.
        labels: Labels of the evaluation split.

    Returns:
        `disagreements` (rows with another label than the engine's), `median_abs` and `max_abs` (of logit differences); all None where the
        engine's predictions are not known.

    Raises:
        ServedWrong: They differ by more than the limits.
    """
    from compress.measure.answers import load_predictions
    from compress.standalone.preprocess import Preprocessor

    names = Preprocessor.load(model.folder).labels
    own = [names[index] for index in answers.logits.argmax(axis=1)]
    if own != answers.labels:
        row = next(index for index, (expected, given) in enumerate(zip(own, answers.labels, strict=True)) if expected != given)
        raise ServedWrong(f"model {model.name} answers {answers.labels[row]!r} to row {row}, but its logits say {own[row]!r}")
    if model.predictions is None:
        return {"disagreements": None, "median_abs": None, "max_abs": None}
    expected, _ = load_predictions(model.predictions)
    difference = np.abs(answers.logits.astype(np.float64) - expected)
    if TASKS[task].answer == "value":
        difference /= float(np.std(labels.astype(np.float64))) or 1.0
    other = np.flatnonzero(answers.logits.argmax(axis=1) != expected.argmax(axis=1))
    median, limit = float(np.median(difference)), max(1, len(expected) // 1000)
    if len(other) > limit or median > MEDIAN_LIMIT:
        first = f", first row {other[0]}" if len(other) else ""
        raise ServedWrong(
            f"model {model.name} does not answer what its engine answered: {len(other)} of {len(expected)} labels differ{first} "
            f"(at most {limit}), median |dlogit| {median:.4f} (at most {MEDIAN_LIMIT})"
        )
    return {"disagreements": len(other), "median_abs": median, "max_abs": float(difference.max())}


def server_of(repository: Path, log: Path) -> TritonServer:
    """Returns the server of a repository, which runs for as long as it is entered.

    Args:
        repository: The folder `model_repository`.
        log: File for the output of the server.

    Raises:
        InputError: The repository cannot be served here, or the server environment is missing.
    """
    from triton_repo import environment
    from triton_repo.server import TritonServer

    if (repository / GPU_SPEC).exists():
        raise InputError(f"{repository}: for GPUs; its plans are built and served in NVIDIA's container, see {repository / 'README.md'}")
    if not model_names(repository):
        raise InputError(f"{repository}: no model in it; a folder that the triton_repo stage wrote is needed")
    return TritonServer(repository, environment.check(), log)


def model_names(repository: Path) -> list[str]:
    """Returns the models of a repository."""
    return sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))


def serve(repository: Path, log: Path, say: Callable[[str], None]) -> None:
    """Serves a repository in the foreground until it is interrupted.

    Args:
        repository: The folder `model_repository`.
        log: File for the output of the server.
        say: Takes the lines for the user.

    Raises:
        InputError: The repository cannot be served here, or the server environment is missing.
        ServerError: The server did not start, or ended by itself.
    """
    server = server_of(repository, log)
    say(f"starting Triton on {', '.join(model_names(repository))}; log: {log}")
    with server:
        say(f"ready: gRPC {server.grpc_address}, HTTP {server.http_address}, metrics {server.metrics_address}; Ctrl-C stops it")
        try:
            server.wait()
        except KeyboardInterrupt:
            say("stopping")
            return
        server.check_alive()


def _unasked(reason: str) -> dict[str, Any]:
    return {"metrics": {}, "n": 0, "predictions": None, "disagreements": None, "latency": [], "reason": reason}


def _told(compared: Mapping[str, Any]) -> str:
    if compared["disagreements"] is None:
        return "the engine's answers are not known"
    return f"against the engine {compared['disagreements']} flips, max |dlogit| {compared['max_abs']:.4f}"


def _summary(results: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("model", "metrics", "disagreements")
    return {"models": [{key: model[key] for key in keys} for model in results["models"]]}

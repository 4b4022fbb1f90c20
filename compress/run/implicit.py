"""The steps that the pipeline adds: the source model at the start, an evaluation in torch after each variant, latency after `export`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import field_serializer

from compress.run.warm_start import check_intact
from foundation.artifacts.artifact import Artifact, Kind, lineage
from foundation.artifacts.document import read
from foundation.artifacts.exported import Engine, Exported
from foundation.artifacts.timed import Generated, VariantProposedSpeed, VariantSpeed, VariantTiming, write_generated, write_latency
from foundation.core.engines import ENGINES, REFERENCE
from foundation.core.target import Target
from foundation.data.groups import groups_of_values
from foundation.labels.tasks import TASKS, Task
from foundation.measure.answers import save_predictions, write_row_adapters
from foundation.measure.fastest import competing
from foundation.measure.metrics import METRICS, metrics
from foundation.measure.predictions import predict
from foundation.measure.race import Race, Rival
from foundation.models.config import ModelConfig, most_tokens
from foundation.models.folder import Checkpoint
from foundation.models.importing import import_model, source_digest
from foundation.models.inputs.tokenizer import TrainTokenizer, resolve_tokenizer
from foundation.stage.context import Context
from foundation.stage.stage import Stage
from foundation.standalone.preprocess import Preprocessor, Row
from foundation.training.finetune import Finetune

if TYPE_CHECKING:
    from export.engines.spec import EngineSpec
    from foundation.machine.load import MachineLoad

BATCH_SIZE = 32
PREDICTIONS = "torch.safetensors"
EXPORTED = "export.json"


class Source(Stage):
    """Checks the model of the recipe and writes it as a checkpoint with the labels of the data."""

    NAME: ClassVar[str] = "model"
    VERSION: ClassVar[int] = 3

    model: ModelConfig
    """The model of the recipe."""
    tokenizer: str | TrainTokenizer | None
    """Tokenizer of a text model with random weights."""

    @field_serializer("model")
    def _by_digest(self, model: ModelConfig) -> dict[str, object]:
        """Leaves out where a checkpoint of another run is: the key holds its digest."""
        dumped = model.model_dump(mode="json")
        return dumped if model.run is None else {key: value for key, value in dumped.items() if key not in ("path", "run", "stage")}

    def depends(self, context: Context) -> object:
        """Returns the digest of the source model and the labels; the training rows do not matter."""
        tokenizer = resolve_tokenizer(self.tokenizer, context.data.tokenizer)
        # Earlier versions initialized every weight of such a model: their artifacts must not be reused.
        body = {"body": "kept"} if self.model.head == "new" and not context.facts.answer.FROM_HEAD else {}
        return {"source": source_digest(self.model, tokenizer), "labels": list(context.data.labels), **body}

    def run(self, parent: Artifact | None, context: Context, out: Path) -> Mapping[str, object]:
        """Writes the checkpoint; this step has no parent."""
        check_intact(self.model)
        tokenizer = resolve_tokenizer(self.tokenizer, context.data.tokenizer)
        progress = context.progress
        return import_model(self.model, context.data.labels, context.seed, out, tokenizer=tokenizer, log=progress.log, warn=progress.warn)


class Evaluate(Stage):
    """Evaluates a checkpoint in torch on the evaluation split; every row is padded to its bucket, as in the engines."""

    NAME: ClassVar[str] = "evaluate"
    VERSION: ClassVar[int] = 3
    PRODUCES: ClassVar[Kind] = "evaluation"

    def depends(self, context: Context) -> object:
        """Returns the digest of the groups that intervals draw, as documents are no part of the rows, and what was removed from train."""
        groups = hashlib.sha256(groups_of_values(context.data.evaluation).tobytes()).hexdigest()
        return {"groups": groups, "evaluation_rows": _shared(context)}

    def run(self, parent: Artifact, context: Context, out: Path) -> Mapping[str, object]:
        """Writes logits, labels and groups to `torch.safetensors` and returns the metrics with their n."""
        from foundation.machine.device import computing_device
        from foundation.measure import predictions
        from foundation.models.checkpoint import load
        from foundation.models.layers.adapter_stack import added_size
        from foundation.models.size import count

        split = context.data.evaluation
        processor = context.preprocessor(parent.path)
        if predictions.predicts_streamed(parent.path, context.task):
            model = Checkpoint(parent.path).config
            logits = predictions.predict_streamed(parent.path, processor, split.rows, BATCH_SIZE, context.scratch, context.progress)
        else:
            model = load(parent.path, computing_device())
            logits = predict(model, processor, split.rows, BATCH_SIZE, context.progress)
        save_predictions(out / PREDICTIONS, logits, split.labels, groups_of_values(split))
        write_row_adapters(out, split.rows)
        figures = metrics(context.task, logits, split.labels)
        count_judged = split.labels.count()
        name = context.facts.metric
        context.progress.log(f"  {parent.id} in torch: {name} {figures[name]:.4f} (n={count_judged})")
        if figures[name] == 0 and METRICS[name].higher_is_better and not parent.metrics.get("new_weights", True):
            context.progress.warn(
                f"{parent.id}: {name} is 0 on {count_judged} predictions, with a trained head: check that the data are those that the "
                "model was trained for, and that labels and columns are the right ones"
            )
        size = count(model, context.task, context.max_length)
        parameters, macs = added_size(model, context.max_length)
        sizes = {"parameters": size.parameters + parameters, "macs": size.macs + macs}
        return {
            "metrics": figures,
            "n": count_judged,
            "predictions": PREDICTIONS,
            **sizes,
            **_in_windows(processor, split.rows),
            "evaluation_rows": {**_shared(context), "sha256": split.digest},
        }


def _shared(context: Context) -> dict[str, int]:
    """Returns what the report says of rows that train and evaluation had in common."""
    shared = context.data.shared
    trained = shared.in_train if context.data.judge == "evaluation" else 0
    return {"left_out_of_train": shared.left_out, "in_train": trained}


def _in_windows(prepared: Preprocessor, rows: Sequence[Row]) -> Mapping[str, object]:
    """Returns `windows`, what the report says of rows that are read in windows; nothing where they are truncated."""
    if not prepared.aggregate:
        return {}
    how = {"max_length": prepared.max_length, "stride": prepared.stride, "aggregate": prepared.aggregate}
    return {"windows": {"rows": len(rows), "windows": len(prepared.divided(rows)[0]), **how}}


class Latency(Stage):
    """Measures the latency of every engine; each runs in its own process, and the processes take turns (`foundation.measure.latency`)."""

    NAME: ClassVar[str] = "latency"
    VERSION: ClassVar[int] = 4
    PRODUCES: ClassVar[Kind] = "latency"

    def depends(self, context: Context) -> object:
        """Returns the shapes at which a goal limits the p99, which takes more samples; None where there are none."""
        return [list(shape) for shape in sorted(_p99_shapes(context), key=str)] or None

    def run(self, parent: Artifact, context: Context, out: Path) -> Mapping[str, object]:
        """Writes `latency.json`: one row for each engine, mode and shape, in the order of the report; where engines answer prompts also
        `generation.json`: their speeds, with and without proposed tokens, and the read bandwidth of the machine."""
        from foundation.machine.load import Watch
        from foundation.measure.latency import measure

        jobs, watch = engine_jobs(parent, context), Watch()
        race = race_of(jobs, _p99_shapes(context)) if context.target.device == "cpu" else None
        timed = measure([spec for _, spec in jobs], shapes(context.task, context.target), context.progress, race, watch)
        rows = [VariantTiming(variant=jobs[number][0], **row.written()) for number, row in timed]
        machine = watch.summary()
        _tell(rows, machine, context)
        write_latency(out, rows)
        answered = _generation(parent, context)
        if answered is not None:
            write_generated(out, answered)
        return {"rows": len(rows), "machine": machine}


class BuiltEngine(NamedTuple):
    """A runnable engine that was built."""

    variant: str
    entry: Engine
    """Its entry of export.json."""
    spec: EngineSpec


def race_of(jobs: Sequence[tuple[str, EngineSpec]], p99: frozenset[tuple[int, int | None]]) -> Race:
    """Returns how engines compete: the reference in torch and the first engine of each variant are timed to the end in any case.

    Args:
        jobs: (variant, engine spec), the reference first.
        p99: Shapes at which a goal limits the p99.
    """
    rivals, seen = [], set()
    for number, (variant, spec) in enumerate(jobs):
        built = spec.engine != REFERENCE
        always = number == 0 or (built and variant not in seen)
        rivals.append(Rival(f"{variant} {spec.precision} {spec.float_precision}", always, _wider(variant, spec)))
        seen |= {variant} if built else set()
    return Race(rivals, p99)


def _wider(variant: str, spec: EngineSpec) -> str | None:
    """Returns the group of the same model with its float part in fp32; None where it is in fp32 itself."""
    if spec.float_precision == "fp32":
        return None
    return f"{variant} {'fp32' if spec.precision == spec.float_precision else spec.precision} fp32"


def _p99_shapes(context: Context) -> frozenset[tuple[int, int | None]]:
    return frozenset((goal.batch, goal.sequence) for goal in context.goals.max_latency_ms if goal.percentile == 99)


def _tell(rows: Sequence[VariantTiming], machine: MachineLoad, context: Context) -> None:
    """Warns where other work disturbed the timings."""
    disturbed, busy = sum(bool(row.estimated) for row in rows), sum(bool(row.busy) for row in rows)
    if not disturbed and not busy:
        return
    others = "" if machine["other_cores"] is None else f": other work took {machine['other_cores']:.1f} of its {machine['cores']} cores"
    context.progress.warn(
        f"latency: the machine was busy{others}. {disturbed} of {len(rows)} latencies are estimated from processor time, "
        f"{busy} are too noisy to judge goals on; `compress bench RUN` measures again"
    )


def _generation(exported: Artifact, context: Context) -> Generated | None:
    """Measures the engines that answer prompts; returns the contents of generation.json, None where there is none."""
    from compress.run.bandwidth import read_bandwidth
    from foundation.measure.generation import Reads, measure_generation, workloads

    jobs = [job for job in _built(exported, context) if ENGINES[job.spec.engine].generates]
    if not jobs:
        return None
    config, bandwidth = Checkpoint(context.baseline.path).config, read_bandwidth(context.target.num_threads)
    reads = []
    for job in jobs:
        assert job.entry.reads is not None, "the export notes what an engine that answers prompts reads"
        reads.append(Reads(**job.entry.reads))
    loads = workloads(most_tokens(config))
    rows = measure_generation([job.spec for job in jobs], reads, loads, config.vocab_size, bandwidth, context.progress)
    named = [
        VariantSpeed(
            variant=jobs[number].variant,
            cache_precision=jobs[number].entry.cache_precision,
            **{name: jobs[number].spec.labels[name] for name in ("engine", "mode", "precision", "float_precision")},
            **row.written(),
        )
        for number, row in rows
    ]
    measured = Generated(bandwidth_bytes_per_s=round(bandwidth), rows=named)
    proposals = _proposals(exported, jobs, context)
    return measured.with_(proposals=tuple(proposals)) if proposals else measured


def _proposals(exported: Artifact, jobs: Sequence[BuiltEngine], context: Context) -> list[VariantProposedSpeed]:
    """Measures the engines that tokens are proposed to; returns `proposals` of generation.json."""
    from export.engines.spec import proposed_to
    from foundation.measure.proposals import measure_proposals
    from foundation.measure.tokens import load_answers

    def recorded_by(job: BuiltEngine) -> Path:
        assert job.entry.generation is not None, "the export compares the answers of an engine that answers prompts"
        return exported.path / str(job.entry.generation.file)

    asked = [job for job in jobs if job.entry.speculation is not None]
    if not asked:
        return []
    pairs = [(job.spec, proposed_to(job.spec, exported.path, job.entry)) for job in asked]
    recorded = [load_answers(recorded_by(job)) for job in asked]
    tokens = int(recorded[0][1].shape[1])
    rows = measure_proposals(pairs, recorded, tokens, context.progress)
    return [VariantProposedSpeed(variant=asked[job].variant, **pairs[job][0].labels, **row.written()) for job, row in rows]


def shapes(task: Task, target: Target) -> list[tuple[int, int | None]]:
    """Returns the target shapes (batch, sequence) from small to large; the sequence is None for rows of one size, such as images."""
    facts = TASKS[task]
    lengths: list[int | None] = [*sorted(target.sequence_lengths)] if facts.has_lengths(target.sequence_lengths) else [None]
    if facts.two_towers:
        lengths = [None, *lengths]  # images have no length
    return [(batch, length) for batch in sorted(target.batch_sizes) for length in lengths]


def engine_jobs(exported: Artifact, context: Context) -> list[tuple[str, EngineSpec]]:
    """Returns (variant, engine spec) of every runnable engine: in torch (`in_torch`), then each build with its recommended mode first."""
    return [*in_torch(exported, context), *((job.variant, job.spec) for job in _built(exported, context))]


def in_torch(exported: Artifact, context: Context) -> list[tuple[str, EngineSpec]]:
    """Returns (variant, engine spec) of what is timed in torch: the baseline in fp32, which speed-ups refer to, and in bf16.

    On a GPU also what int8 has to beat there: the float model of the last variant in fp16 and bf16, eager and compiled, as far as
    torch can compile here.
    """
    from export.engines.spec import torch_spec
    from export.engines.torch import can_compile

    builds, baseline, target = read(Exported, exported.path / EXPORTED).builds, context.baseline, context.target
    folder = exported.path / builds[0].folder
    jobs = [(baseline.id, torch_spec(Checkpoint(baseline.path), folder, precision, target)) for precision in ("fp32", "bf16")]
    if target.device != "cuda":
        return jobs
    last = list(context.checkpoints)[-1]
    rival = competing(builds, lineage(last, context.checkpoints))[-1]
    compiles = can_compile()
    if not compiles:
        context.progress.warn(
            "torch compiled is not timed: no C++ compiler is on PATH; install g++, or int8 is compared with eager torch only"
        )
    for precision in ("fp16", "bf16"):
        for mode in ("eager", *(["compiled"] if compiles else [])):
            job = rival, torch_spec(Checkpoint(context.checkpoints[rival].path), folder, precision, target, mode)
            if (rival, precision, mode) != (baseline.id, "bf16", "eager"):  # timed already
                jobs.append(job)
    return jobs


def _built(exported: Artifact, context: Context) -> list[BuiltEngine]:
    """Returns every runnable engine that was built."""
    from export.engines.spec import spec_of

    return [
        BuiltEngine(build.variant, entry, spec_of(exported.path, build, entry, context.target))
        for build in read(Exported, exported.path / EXPORTED).builds
        for entry in build.engines
        if entry.runnable and entry.engine != REFERENCE
    ]


def is_variant(step: Stage, steps: Sequence[Stage]) -> bool:
    """Whether the output of a step is a variant of the report: every checkpoint except a source model that is finetuned first."""
    return step.PRODUCES == "checkpoint" and not (isinstance(step, Source) and any(isinstance(other, Finetune) for other in steps))

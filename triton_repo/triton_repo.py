"""The stage `triton_repo`: writes a Triton model repository, serves it, checks its predictions and measures its latency.

    exported engines -> model_repository/ -> real server -> every evaluation row over gRPC -> metrics, agreement with the engine, latency

Language models stream: their answers to all prompts of the export are compared token by token, and timed next to the engine alone
(`triton_repo.generation.check`).

Each build is a model of the repository. `triton.json` says which of them was chosen to be served (`foundation.measure.fastest`); it runs in
the engine and mode that were chosen, the others in the first engine that runs them.

Only one model runs at a time, so that models do not compete for memory and cores. The predictions must match the evaluated engine's
within the limits of `foundation.standalone.tolerance`; otherwise the stage fails. (In static mode the logits are bit-identical.) All
figures are in triton.json, with the logits next to it.

For a GPU target `triton_repo.gpu.plans` writes the repository. Its plans are built on a machine with TensorRT; no server is started here.
Of a language model a GPU serves what `torch_kernels_decoder` runs: `triton_repo.generation.layout` writes it as `model_repository_kernels`.
The repository of a divided model (`export.tensor_parallel`) is written by `triton_repo.divided`, for where its devices are.
The repository of a language model for vLLM, which the key `vllm` asks for, is written by `triton_repo.vllm` and not run either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from foundation.artifacts.artifact import Artifact, Kind, lineage, write_json
from foundation.artifacts.document import read
from foundation.artifacts.exported import Exported
from foundation.artifacts.triton import Results, TritonModel
from foundation.core.engines import ENGINES, served_on
from foundation.core.errors import InputError, Problem
from foundation.core.named import one_of
from foundation.core.target import Target
from foundation.labels.facts import Facts
from foundation.labels.tasks import tasks_with
from foundation.measure.answers import save_predictions
from foundation.measure.fastest import Measured, Ranked, competes, fastest
from foundation.measure.fastest_answers import engines_that_answer
from foundation.measure.judged import Judged, judged_of
from foundation.measure.metrics import metrics
from foundation.schemes.table import SCHEMES
from foundation.stage.stage import Stage
from foundation.standalone.adapted import as_read
from foundation.standalone.response import STRATEGIES
from triton_repo.cascade.settings import Audit
from triton_repo.comparison import agreement, compare
from triton_repo.generation.limits import MAX_WAITING, REQUEST_SECONDS
from triton_repo.gpu.plan_files import SCHEMA as PLANS_SCHEMA
from triton_repo.gpu.settings import Gpu
from triton_repo.queueing import Queue
from triton_repo.serving import ON_KERNELS
from triton_repo.towers import beside_the_other, with_both_towers
from triton_repo.tuning.settings import Tune
from triton_repo.tuning.space import Point
from triton_repo.vllm import BACKEND, NOT_RUN, Vllm, write_vllm_repository

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from foundation.core.json_value import Json
    from foundation.stage.context import Context
    from triton_repo.generation.config import LanguageSettings
    from triton_repo.layout import Served

REPOSITORY, GPU_REPOSITORY, RESULTS, SCHEMA = "model_repository", "model_repository_gpu", "triton.json", 1
KERNEL_REPOSITORY = f"{REPOSITORY}{ON_KERNELS}"
RANKS_REPOSITORY = "model_repository_ranks"
EVALUATION_CONCURRENCY = 16
"""Concurrent requests during the evaluation: enough for the server to form batches."""
STREAMS = 8
"""Concurrent answers at which the server of a language model is compared with its engine, whatever `concurrency` says."""
SINGLE = ("instances", "max_queue_delay_us", "queue", "tune")
QUEUED = ("max_waiting", "request_seconds")
ANSWERING = served_on("kernels", generates=True)
"""Engines on our own kernels that answer prompts."""
QUEUED_FOR = f"it is for language models that are served on the cpu or by {one_of(ANSWERING)}"


class TritonRepo(Stage):
    """Writes a Triton model repository, starts the server on it, checks its predictions and measures latency."""

    VERSION: ClassVar[int] = 11
    NAME: ClassVar[str] = "triton_repo"
    PRODUCES: ClassVar[Kind] = "model_repository"
    LATER: ClassVar[tuple[str, ...]] = ("proposals", "aggregation", "gpu", "vllm", "queue", "tune", "audit", *QUEUED)

    serve: bool = True
    """Start the server, check and measure; false only writes the files. For `target.device: cuda` no server is ever started."""
    max_batch_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Maximum batch size, for one request and for merged requests. Default: the largest of `target.batch_sizes`, at least 8."""
    instances: Annotated[int, Field(ge=1, le=64)] = 1
    """Parallel processes of a model, each with all threads of the target and its own copy of the weights. On GPUs: instances of the plan on
    each GPU, which share its weights."""
    max_queue_delay_us: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Maximum time in microseconds that a request waits for others to form a batch. 0: merges only requests that arrive while the model is
    busy."""
    concurrency: Annotated[tuple[Annotated[int, Field(ge=1, le=256)], ...], Field(min_length=1)] = (1, 4)
    """Numbers of concurrent requests at which latency is measured. A language model is timed at 8 in any case, next to its engine alone."""
    proposals: bool = False
    """For language models: serve them with the tokens that `export.generation` proposes to them. With a draft a model takes neither
    temperature nor beams, and reads every prompt in one step; with proposals of the text it takes no beams."""
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = MAX_WAITING
    """For language models: requests that wait while max_batch_size answers are given; a further one is refused at once."""
    request_seconds: Annotated[float, Field(ge=0.001, le=1_000_000)] = REQUEST_SECONDS
    """For language models: most seconds for an answer, with the time that its request waits; it then ends with what there is. A request may
    ask for less."""
    aggregation: Literal["first", "none", "simple", "average", "max"] = "first"
    """For token-classification: how entities are put together from tokens. first: a word, delimited by spaces, has the tag of its
    first token, the only one that is trained; average and max: of all its tokens; simple: tokens that follow each other; none: every token
    that is not O."""
    gpu: Gpu = Gpu()
    """For TensorRT: how plans are built, and what runs on which GPU."""
    queue: Queue = Queue()
    """For models that answer rows: how many requests may be under way, how long an answer may take, and levels of priority. The stage
    measures without them."""
    tune: Tune | None = None
    """For models that answer rows: searches processes, threads of each, largest batch and queue delay of the served model by measured load,
    and writes the repository with the best (`triton_repo.tuning`); `{}` takes the defaults."""
    audit: Audit = Audit()
    """For runs with the stage cascade: how the served cascade is watched."""
    vllm: Vllm | None = None
    """For quantized language models: write a repository for GPUs that Triton serves with vLLM, from the weights in the format
    compressed-tensors; `{}` takes the defaults. It is not run. For `target.device: cpu` it is next to the other one, as
    `model_repository_gpu`."""

    def unread(self, task: Facts, target: Target) -> Iterator[Problem]:
        """Yields a problem for each key with a value that nothing reads for a task and a target.

        Args:
            task: The row of the task.
            target: The section of the recipe.
        """
        rules = (
            (task.generates, SINGLE, "a language model has one process, which answers max_batch_size requests at once"),
            (task.two_towers, ("tune",), "two models are served, of which it would tune one"),
            (not task.tags, ("aggregation",), f"it is for {tasks_with(lambda row: row.tags)}"),
            (not task.generates or not (target.device == "cpu" or set(ANSWERING) & set(target.engines)), QUEUED, QUEUED_FOR),
        )
        for key, reason in ((key, reason) for applies, keys, reason in rules if applies for key in keys):
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default:  # the resolved recipe of a run holds every key
                yield Problem(key, f"{value if isinstance(value, str | Queue | Tune) else format(value, 'g')} given", reason)
        if self.gpu != Gpu() and (task.generates or not set(served_on("cuda")) & set(target.engines)):
            yield Problem("gpu", "given", f"it is for plans of {ENGINES[served_on('cuda')[0]].title}, and this target has none")

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks that the models can be served where the target says.

        Raises:
            InputError: They answer with vectors, tags or spans, and the repository would be one for TensorRT.
        """
        there = [engine for engine in served_on("cuda") if engine in context.target.engines]
        if context.aggregate and (there or context.target.device == "cuda"):
            raise InputError("data.windows", "given", f"a repository for GPUs truncates: serve on the cpu, or leave out {self.title}")
        answers = context.facts.answer.NOT_ON_GPUS
        kernels = not (there or context.facts.answer.PER_TOKEN) and bool(set(served_on("kernels")) & set(context.target.engines))
        if answers is not None and not kernels and (there or context.target.device == "cuda"):
            key, given = ("target.engines", there[0]) if there else ("target.device", "cuda")
            raise InputError(
                key,
                f"{given} given",
                f"a repository for GPUs answers with labels, {context.task} with {answers}",
                f"serve it on the cpu, or leave out {self.title}",
            )

    def depends(self, context: Context) -> dict[str, Json] | None:
        """Returns the versions of the server's packages, what is served, at how many answers at once a language model is timed, and the
        layout of a repository for TensorRT.

        Raises:
            InputError: The server environment is missing or does not work.
        """
        from triton_repo import environment

        plans: dict[str, Json] = {"plans": PLANS_SCHEMA} if self._writes_plans(context) else {}
        chosen: list[Json] = [{**ranked.candidate.names} for ranked in self._ranking(context)[:1]]
        if context.facts.generates and context.target.device == "cpu" and context.exported is not None:
            engines = self._engines(context.exported.path, context)
            chosen = [{folder: names[0] for folder, names in engines.items() if names}]
        known: dict[str, Json] = {**plans, **({"chosen": chosen} if chosen else {})}
        if not self._starts(context):
            return known or None
        limits: list[Json] = [[limit.batch, limit.sequence] for limit in context.goals.max_latency_ms]
        if context.facts.generates:
            known["streams"] = [*self._streams()]
        elif limits:
            known["limits"] = limits
        return {**environment.check().versions, **known}

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Json]:
        """Writes `model_repository/`, `triton.json` and the logits of every model.

        Returns:
            `models`: for each its name, metrics and number of disagreements.

        Raises:
            InputError: No exported engine can be served, or the server environment is missing.
            ServerError: The server did not start.
            RequestError: A request failed.
            ServedWrong: The predictions differ from the engine's.
        """
        if self.vllm is not None and context.target.device == "cuda":
            results = Results(schema_=SCHEMA, layout="single", models=(self._write_vllm(parent, context, out / REPOSITORY),))
        elif context.target.device == "cuda" and context.facts.beyond_tensorrt:
            results = Results(schema_=SCHEMA, layout="single")
        elif context.target.device == "cuda":
            gpu, layout = self._write_gpu(parent, context, out / REPOSITORY)
            results = Results(schema_=SCHEMA, layout=layout, models=(gpu,))
        else:
            results = self._write_cpu(parent, context, out)
            if self._writes_plans(context):  # an additional repository, for machines with a GPU
                results = results.with_(gpu=self._write_gpu(parent, context, out / GPU_REPOSITORY)[0])
            if self.vllm is not None:
                results = results.with_(gpu=self._write_vllm(parent, context, out / GPU_REPOSITORY))
        if kernels := self._write_kernels(parent, context, out / KERNEL_REPOSITORY):
            results = results.with_(kernels=kernels)
        if ranks := self._write_ranks(parent, context, out / RANKS_REPOSITORY):
            results = results.with_(ranks=ranks)
        write_json(out / RESULTS, results.written())
        return _summary(results)

    def _write_cpu(self, parent: Artifact, context: Context, out: Path) -> Results:
        """Writes the CPU repository, measures it unless `serve` is false, and returns the contents of triton.json."""
        from triton_repo.cascade.stage import opened_cascade
        from triton_repo.config import Scheduling
        from triton_repo.layout import served_models, write_repository
        from triton_repo.tuning.tuning import tune_served

        if context.facts.generates:
            return self._write_language(parent, context, out)
        chosen = next(iter(self._ranking(context)), None)
        models = served_models(parent, chosen=chosen)
        if context.facts.tags and self.aggregation != STRATEGIES[0]:
            models = [replace(model, response=f"{model.prepared.response}-{self.aggregation}") for model in models]
        name = next((model.name for model in models if chosen is not None and model.is_the(chosen)), None)
        one = next((model for model in models if model.name == name), models[-1])
        own = Point(self.instances, context.target.num_threads, self._largest_batch(context), self.max_queue_delay_us)

        def write(point: Point, folder: Path, written: list[Served], queue: Queue, threads: int | None) -> None:
            write_repository(
                folder,
                written,
                pairs=isinstance(context.data.evaluation.rows[0], tuple),
                batch_sizes=context.target.batch_sizes,
                max_batch_size=point.max_batch_size,
                scheduling=Scheduling(point.instances, point.max_queue_delay_us, queue, threads),
                chosen=name,
            )

        cascade = opened_cascade(parent, context, self.audit)

        def tried(point: Point, folder: Path) -> None:
            if cascade is None:
                write(point, folder, [one], Queue(), point.threads)
            else:
                cascade.write(folder, point, Queue(), point.threads)

        found, tuned = None, one.name if cascade is None else cascade.name
        if self.tune is not None and self.serve:
            found = tune_served(self.tune, own, tuned, context, tried)
        best, threads = (own, None) if found is None else (found.best, found.best.threads)
        write(best, out / REPOSITORY, models, self.queue, threads)
        if cascade is not None:
            cascade.write(out / REPOSITORY, best, self.queue, threads)
        results = self._results(models, lambda model: self._measure(model, context, out, best.max_batch_size))
        results = with_both_towers(results).with_(chosen=name)
        if found is not None:
            results = results.with_(tuned=found.as_document(tuned))
        if cascade is not None:
            repository = self._unlimited(context, out) if self.serve else None
            results = results.with_(cascade=cascade.measured(repository, context, out, self.concurrency))
        return results

    def _unlimited(self, context: Context, out: Path) -> Path:
        """Returns the repository without limits of its queues."""
        from triton_repo.live import without_limits

        return out / REPOSITORY if self.queue == Queue() else without_limits(out / REPOSITORY, context.scratch / "unlimited")

    def _ranking(self, context: Context) -> list[Ranked]:
        """Returns the configurations that compete, the one to serve first; empty where the first one of the target is served."""
        if not competes(context.task, context.target) or context.exported is None or context.latency is None:
            return []
        (judged, before), line = self._judged(context), lineage(list(context.checkpoints)[-1], context.checkpoints)
        measured = Measured(context.exported.path, context.latency.path, line, context.baseline.id, before)
        return fastest(measured, context.goals, judged)

    def _judged(self, context: Context) -> tuple[Judged, float]:
        """Returns the metric that is judged, and its value for the baseline in torch."""
        judged = judged_of(context.task, context.goals.metric, context.data.labels)
        return judged, judged.figure({}, context.predictions[context.baseline.id])

    def _engines(self, exported: Path, context: Context) -> dict[str, tuple[str, ...]]:
        """Returns the engines that answer prompts by build, the one to serve first."""
        scale = None
        if context.goals.max_drop is not None and context.baseline.id in context.predictions:
            scale = (found := self._judged(context))[0].name, found[1]
        latency = None if context.latency is None else context.latency.path
        return engines_that_answer(exported, latency, context.target, context.goals, scale, proposed=self.proposals)

    def _write_language(self, parent: Artifact, context: Context, out: Path) -> Results:
        """The same for language models, which stream their answers."""
        from triton_repo.generation.check import measure
        from triton_repo.layout import served_models

        models = served_models(parent, self._engines(parent.path, context))
        settings = {one.name: one for one in self._write_answering(out / REPOSITORY, models, context)}

        return self._results(
            models, lambda model: measure(model, settings[model.name], out / REPOSITORY, context, self._streams()).with_(reason=None)
        )

    def _write_answering(self, folder: Path, models: list[Served], context: Context) -> list[LanguageSettings]:
        """Writes a repository of models that answer prompts; returns the settings of each."""
        from triton_repo.generation.layout import write_language_repository

        return write_language_repository(
            folder,
            models,
            batch_sizes=context.target.batch_sizes,
            max_batch_size=self.max_batch_size,
            proposals=self.proposals,
            max_waiting=self.max_waiting,
            request_seconds=self.request_seconds,
        )

    def _results(self, models: Sequence[Served], measured: Callable[[Served], TritonModel]) -> Results:
        """Returns the contents of triton.json."""
        if not self.serve:
            return Results(schema_=SCHEMA, layout="single", models=tuple(_unmeasured(model.entry, "serve: false") for model in models))
        from triton_repo import environment

        versions = dict(environment.check().versions)
        return Results(schema_=SCHEMA, layout="single", models=tuple(measured(model) for model in models), versions=versions)

    def _write_gpu(self, parent: Artifact, context: Context, folder: Path) -> tuple[TritonModel, str]:
        """Writes the repository for TensorRT of the last variant; returns its entry of triton.json, and its layout.

        Raises:
            InputError: The last variant was not evaluated in torch, so that there are no golden logits.
        """
        from triton_repo.gpu.configs import Serving
        from triton_repo.gpu.stage import write_gpu

        sizes = context.target.batch_sizes
        serving = Serving(
            max_batch_size=self._largest_batch(context),
            batch_sizes=sizes,
            instances=self.instances,
            groups=self.gpu.groups,
            max_queue_delay_us=self.max_queue_delay_us,
            cuda_graphs=self.gpu.cuda_graphs,
            response_cache=self.gpu.response_cache,
        )
        entry, written = write_gpu(parent, context, folder, self.gpu, serving)
        return _unmeasured(entry, written.reason), written.layout

    def _write_kernels(self, parent: Artifact, context: Context, folder: Path) -> TritonModel | None:
        """Writes the repository of the last build that an engine on our own kernels runs; returns its entry, None without one.

        Raises:
            InputError: There is none, and nothing else serves these answers on this target.
        """
        from triton_repo.config import Scheduling
        from triton_repo.gpu.kernels import NOT_RUN as NOT_SERVED
        from triton_repo.gpu.kernels import build_on_kernels, write_kernel_repository
        from triton_repo.layout import served_build

        found = build_on_kernels(parent.path)
        if found is None:
            if context.facts.beyond_tensorrt and context.target.device == "cuda" and self.vllm is None:
                engines = one_of(served_on("kernels", generates=context.facts.generates))
                raise InputError("target.engines", f"{engines} runs no build", "export.json says why", f"leave out {self.title}")
            return None
        build, entry = found
        if context.facts.generates:
            model = served_build(parent.path, build, entry)
            self._write_answering(folder, [model], context)
            return _unmeasured(model.entry, NOT_SERVED)
        written = write_kernel_repository(
            folder,
            parent.path,
            build,
            entry,
            pairs=isinstance(context.data.evaluation.rows[0], tuple),
            batch_sizes=context.target.batch_sizes,
            max_batch_size=self._largest_batch(context),
            scheduling=Scheduling(self.instances, self.max_queue_delay_us, self.queue),
        )
        return _unmeasured(written, NOT_SERVED)

    def _write_ranks(self, parent: Artifact, context: Context, folder: Path) -> TritonModel | None:
        """Writes the repository of a model that the export has divided; returns its entry, None without one; vLLM divides decoders."""
        from triton_repo.config import Scheduling
        from triton_repo.divided import NOT_RUN as NOT_SERVED
        from triton_repo.divided import write_divided_repository
        from triton_repo.layout import EXPORTED

        document = read(Exported, parent.path / EXPORTED)
        divided = document.divided
        if divided is None or context.facts.generates:
            return None
        written = write_divided_repository(
            folder,
            parent.path,
            divided,
            next(build for build in reversed(document.builds) if build.variant == divided.variant),
            pairs=isinstance(context.data.evaluation.rows[0], tuple),
            max_batch_size=self._largest_batch(context),
            scheduling=Scheduling(1, self.max_queue_delay_us, self.queue),
            threads=context.target.num_threads,
        )
        return _unmeasured(written, NOT_SERVED)

    def _write_vllm(self, parent: Artifact, context: Context, folder: Path) -> TritonModel:
        """Writes the repository of the last variant for vLLM; returns its entry of triton.json.

        Raises:
            InputError: The export holds no weights that vLLM reads, or the settings do not fit the model.
        """
        from foundation.models.folder import Checkpoint
        from triton_repo.layout import EXPORTED

        assert self.vllm is not None, "asked for"
        packed = read(Exported, parent.path / EXPORTED).compressed_tensors
        if packed is None:
            raise InputError(
                f"{self.key}.vllm",
                "given, but the last variant was not written in the format compressed-tensors",
                "`compressed_tensors: true` in export says why",
            )
        variant, artifact = list(context.checkpoints.items())[-1]
        config = Checkpoint(artifact.path).config.get_text_config()
        precision = SCHEMES[str(Checkpoint(artifact.path).scheme)].precision
        name = f"{variant}-{precision}"
        write_vllm_repository(folder, parent.path / packed, config, self.vllm, name=name, max_batch_size=self.max_batch_size)
        context.progress.log(f"  {name} for vLLM: {NOT_RUN}")
        return _unmeasured(TritonModel(model=name, variant=variant, precision=precision, engine=BACKEND, mode="paged"), NOT_RUN)

    def _writes_plans(self, context: Context) -> bool:
        """Whether a repository for TensorRT is written."""
        on_gpu = context.target.device == "cuda"
        if context.facts.generates or (on_gpu and context.facts.beyond_tensorrt):
            return False
        return self.vllm is None if on_gpu else bool(set(served_on("cuda")) & set(context.target.engines))

    def _largest_batch(self, context: Context) -> int:
        """Returns the most rows of a request, and of merged requests."""
        from triton_repo.config import MIN_BATCH

        return self.max_batch_size or max(MIN_BATCH, *context.target.batch_sizes)

    def _streams(self) -> list[int]:
        """Returns the numbers of answers at once at which a language model is timed."""
        return sorted({*self.concurrency, STREAMS})

    def _starts(self, context: Context) -> bool:
        return self.serve and context.target.device == "cpu"

    def _measure(self, model: Served, context: Context, out: Path, most: int) -> TritonModel:
        """Serves one model alone, evaluates and times it, and returns its entry of triton.json; a request has at most `most` rows."""
        from triton_repo import client, environment
        from triton_repo.limited import measure_limits, shapes_of
        from triton_repo.server import TritonServer

        split = context.data.evaluation
        own = split.labels.of_tower(model.tower)
        rows = as_read([split.rows[row] for row in own.tolist()], model.prepared.adapters)
        log = context.scratch / f"triton-{model.name}.log"
        with TritonServer(self._unlimited(context, out), environment.check(), log, models=[model.name]) as server:
            with context.progress.bar(f"triton {model.name}", len(rows)) as advance:
                answers = client.evaluate(server.grpc_address, model.name, rows, EVALUATION_CONCURRENCY, advance)
            latency = tuple(client.latency(server.grpc_address, model.name, rows, concurrency) for concurrency in self.concurrency)
            shapes, pairs = shapes_of(context.goals.max_latency_ms), isinstance(rows[0], tuple)
            limits = {"limits": measure_limits(server, model, shapes, pairs, most)} if shapes else {}
            memory = server.peak_memory_bytes()
        predictions = f"{model.name}.safetensors"
        logits = beside_the_other(model, answers.stored_predictions(model.prepared), split.labels, out)
        save_predictions(out / predictions, logits, split.labels)
        figures, count = metrics(context.task, logits, split.labels), split.labels.count()
        compared = compare(model, context.task, answers, split.labels)
        context.progress.log(
            f"  {model.name} in Triton: {context.facts.metric} {figures[context.facts.metric]:.4f} (n={count}), "
            f"{agreement(compared, context.task)}, p50 {latency[0].p50_ms:.2f} ms"
        )
        return compared.with_(metrics=figures, n=count, predictions=predictions, peak_memory_bytes=memory, latency=latency, **limits)


def _unmeasured(entry: TritonModel, reason: str) -> TritonModel:
    return entry.with_(metrics={}, n=0, predictions=None, disagreements=None, latency=(), reason=reason)


def _summary(results: Results) -> dict[str, Json]:
    return {"models": [{"model": one.model, "metrics": {**one.metrics}, "disagreements": one.disagreements} for one in results.models]}

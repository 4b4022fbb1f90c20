"""The stage `export`: from checkpoints to engines that have been checked against torch and evaluated.

What is built, each in a folder `<variant>-<precision>`:

    ends   the baseline in float, the last variant (of a recipe with branches that of each), and where that is int8 the float variant
           that it was made of: what int8 has to beat
    all    every variant, int8 where it is quantized

A processor with bf16 adds the float variant behind the last one in bf16, from the files of its fp32 build: there bf16 is what int8 has
to beat. An int8 build gets a mode there whose float part is bf16 (`export.float_part`).

Every engine runs in a process of its own, in the configuration that is timed and served. First it has to agree with torch on selection rows
(`export.parity.parity`), or is left out; where no mode of an engine agrees, the stage fails. Only an engine that stays predicts the whole
evaluation split, so what is built, left out or recommended does not depend on evaluation rows. bf16 is compared but not held
to it: of an int8 build the same files are, with their float part in fp32. `export.json` lists all of it: engines in the order of
`target.engines`, of an engine the recommended mode first.

Left out: engines that need another machine are recorded with `runnable: false` and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from numpy.typing import NDArray

from compress.artifacts.artifact import Artifact, Kind, lineage, write_json
from compress.core.engines import ENGINES, REFERENCE, EngineName
from compress.core.errors import InputError
from compress.core.named import one_of
from compress.core.tasks import TASKS
from compress.data.splits import Split
from compress.schemes.table import is_static_int8, of_precision
from compress.stage.context import Context
from compress.stage.stage import Stage
from compress.standalone.preprocess import Preprocessor
from export.engines.registry import engine_module
from export.engines.spec import DYNAMIC_GRAPH, BuildRequest
from export.float_part import FloatPrecision, Judgement, judge, recommended_first, trial_rows
from export.graph.quantized import precision_of, write_graphs
from export.parity.rows import gate_rows

MODEL, EXPORTED = "model.onnx", "export.json"
COMPRESSED = "compressed-tensors"
NO_GRAPH = "torch has no graph of its own that could be counted"
BATCH_SIZE = 32
PROBED_TOKENS = 256
"""Tokens that the layers are compared on: each layer then compares about 100,000 codes."""


Asked = tuple[str, str, str]
"""Variant, precision and float precision."""


@dataclass(frozen=True)
class Build:
    """One checkpoint in one precision."""

    variant: str
    checkpoint: Path
    precision: str
    floating: str
    """The float variant that it was made of; itself where it is float."""

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.variant}-{self.precision}"

    @property
    def float_precision(self) -> str:
        """What its float part runs in."""
        return "bf16" if self.precision == "bf16" else "fp32"

    @property
    def is_quantized(self) -> bool:
        """Whether its checkpoint is quantized."""
        return self.precision not in ("fp32", "bf16")


class Export(Stage):
    """Builds the engines of the target, checks them against torch and evaluates them."""

    VERSION: ClassVar[int] = 3
    NAME: ClassVar[str] = "export"
    PRODUCES: ClassVar[Kind] = "engine"

    variants: Literal["ends", "all"] = "ends"
    """ends: the baseline, the last variant (of a recipe with branches that of each), and the float variant that it was quantized from;
    all: every variant."""
    float_precision: FloatPrecision | Literal["auto"] = "auto"
    """What int8 engines of OpenVINO compute their float part in, on processors with bf16 (fp32 on others). auto: bf16, unless that brings
    the answers to selection rows further from the float model than int8 does by itself."""
    compressed_tensors: bool | Literal["auto"] = "auto"
    """Whether to write the last variant in the format compressed-tensors too, which Transformers, vLLM and SGLang load; auto: where it is
    a quantized decoder that the format can hold."""

    def check(self, config: Any, teacher: Any, context: Context) -> None:
        """Checks that the engines fit the device of the target, and that the processor has the precision.

        Raises:
            InputError: An engine does not, or the processor has no bf16.
        """
        self._check_precision(context)

    def _check_precision(self, context: Context) -> None:
        _check_target(context)
        if self.float_precision == "bf16" and not computes_bf16(context):
            raise InputError(f"stages.{self.id or self.NAME}.float_precision: bf16 given; this processor has no bf16: give auto or fp32")

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Any]:
        """Writes one folder for each build, and `export.json`.

        Returns:
            `builds`: `name`, and the metrics and int8 share of each of its engines; `compressed_tensors`: the folder, or None.

        Raises:
            InputError: An engine of the target does not run on its device, or the format compressed-tensors was asked for and cannot
                hold the model.
            ParityError: Integers of an engine are wrong, or the predictions of all its modes differ from those of torch.
            EngineError: An engine failed.
        """
        self._check_precision(context)
        entries = []
        answers: dict[Asked, NDArray[Any]] = {}
        for build in planned(context, self.variants):
            context.progress.log(f"  {build.name}")
            entries.append(_Exporter(build, context, out, self.float_precision, answers).run())
        packed = self._compressed(context, out)
        write_json(out / EXPORTED, {"schema": 1, "builds": entries, "compressed_tensors": packed})
        return {"builds": [_summary(entry) for entry in entries], "compressed_tensors": packed}

    def _compressed(self, context: Context, out: Path) -> str | None:
        """Writes the last variant in the format compressed-tensors; returns its folder, None where there is none."""
        from export.compressed_tensors import is_decoder, obstacle, write

        variant, artifact = list(context.checkpoints.items())[-1]
        fits = precision_of(artifact.path) != "fp32" and is_decoder(artifact.path)
        reason = obstacle(artifact.path) if fits else f"{variant} is no quantized decoder"
        if self.compressed_tensors is True and reason is not None:
            raise InputError(f"stages.{self.id or self.NAME}.compressed_tensors: {reason}")
        if self.compressed_tensors is False or reason is not None:
            if fits and self.compressed_tensors == "auto":
                context.progress.warn(f"not written as compressed-tensors: {reason}")
            return None
        write(artifact.path, out / f"{variant}-{COMPRESSED}")
        context.progress.log(f"  {variant}-{COMPRESSED}: load it with transformers.AutoModelForCausalLM.from_pretrained")
        return f"{variant}-{COMPRESSED}"


def planned(context: Context, variants: Literal["ends", "all"]) -> list[Build]:
    """Returns what is built, in order: variants first to last, then the float one behind the last in bf16, from the files of its fp32."""
    precisions = {name: precision_of(artifact.path) for name, artifact in context.checkpoints.items()}
    made = {name: lineage(name, context.checkpoints) for name in precisions}
    floating = {name: floating_of(line, lambda other: precisions[other] == "fp32") for name, line in made.items()}
    names = list(precisions) if variants == "all" else ends(made, floating)
    builds = {name: Build(name, context.checkpoints[name].path, precisions[name], floating[name]) for name in names}
    last = replace(builds[floating[names[-1]]], precision="bf16")
    return [*builds.values(), *([last] if computes_bf16(context) else [])]


def floating_of(line: Sequence[str], is_float: Callable[[str], bool]) -> str:
    """Returns the last variant of a line that is float."""
    return next(name for name in reversed(line) if is_float(name))


def ends(made: Mapping[str, Sequence[str]], floating: Mapping[str, str]) -> list[str]:
    """Returns what is built of the variants where not all are.

    Args:
        made: Variants, in order, and for each those that it was made by: itself the last.
        floating: For each the float one that it was made of.
    """
    within = {name for line in made.values() for name in line[:-1]}
    last = [name for name in made if name not in within]
    return [name for name in made if name in {next(iter(made)), *last, *(floating[end] for end in last)}]


def computes_bf16(context: Context) -> bool:
    """Whether an engine is built whose float part may be bf16, and the processor has bf16 arithmetic."""
    return context.target.device == "cpu" and any(
        ENGINES[engine].bf16_float_part and engine_module(engine).computes_bf16() for engine in context.target.engines
    )


def _check_target(context: Context) -> None:
    for engine in context.target.engines:
        if ENGINES[engine].cpu_only and context.target.device != "cpu":
            others = one_of([name for name, row in ENGINES.items() if not row.cpu_only])
            raise InputError(f"target.engines: {engine} given with target.device {context.target.device}; it runs on cpu; give {others}")


def _summary(entry: dict[str, Any]) -> dict[str, Any]:
    keys = ("engine", "mode", "float_precision", "metrics", "int8_share")
    return {"name": entry["folder"], "engines": [{key: engine[key] for key in keys} for engine in entry["engines"]]}


class _Exporter:
    """The work on one build."""

    def __init__(
        self, build: Build, context: Context, out: Path, rest: FloatPrecision | Literal["auto"], answers: dict[Asked, NDArray[Any]]
    ) -> None:
        """Looks at one build.

        Args:
            build: What to build.
            context: That of the stage.
            out: Where its folder goes.
            rest: The setting `float_precision`.
            answers: What OpenVINO's static engines answered to the trial rows so far; added to.
        """

        self.build, self.context, self.out, self.answers = build, context, out, answers
        self.rest: FloatPrecision | Literal["auto"] = rest if computes_bf16(context) else "fp32"
        self.folder = out / build.name
        self.folder.mkdir()
        self.files = self.folder if build.precision != "bf16" else out / replace(build, precision="fp32").name
        self.preprocessor: Preprocessor = context.preprocessor(build.checkpoint)
        self.preprocessor.save(self.folder)

    def run(self) -> dict[str, Any]:
        """Builds, evaluates, compares; returns the entry of export.json."""
        model = self._onnx()
        names = self._engines()
        built = [entry for engine in names for entry in self._build(engine, model)]
        engines = [self._judged(entry, model) if entry["runnable"] else entry for entry in built]
        self._require(engines)
        judgement = self._judgement(engines)
        precision = judgement.precision if judgement else self.rest if is_static_int8(self.build.precision) else self.build.float_precision
        engines = recommended_first(engines, precision)
        return {
            "variant": self.build.variant,
            "precision": self.build.precision,
            "float_precision": self.build.float_precision,
            "folder": self.build.name,
            "onnx": self._relative(model),
            "engines": sorted(engines, key=lambda entry: (names.index(entry["engine"]), not entry["runnable"])),
            "parity": _worst([entry for entry in engines if entry["float_precision"] == self.build.float_precision]),
            "float_part": asdict(judgement) if judgement else None,
        }

    def _judgement(self, engines: list[dict[str, Any]]) -> Judgement | None:
        """Decides between fp32 and bf16 for the float part where that is asked for and both were built."""
        half = next((entry for entry in engines if entry["float_precision"] == "bf16"), None)
        if not is_static_int8(self.build.precision) or self.rest != "auto" or half is None or not half["runnable"]:
            return None
        floating = self.answers[self.build.floating, "fp32", "fp32"]
        int8 = {precision: self.answers[self.build.variant, self.build.precision, precision] for precision in ("fp32", "bf16")}
        found = judge(self.context.task, floating, int8["fp32"], int8["bf16"])
        self.context.progress.log(
            f"    float part in {found.precision}: on {found.rows} selection rows the distance to the float model is "
            f"{found.bf16:.5f} in bf16, {found.fp32:.5f} in fp32"
        )
        return found

    def _engines(self) -> list[EngineName]:
        """Returns the engines that are built; a float build in bf16 needs one that computes it from the files of fp32."""
        halves = self.build.precision == "bf16"
        return [engine for engine in self.context.target.engines if ENGINES[engine].bf16_float_part or not halves]

    def _onnx(self) -> Path:
        """Writes the ONNX model, float or quantized; returns its path. bf16 has that of fp32."""
        destination = self.files / MODEL
        if self.build.precision == "bf16":
            return destination
        return write_graphs(self.build.checkpoint, self.preprocessor, destination, self.context.target.engines)

    def _build(self, engine: EngineName, model: Path) -> Iterator[dict[str, Any]]:
        """Writes the files of one engine; yields its entries, the recommended mode first."""
        reason = engine_module(engine).refusal(self.build.precision, model)
        if reason is not None:
            self.context.progress.warn(f"{self.build.name} {engine}: {reason}")
            yield self._request(engine, model).entry("dynamic", runnable=False, reason=reason, int8_share_reason="there is no engine")
            return
        yield from engine_module(engine).build(self._request(engine, model))

    def _request(self, engine: EngineName, model: Path) -> BuildRequest:
        """Returns what an engine is asked to build."""
        return BuildRequest(
            engine=engine,
            checkpoint=self.build.checkpoint,
            model=model,
            root=self.out,
            folder=self.folder,
            shared=self.files,
            precision=self.build.precision,
            float_precision=self.build.float_precision,
            bf16_float_part=is_static_int8(self.build.precision) and self.rest != "fp32",
            buckets=self.preprocessor.buckets,
            target=self.context.target,
            log=lambda line: self.context.progress.log(f"    {line}"),
        )

    @cached_property
    def _gate(self) -> tuple[Split, NDArray[Any]]:
        """The rows of the parity gate and what torch eager answers to them: what every engine has to agree with."""
        rows = gate_rows(self.context.data)
        return rows, self._in_torch(rows)

    def _in_torch(self, split: Split) -> NDArray[Any]:
        """Returns the predictions of torch eager."""
        from compress.measure.predictions import predict, predict_streamed, predicts_streamed
        from compress.models.checkpoint import load

        checkpoint = self.build.checkpoint
        if predicts_streamed(checkpoint, self.context.task):
            return predict_streamed(checkpoint, self.preprocessor, split.rows, BATCH_SIZE, self.context.scratch)
        return predict(load(checkpoint), self.preprocessor, split.rows, BATCH_SIZE)

    def _judged(self, entry: dict[str, Any], model: Path) -> dict[str, Any]:
        """Compares one engine with torch on selection rows, and evaluates it if it passes; returns its entry.

        A mode whose predictions do not pass is not runnable: it is neither evaluated, timed nor served, and its entry says why.
        """
        from compress.measure.answers import load_predictions
        from compress.measure.engine_process import EngineProcess
        from export.engines.spec import spec_of

        if not ENGINES[entry["engine"]].builds:
            compared = self._compared(entry, self._gate[1])
            there = self.context.predictions.get(self.build.variant)
            logits = load_predictions(there)[0] if there else self._in_torch(self.context.data.evaluation)
            return self._evaluated({**entry, "int8_share_reason": NO_GRAPH}, compared, logits)
        spec = spec_of(self.out, self._as_entry(), entry, self.context.target)
        with EngineProcess(spec) as process:
            answers = process.predict(self._gate[0].rows, spec.evaluation_batch)
            counted = {**entry, **self._share(process, model)}
            probed = ENGINES[entry["engine"]].probed and entry["float_precision"] == "fp32"
            compared = self._compared(entry, answers, self._layers(process, model, entry["engine"]) if probed else [])
            if self._decides_float_part(entry):
                asked = self.build.variant, self.build.precision, entry["float_precision"]
                self.answers[asked] = process.predict(trial_rows(self.context), spec.evaluation_batch)
            reason = compared.pop("reason")
            if reason is not None:
                return {**counted, "runnable": False, "reason": reason, "parity": compared}
            logits = process.predict(self.context.data.evaluation.rows, spec.evaluation_batch)
        return self._evaluated(counted, compared, logits)

    def _compared(self, entry: Mapping[str, Any], answers: NDArray[Any], layers: Sequence[Any] = ()) -> dict[str, Any]:
        """Returns how an engine compares with torch on the rows of the gate, and as `reason` why it does not pass, or None.

        Raises:
            ParityError: The integers of a layer are wrong.
        """
        from compress.measure.agreement import compare_predictions, shortfall
        from export.parity.parity import as_rows, check_layers

        split, expected = self._gate
        name = f"{self.build.name} {entry['engine']} {entry['mode']}"
        check_layers(name, layers)
        compared = compare_predictions(self.context.task, expected, answers, split.labels)
        rest = ", rest bf16" if entry["float_precision"] not in (self.build.float_precision, self.build.precision) else ""
        self.context.progress.log(
            f"    {entry['engine']} {entry['mode']}{rest}: on selection rows {compared['disagreements']} of {compared['n']} predictions "
            f"differ from torch, median |d{compared['differs']}| {compared['median_abs']:.4f}, max {compared['max_abs']:.4f}"
        )
        short = shortfall(compared, REFERENCE) if entry["float_precision"] == "fp32" else None
        reason = None if short is None else f"parity: {name}: {short}"
        return {"engine": entry["engine"], "mode": entry["mode"], "layers": as_rows(layers), **compared, "reason": reason}

    def _evaluated(self, entry: dict[str, Any], compared: dict[str, Any], logits: NDArray[Any]) -> dict[str, Any]:
        """Writes the predictions of an engine for the evaluation split; returns its entry with the metrics."""
        from compress.measure.answers import save_predictions
        from compress.measure.metrics import metrics, num_predictions

        labels, task = self.context.data.evaluation.labels, self.context.task
        half = "-bf16" if entry["float_precision"] != self.build.float_precision else ""
        predictions = self.folder / f"{entry['engine']}-{entry['mode']}{half}.safetensors"
        save_predictions(predictions, logits, labels)
        figures, count = metrics(task, logits, labels), num_predictions(labels)
        share = f", int8 share {entry['int8_share']:.4f}" if entry.get("int8_share") else ""
        self.context.progress.log(f"    {entry['engine']} {entry['mode']}{half}: {figures[TASKS[task].metric]:.4f} (n={count}){share}")
        there = {"metrics": figures, "n": count, "predictions": self._relative(predictions)}
        return {**entry, **there, "runnable": True, "reason": None, "parity": {key: compared[key] for key in compared if key != "reason"}}

    def _decides_float_part(self, entry: Mapping[str, Any]) -> bool:
        """Whether the answers of an engine to the trial rows are needed to choose between fp32 and bf16."""
        if not ENGINES[entry["engine"]].bf16_float_part or (entry["mode"], self.rest) != ("static", "auto"):
            return False
        return self.build.precision == "fp32" or is_static_int8(self.build.precision)

    def _require(self, engines: list[dict[str, Any]]) -> None:
        """Raises where no mode of an engine passed; warns of each one that did not."""
        from export.parity.parity import ParityError

        held = [entry for entry in engines if entry["float_precision"] == self.build.float_precision]
        passed = {entry["engine"] for entry in held if entry["runnable"]}
        for entry in engines:
            if entry.get("parity") and not entry["runnable"]:
                if entry["engine"] not in passed:
                    raise ParityError(entry["reason"])
                self.context.progress.warn(f"{entry['reason']}; this mode is left out")

    def _share(self, process: Any, model: Path) -> dict[str, Any]:
        from export.graph.macs import count_macs
        from export.share import share

        images = self.preprocessor.modality == "image"
        batch, sequence = max(self.context.target.batch_sizes), None if images else max(self.preprocessor.buckets)
        gemms = count_macs(model, batch, sequence)
        told = process.ask("precisions", gemms=[gemm.node for gemm in gemms], batch=batch, sequence=sequence)["precisions"]
        return share(gemms, told)

    def _layers(self, process: Any, model: Path, engine: str) -> list[Any]:
        from export.parity.dynamic import compare_all, dynamic_gemms
        from export.parity.parity import compare_layers, quantized_gemms
        from export.parity.products import compare_sites, quantized_sites

        scheme = of_precision(self.build.precision)
        if scheme is not None and scheme.activations == "dynamic":
            tokens = dynamic_gemms(model.with_name(DYNAMIC_GRAPH)) if ENGINES[engine].token_scales_in_graph else []
            return compare_all(tokens, self._probe(process, tokens)) if tokens else []
        gemms, sites = quantized_gemms(model), quantized_sites(model)
        if not gemms:
            return []
        tensors = self._probe(process, [*gemms, *sites])
        return [*compare_layers(gemms, tensors), *compare_sites(sites, tensors)]

    def _probe(self, process: Any, entries: Sequence[Any]) -> Any:
        """Returns the tensors of these layers and sites on some rows of the gate."""
        length = max(self.preprocessor.buckets) if self.preprocessor.buckets else None
        rows = self._gate[0].rows[: max(1, PROBED_TOKENS // length) if length else 1]
        return process.probe(list(dict.fromkeys(name for entry in entries for name in entry.tensors)), rows, length)

    def _as_entry(self) -> dict[str, Any]:
        return {"precision": self.build.precision, "float_precision": self.build.float_precision, "folder": self.build.name}

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.out).as_posix()


def _worst(engines: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns the comparison that stands for a build: of what passed, that which is furthest from torch."""
    compared = [entry["parity"] for entry in engines if entry["runnable"] and ENGINES[entry["engine"]].builds]
    return max(compared, key=lambda parity: (parity["disagreements"], parity["median_abs"]), default=None)

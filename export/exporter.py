"""The work of the stage `export` on one build: its graphs and engines, the gate of parity, the evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from export.builds import HALVES, Build, Request
from export.choices import FloatPrecision, FloatSetting
from export.engines.registry import engine_module
from export.engines.spec import BuildRequest
from export.float_part import Judgement, judge, recommended_first, trial_rows
from export.generation.agreement import Agreement
from export.generation.float_cache import FloatCache, rounds_cache, with_float_cache
from export.graph.quantized import write_graphs
from export.half_graphs import HalfGraph, HalfGraphs
from export.parity.own_rounding import Rounding
from export.parity.rows import gate_rows
from foundation.artifacts import exported
from foundation.artifacts.figures import Tokens
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array
from foundation.core.engines import ENGINES, REFERENCE, EngineName
from foundation.data.splits import Split
from foundation.labels.tasks import TASKS
from foundation.measure.engine_process import EngineProcess
from foundation.schemes.table import is_static_int8, of_precision
from foundation.schemes.tables import load_tables
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from export.engines.module import WithTensors
    from export.parity.parity import LayerParity

MODEL = "model.onnx"
BATCH_SIZE = 32
PROBED_TOKENS = 256
"""Tokens that the layers are compared on: each layer then compares about 100,000 codes."""


class Exporter:
    """The work on one build."""

    def __init__(
        self,
        build: Build,
        context: Context,
        out: Path,
        rest: FloatSetting,
        answers: dict[Request, Array],
        agreement: Agreement,
        graphs: HalfGraphs | None = None,
    ) -> None:
        """Looks at one build.

        Args:
            build: What to build.
            context: The context of the stage.
            out: Where its folder goes.
            rest: The setting `float_precision`.
            answers: What engines with a choice of float precision answered to the trial rows so far; added to.
            agreement: Compares the tokens of engines that generate.
            graphs: Writes half graphs; None: engines that need one are built only in fp32.
        """

        self.build, self.context, self.out, self.answers, self.agreement = build, context, out, answers, agreement
        self.rest, self.graphs = rest, graphs
        self.folder = out / build.name
        self.folder.mkdir()
        self.files = out / replace(build, precision="fp32").name if build.is_half else self.folder
        self.preprocessor: Preprocessor = context.preprocessor(build.checkpoint.folder)
        self.preprocessor.save(self.folder)
        self._rounded: dict[Rounding, Array] = {}

    def run(self) -> exported.Build:
        """Builds, evaluates, compares; returns the entry of export.json."""
        model = self._onnx()
        names = self._engines()
        graphs = {engine: engine_module(engine).own_graph(self.build.precision, model, self.folder) for engine in names}
        engines = [entry for engine in names for entry in self._engine(engine, graphs[engine])]
        self._require(engines)
        judged = {engine: judgement for engine in names if (judgement := self._judgement(engine, engines)) is not None}
        asked = {engine: self._rest(engine) for engine in names if is_static_int8(self.build.precision)}
        engines = recommended_first(engines, asked | {engine: judgement.precision for engine, judgement in judged.items()})
        self._tell_undecided(engines)
        return self._as_entry().with_(
            variant=self.build.variant,
            onnx=self._relative(model),
            engines=tuple(sorted(engines, key=lambda entry: (names.index(entry.engine), not entry.runnable))),
            parity=_worst([entry for entry in engines if entry.float_precision == self.build.float_precision]),
            float_part=exported.FloatPart(**asdict(next(iter(judged.values())))) if judged else None,
        )

    def _judgement(self, engine: EngineName, engines: list[exported.Engine]) -> Judgement | None:
        """Decides between fp32 and a half for the float part of an engine, where that is asked for and both have answered."""
        halves = [entry for entry in engines if entry.engine == engine and entry.runnable and entry.float_precision in HALVES]
        if not halves or not self._decides_float_part(halves[0]):
            return None
        build = self.build
        half: FloatPrecision = "fp16" if halves[0].float_precision == "fp16" else "bf16"
        floating = self.answers.get((engine, build.floating, "fp32", "fp32"))
        exact = floating if build.is_half else self.answers.get((engine, build.variant, build.precision, "fp32"))
        if floating is None or exact is None:
            self.context.progress.warn(f"{build.name} {engine}: {half} cannot be judged, since an engine in fp32 was not built")
            return None
        found = judge(self.context.task, floating, exact, self.answers[engine, build.variant, build.precision, half], half)
        self.context.progress.log(
            f"    float part in {found.precision}: on {found.rows} selection rows the distance to the float model is "
            f"{found.half:.5f} in {half}, {found.fp32:.5f} in fp32"
        )
        return found

    def _tell_undecided(self, engines: list[exported.Engine]) -> None:
        """Warns of 16-bit float parts that no answers were available to judge."""
        for entry in engines:
            if entry.half_graph is not None and not entry.runnable and self._rest(entry.engine) == "auto":
                self.context.progress.log(
                    f"    {entry.engine}: {entry.float_precision} by the ranges of {entry.half_graph.range_rows} rows alone; "
                    "no engine ran whose answers could be judged"
                )
                return

    def _rest(self, engine: EngineName) -> FloatSetting:
        """Returns the setting as far as an engine can follow it: fp16 needs a half graph, bf16 that or a processor that computes it."""
        module = engine_module(engine)
        return "fp32" if module.strongly_typed() and self.graphs is None else module.float_part(self.rest)

    def _engines(self) -> list[EngineName]:
        """Returns the engines that are built; a float build in a half needs one that computes it from the files of fp32."""
        return [engine for engine in self.context.target.engines if not self.build.is_half or self._has_half(engine)]

    def _has_half(self, engine: EngineName) -> bool:
        """Whether an engine is built in the half of a float build."""
        module = engine_module(engine)
        if module.strongly_typed():
            return self.graphs is not None and self.graphs.rival == self.build.precision
        return self.build.precision == "bf16" and module.computes_bf16()

    def _half_graph(self, engine: EngineName, model: Path) -> HalfGraph | None:
        """Writes the half graph of an engine that runs one; returns None where there is none."""
        wanted = self.build.is_half or is_static_int8(self.build.precision)
        if self.graphs is None or not (wanted and engine_module(engine).strongly_typed()):
            return None
        half = self.graphs.rival if self.build.is_half else self.graphs.half_of(model, self.preprocessor)
        if half is None:
            return None
        made = self.graphs.write(model, half, self.preprocessor, self.folder)
        rules = ", ".join(f"{rule} {count}" for rule, count in sorted(made.islands.items()))
        self.context.progress.log(
            f"    {engine} in {half}: {sum(made.islands.values())} of {made.of} operations stay float32 ({rules or 'none'}), "
            f"by the ranges of {made.rows} rows"
        )
        return made

    def _onnx(self) -> Path:
        """Writes the ONNX model, float or quantized; returns its path. fp16 and bf16 start from the fp32 model."""
        destination = self.files / MODEL
        if self.build.is_half:
            return destination
        return write_graphs(self.build.checkpoint, self.preprocessor, destination, self.context.target.engines)

    def _engine(self, engine: EngineName, model: Path) -> Iterator[exported.Engine]:
        """Builds one engine and judges its modes; where modes are alternatives, those after the first that passes are left out."""
        passed = None
        for entry in self._build(engine, model):
            if passed not in (None, entry.mode):
                return
            judged = self._judged(entry, model) if entry.runnable else entry
            yield judged
            if judged.runnable and ENGINES[engine].generates:
                passed = entry.mode

    def _build(self, engine: EngineName, model: Path) -> Iterator[exported.Engine]:
        """Writes the files of one engine; yields its entries, the recommended mode first."""
        reason = engine_module(engine).refusal(self.build.precision, model)
        if reason is not None:
            self.context.progress.warn(f"{self.build.name} {engine}: {reason}")
            yield self._request(engine, model).entry("dynamic", runnable=False, reason=reason, int8_share_reason="there is no engine")
            return
        yield from engine_module(engine).build(self._request(engine, model))

    def _request(self, engine: EngineName, model: Path) -> BuildRequest:
        """Returns the job that builds an engine."""
        return BuildRequest(
            engine=engine,
            checkpoint=self.build.checkpoint,
            model=model,
            root=self.out,
            folder=self.folder,
            shared=self.files,
            precision=self.build.precision,
            float_precision=self.build.float_precision,
            bf16_float_part=is_static_int8(self.build.precision) and self._rest(engine) != "fp32",
            fp16_float_part=is_static_int8(self.build.precision) and self._rest(engine) == "fp16",
            half_graph=self._half_graph(engine, model),
            buckets=self.preprocessor.buckets,
            target=self.context.target,
            kv_cache=self.agreement.settings.kv_cache,
            log=lambda line: self.context.progress.log(f"    {line}"),
        )

    @cached_property
    def _gate(self) -> tuple[Split, Array]:
        """The rows of the parity gate and what torch eager answers to them: what every engine has to agree with."""
        rows = gate_rows(self.context.data)
        return rows, self._in_torch(rows)

    @cached_property
    def _floating(self) -> Array:
        """Torch's answers to the rows of the gate with grid weights and float activations."""
        from foundation.measure.predictions import predict
        from foundation.models.checkpoint import load_float

        return predict(load_float(self.build.checkpoint.folder), self.preprocessor, self._gate[0].rows, BATCH_SIZE)

    def _as_rounded(self, rounding: Rounding) -> Array:
        """Returns torch's answers to the rows of the gate, with the rounding of an engine that has its own scales of tokens."""
        from foundation.measure.predictions import predict, predicts_streamed
        from foundation.models.checkpoint import load, load_float

        split, expected = self._gate
        checkpoint = self.build.checkpoint
        if predicts_streamed(checkpoint.folder, self.context.task) or not (rounding.exact or load_tables(checkpoint.folder)):
            return expected
        if rounding not in self._rounded:
            model = load_float(checkpoint.folder) if rounding.exact else load(checkpoint.folder)
            with rounding.rounds(model, checkpoint):
                self._rounded[rounding] = predict(model, self.preprocessor, split.rows, BATCH_SIZE)
        return self._rounded[rounding]

    @cached_property
    def _amplified(self) -> exported.Parity | None:
        """How the predictions of torch compare with its own after a nudge, where they do not pass the gate; None where they do, and for
        models that are not held to this (`export.parity.amplified`)."""
        from export.parity.amplified import nudged
        from foundation.measure.agreement import compare_predictions
        from foundation.measure.predictions import predict, predicts_streamed
        from foundation.models.checkpoint import load

        (split, expected), task, checkpoint = self._gate, self.context.task, self.build.checkpoint
        if not TASKS[task].generates or not is_static_int8(self.build.precision) or predicts_streamed(checkpoint.folder, task):
            return None
        model = load(checkpoint.folder)
        with nudged(model):
            answers = predict(model, self.preprocessor, split.rows, BATCH_SIZE)
        compared = exported.Parity(**compare_predictions(task, expected, answers, split.labels))
        return None if compared.passed else compared

    def _rounding(self, engine: EngineName) -> Rounding | None:
        """Returns the engine's own dynamic quantization of this build; None if it has none."""
        scheme = of_precision(self.build.precision)
        return None if scheme is None else engine_module(engine).rounding(scheme)

    def _in_torch(self, split: Split) -> Array:
        """Returns the predictions of torch eager."""
        from foundation.measure.predictions import predict, predict_streamed, predicts_streamed
        from foundation.models.checkpoint import load

        checkpoint = self.build.checkpoint
        if predicts_streamed(checkpoint.folder, self.context.task):
            return predict_streamed(checkpoint.folder, self.preprocessor, split.rows, BATCH_SIZE, self.context.scratch)
        return predict(load(checkpoint.folder), self.preprocessor, split.rows, BATCH_SIZE)

    def _judged(self, entry: exported.Engine, model: Path) -> exported.Engine:
        """Compares one engine with torch on selection rows, and evaluates it if it passes; returns its entry.

        A mode whose predictions do not pass is not runnable: it is neither evaluated, timed nor served, and its entry says why.
        """
        from export.engines.spec import spec_of
        from foundation.measure.answers import load_logits

        if entry.engine == REFERENCE:
            compared, _ = self._compared(entry, self._gate[1])
            there = self.context.predictions.get(self.build.variant)
            logits = load_logits(there) if there else self._in_torch(self.context.data.evaluation)
            return self._evaluated(entry, compared, logits)
        spec = spec_of(self.out, self._as_entry(), entry, self.context.target)
        batch, rounds = spec.evaluation_batch, rounds_cache(entry)
        with EngineProcess(with_float_cache(spec) if rounds else spec) as process:
            counted = entry.with_(**dict(self._share(process, model)))
            compared, reason = self._gated(process, entry, model, batch)
            if reason is not None:
                return counted.with_(runnable=False, reason=reason, parity=compared)
            if not rounds:
                return self._measured(process, counted, compared, batch)
            path = self.folder / f"{entry.engine}-{entry.mode}{self._half(entry)}-float-cache.safetensors"
            floating = FloatCache.of(process, self.context.data.evaluation, batch, self.agreement, path)
        with EngineProcess(spec) as process:
            measured = self._measured(process, counted, compared, batch)
        return floating.cost(measured, self.out, self.context)

    def _gated(self, process: EngineProcess, entry: exported.Engine, model: Path, batch: int) -> tuple[exported.Parity, str | None]:
        """Compares an engine with torch on selection rows; returns the comparison, and why it does not pass, or None."""
        answers = process.predict(self._gate[0].rows, batch)
        probed = ENGINES[entry.engine].probed and entry.float_precision == "fp32"
        compared, reason = self._compared(entry, answers, self._layers(process, model, entry.engine) if probed else [])
        if self._decides_float_part(entry):
            request = entry.engine, self.build.variant, self.build.precision, str(entry.float_precision)
            self.answers[request] = process.predict(trial_rows(self.context), batch)
        if reason is None and ENGINES[entry.engine].generates:
            tokens, reason = self._answers(process, entry, compared.amplified is not None)
            compared = compared.with_(tokens=tokens)
        return compared, reason

    def _measured(self, process: EngineProcess, entry: exported.Engine, compared: exported.Parity, batch: int) -> exported.Engine:
        """Evaluates an engine that has passed; returns its entry."""
        if ENGINES[entry.engine].generates:
            entry = entry.with_(generation=self._generation(process, entry))
        return self._evaluated(entry, compared, process.predict(self.context.data.evaluation.rows, batch))

    def _half(self, entry: exported.Engine) -> str:
        """Returns the suffix of the files of a mode of an int8 build whose float part is fp16 or bf16."""
        return f"-{entry.float_precision}" if entry.float_precision != self.build.float_precision else ""

    def _answers(self, process: EngineProcess, entry: exported.Engine, amplifies: bool) -> tuple[Tokens, str | None]:
        """Compares the tokens of an engine with torch's; returns the comparison, and why it does not pass, or None."""
        rounding = self._rounding(entry.engine)
        compared, reason = self.agreement.gate(process, self.build.checkpoint, rounding=rounding, amplifies=amplifies)
        name = f"{entry.engine} {entry.mode}"
        held = entry.float_precision == "fp32"
        self.context.progress.log(
            f"    {name}: {compared.identical} of {compared.prompts} answers of {compared.tokens} tokens equal torch's, "
            f"{percent(compared)} % of the tokens"
        )
        return compared, f"parity: {self.build.name} {name}: {reason}" if held and reason is not None else None

    def _generation(self, process: EngineProcess, entry: exported.Engine) -> exported.Generation:
        """Answers the evaluation prompts and compares with the baseline; returns `generation` of the engine's entry."""
        path = self.folder / f"{entry.engine}-{entry.mode}{self._half(entry)}-answers.safetensors"
        found = self.agreement.evaluate(process, self.build.checkpoint, path)
        baseline, worth = found.baseline, found.quality
        assert baseline is not None, "answers are compared with the baseline"
        self.context.progress.log(
            f"    {entry.engine} {entry.mode}: {percent(baseline)} % of the tokens equal the float baseline's ({baseline.prompts} prompts)"
        )
        if worth is not None:
            spread = "no interval" if worth.bleu_change is None else "95 % {:+.2f} to {:+.2f}".format(*worth.bleu_change)
            self.context.progress.log(
                f"      BLEU {worth.bleu:.2f}, chrF {worth.chrf:.2f}; the float baseline {worth.bleu_before:.2f}, "
                f"{worth.chrf_before:.2f} (change of BLEU {spread})"
            )
        return found.with_(file=self._relative(path))

    def _compared(self, entry: exported.Engine, answers: Array, layers: Sequence[LayerParity] = ()) -> tuple[exported.Parity, str | None]:
        """Compares an engine with torch on the rows of the gate; returns the comparison, and why it does not pass, or None.

        Raises:
            ParityError: The integers of a layer are wrong.
        """
        from export.parity.amplified import NOISE, further_in_more_rows
        from export.parity.own_rounding import further_than_torch
        from export.parity.parity import as_rows, check_layers
        from foundation.measure.agreement import compare_predictions, shortfall

        split, expected = self._gate
        rounding = self._rounding(entry.engine)
        if rounding is not None and rounding.exact:
            expected = self._as_rounded(rounding)
        name = f"{self.build.name} {entry.engine} {entry.mode}"
        check_layers(name, layers)
        compared = compare_predictions(self.context.task, expected, answers, split.labels)
        own = entry.float_precision in (self.build.float_precision, self.build.precision)
        rest = "" if own else f", rest {entry.float_precision}"
        self.context.progress.log(
            f"    {entry.engine} {entry.mode}{rest}: on selection rows {compared['disagreements']} of {compared['n']} predictions "
            f"differ from torch, median |d{compared['differs']}| {compared['median_abs']:.4f}, max {compared['max_abs']:.4f}"
        )
        short = shortfall(compared, REFERENCE) if entry.float_precision == "fp32" else None
        if short is not None and rounding is not None:
            short = further_than_torch(self.context.task, self._floating, self._as_rounded(rounding), answers, split.labels)
            compared["passed"] = short is None
            self.context.progress.log(
                f"      it rounds tokens by itself, {'no' if short is None else 'and is'} further from float than torch"
            )
        elif short is not None and (moved := self._amplified) is not None:
            short = further_in_more_rows(self.context.task, self._floating, expected, answers)
            compared |= {"passed": short is None, "amplified": moved.disagreements}
            self.context.progress.log(
                f"      the model amplifies rounding: moved by {NOISE:g}, torch itself predicts {moved.disagreements} of {moved.n} "
                f"otherwise; the engine is {'no ' if short is None else ''}further from float than torch"
            )
        reason = None if short is None else f"parity: {name}: {short}"
        return exported.Parity(engine=entry.engine, mode=entry.mode, layers=as_rows(layers), **compared), reason

    def _evaluated(self, entry: exported.Engine, compared: exported.Parity, logits: Array) -> exported.Engine:
        """Writes the predictions of an engine for the evaluation split; returns its entry with the metrics."""
        from foundation.measure.answers import save_predictions
        from foundation.measure.metrics import metrics

        labels, task = self.context.data.evaluation.labels, self.context.task
        half = self._half(entry)
        predictions = self.folder / f"{entry.engine}-{entry.mode}{half}.safetensors"
        save_predictions(predictions, logits, labels)
        figures, count = metrics(task, logits, labels), labels.count()
        share = f", int8 share {entry.int8_share:.4f}" if entry.int8_share else ""
        self.context.progress.log(f"    {entry.engine} {entry.mode}{half}: {figures[TASKS[task].metric]:.4f} (n={count}){share}")
        known = entry.with_(metrics=figures, n=count, predictions=self._relative(predictions))
        return known.with_(runnable=True, reason=None, parity=compared)

    def _decides_float_part(self, entry: exported.Engine) -> bool:
        """Whether the answers of an engine to the trial rows are needed to choose between fp32 and a half."""
        engine, precision = entry.engine, self.build.precision
        if self._rest(engine) != "auto":
            return False
        if engine_module(engine).strongly_typed():
            return self.build.is_half or precision == "fp32" or is_static_int8(precision)
        return entry.mode != "dynamic" and (precision == "fp32" or is_static_int8(precision))

    def _require(self, engines: list[exported.Engine]) -> None:
        """Raises where no mode of an engine passed; warns of each one that did not."""
        from export.parity.parity import ParityError

        held = [entry for entry in engines if entry.float_precision == self.build.float_precision]
        passed = {entry.engine for entry in held if entry.runnable}
        for entry in engines:
            if entry.parity is not None and not entry.runnable:
                if entry.engine not in passed:
                    raise ParityError(str(entry.reason))
                self.context.progress.warn(f"{entry.reason}; this mode is left out")

    def _share(self, process: EngineProcess, model: Path) -> exported.Shares:
        from export.graph.macs import count_macs
        from export.share import share

        batch, sequence = max(self.context.target.batch_sizes), max(self.preprocessor.buckets, default=None)
        gemms = count_macs(Graph(model), batch, sequence)
        told = process.ask("precisions", gemms=[gemm.node for gemm in gemms], batch=batch, sequence=sequence)["precisions"]
        return share(gemms, told)

    def _layers(self, process: EngineProcess, model: Path, engine: str) -> list[LayerParity]:
        return engine_module(engine).layers(of_precision(self.build.precision), model, lambda entries: self._probe(process, entries))

    def _probe(self, process: EngineProcess, entries: Sequence[WithTensors]) -> dict[str, Array]:
        """Returns the tensors of these layers and sites on some rows of the gate."""
        length = max(self.preprocessor.buckets) if self.preprocessor.buckets else None
        rows = self._gate[0].rows[: max(1, PROBED_TOKENS // length) if length else 1]
        return process.probe(list(dict.fromkeys(name for entry in entries for name in entry.tensors)), rows, length)

    def _as_entry(self) -> exported.Build:
        return exported.Build(precision=self.build.precision, float_precision=self.build.float_precision, folder=self.build.name)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.out).as_posix()


def percent(compared: Tokens) -> str:
    """Returns the share of equal tokens, in percent."""
    return f"{100 * (compared.equal_share or 0.0):.1f}"


def _worst(engines: list[exported.Engine]) -> exported.Parity | None:
    """Returns the comparison that stands for a build: of what passed, that which is furthest from torch."""
    compared = [entry.parity for entry in engines if entry.runnable and entry.engine != REFERENCE and entry.parity is not None]
    return max(compared, key=lambda parity: (parity.disagreements or 0, parity.median_abs or 0.0), default=None)

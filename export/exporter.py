"""The work of the stage `export` on one build: its graphs and engines, the gate of parity, the evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from export.builds import HALVES, Build, Request, reads_graph
from export.choices import FloatPrecision, FloatSetting
from export.engines.registry import engine_module
from export.engines.spec import BuildRequest
from export.float_part import Judgement, judge, recommended_first, trial_rows
from export.generation.agreement import Agreement
from export.generation.float_cache import FloatCache, rounds_cache, with_float_cache
from export.graph.quantized import write_graphs
from export.half_graphs import HalfGraph, HalfGraphs
from export.parity.own_rounding import Rounding
from foundation.artifacts import exported
from foundation.artifacts.figures import Tokens
from foundation.artifacts.graph import Graph
from foundation.core.arrays import Array
from foundation.core.engines import ENGINES, REFERENCE, EngineName
from foundation.labels.tasks import TASKS
from foundation.measure.engine_process import EngineProcess
from foundation.schemes.table import is_static_int8, of_precision
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor, Row

if TYPE_CHECKING:
    from export.engines.module import WithTensors
    from export.parity.gate import Compared, Gate
    from export.parity.parity import LayerParity

MODEL = "model.onnx"
TOGETHER = 32
"""Rows that an engine with a cache, which is made for no shape, reads at once where it is evaluated."""
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
        zeros: str = "multiply",
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
            zeros: The setting `zeros`.
        """

        self.build, self.context, self.out, self.answers, self.agreement = build, context, out, answers, agreement
        self.rest, self.graphs, self.zeros = rest, graphs, zeros
        self.folder = out / build.name
        self.folder.mkdir()
        self.files = out / replace(build, precision="fp32").name if build.is_half else self.folder
        self.preprocessor: Preprocessor = context.preprocessor(build.checkpoint.folder)
        self.preprocessor.save(self.folder)

    @property
    def gate(self) -> Gate:
        """The rows of the gate, and torch's answers to them."""
        return self.agreement.predictions

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
            onnx=self._relative(model) if reads_graph(self.context) else None,
            engines=tuple(sorted(engines, key=lambda entry: (names.index(entry.engine), not entry.runnable))),
            parity=_worst([entry for entry in engines if entry.float_precision == self.build.float_precision]),
            float_part=exported.FloatPart(**asdict(next(iter(judged.values())))) if judged else None,
            adapters=self.preprocessor.adapters,
        )

    def _judgement(self, engine: EngineName, engines: list[exported.Engine]) -> Judgement | None:
        """Decides between fp32 and a half for the float part of an engine, where that is asked for and both have answered."""
        halves = [entry for entry in engines if entry.engine == engine and entry.runnable and entry.float_precision in HALVES]
        if not halves or not self._decides_float_part(halves[0]):
            return None
        build = self.build
        half: FloatPrecision = "fp16" if halves[0].float_precision == "fp16" else "bf16"
        floating = self.answers.get((engine, build.floating, "fp32", "fp32"))
        if self.preprocessor.adapters and build.is_quantized:  # the float variant that it was made of has none
            floating = self.gate.predicted(build.checkpoint, "float", trial_rows(self.context))
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
        """Writes the ONNX model, float or quantized, if an engine reads it; returns its path. fp16 and bf16 start from the fp32 model."""
        destination = self.files / MODEL
        if self.build.is_half or not reads_graph(self.context):
            return destination
        model = write_graphs(self.build.checkpoint, self.preprocessor, destination, self.context.target.engines)
        if self.zeros == "auto":
            self._drop_zero_slices(model)
        return model

    def _drop_zero_slices(self, model: Path) -> None:
        """Lets the products of the graph leave out zeros where that is faster."""
        from export.product_times import ProductTimes, without_zero_slices

        changed = without_zero_slices(model, ProductTimes(self.context, self.build.checkpoint, self.folder), self.preprocessor)
        if changed:
            macs = [(one.extent.read * one.extent.written, one.extent.inputs * one.extent.outputs) for one in changed]
            left = sum(after for after, _ in macs) / sum(before for _, before in macs)
            self.context.progress.log(f"    {len(changed)} products without zero inputs and outputs: {left:.1%} of their multiplications")

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
            batch_invariant=self.agreement.settings.batch_invariant,
            log=lambda line: self.context.progress.log(f"    {line}"),
        )

    def _rounding(self, engine: EngineName) -> Rounding | None:
        """Returns the engine's own dynamic quantization of this build; None if it has none."""
        scheme = of_precision(self.build.precision)
        return None if scheme is None else engine_module(engine).rounding(scheme)

    def _judged(self, entry: exported.Engine, model: Path) -> exported.Engine:
        """Compares one engine with torch on selection rows, and evaluates it if it passes; returns its entry.

        A mode whose predictions do not pass is not runnable: it is neither evaluated, timed nor served, and its entry says why.
        """
        from export.engines.spec import spec_of
        from foundation.measure.answers import load_logits

        if entry.engine == REFERENCE:
            own = self.gate.in_torch(self.build.checkpoint, "integers", self.gate.looks[0])
            compared = self._parity(entry, self._compared(entry, own))
            there = self.context.predictions.get(self.build.variant)
            rows = self.context.data.evaluation.rows
            logits = load_logits(there) if there else self.gate.predicted(self.build.checkpoint, "integers", rows)
            return self._evaluated(entry, compared, logits)
        spec = spec_of(self.out, self._as_entry(), entry, self.context.target)
        rounds, generates = rounds_cache(entry), ENGINES[entry.engine].generates is not None
        batch = max(spec.evaluation_batch, TOGETHER) if generates else spec.evaluation_batch
        with EngineProcess(with_float_cache(spec) if rounds else spec) as process:
            counted = entry.with_(**dict(self._share(process, model)), reported=process.ask("reported")["reported"])
            compared, reason = self._gated(process, entry, model, batch)
            if reason is not None:
                return counted.with_(runnable=False, reason=reason, parity=compared)
            if not rounds:
                return self._measured(process, counted, compared, batch)
            path = self.folder / f"{entry.engine}-{entry.mode}{self._half(entry)}-float-cache.safetensors"
            evaluation = self.context.data.evaluation
            logits = self._predicted(process, entry, evaluation.rows, batch)
            floating = FloatCache.of(process, logits, evaluation.labels, self.agreement, path)
        with EngineProcess(spec) as process:
            counted = counted.with_(reported=process.ask("reported")["reported"])  # before, the cache was float
            measured = self._measured(process, counted, compared, batch)
        return floating.cost(measured, self.out, self.context)

    def _gated(self, process: EngineProcess, entry: exported.Engine, model: Path, batch: int) -> tuple[exported.Parity, str | None]:
        """Compares an engine with torch on selection rows; returns the comparison, and why it does not pass, or None.

        Raises:
            ParityError: The integers of a layer are wrong.
        """
        from export.parity.parity import check_layers

        name = f"{self.build.name} {entry.engine} {entry.mode}"
        probed = ENGINES[entry.engine].probed and entry.float_precision == "fp32"
        answers: list[Array] = []
        layers: list[LayerParity] = []
        found: Compared | None = None
        for done, count in pairwise([0, *self.gate.looks]):
            answers.append(self._predicted(process, entry, self.gate.split.rows[done:count], batch))
            if probed and not done:
                layers = self._layers(process, model, entry.engine)
                check_layers(name, layers)
            found = self._compared(entry, np.concatenate(answers))
            if found.settled:
                break
        assert found is not None, "the gate has rows"
        self._log(entry, found, sum(map(len, answers)))
        compared, reason = self._parity(entry, found, layers), None if found.short is None else f"parity: {name}: {found.short}"
        if self._decides_float_part(entry):
            request = entry.engine, self.build.variant, self.build.precision, str(entry.float_precision)
            self.answers[request] = self._trial_answers(process, entry, batch, np.concatenate(answers))
        if reason is None and ENGINES[entry.engine].generates:
            tokens, reason = self._answers(process, entry, compared.amplified is not None)
            compared = compared.with_(tokens=tokens)
        return compared, reason

    def _trial_answers(self, process: EngineProcess, entry: exported.Engine, batch: int, answers: Array) -> Array:
        """Returns an engine's predictions for the rows that choose the float part; those of the gate are not asked again.

        Args:
            process: The engine.
            entry: Its entry.
            batch: Most rows that it reads at once.
            answers: Its predictions for the first rows of the gate.
        """
        generates, gate = TASKS[self.context.task].generates, self.gate
        rows = gate.split.rows[: gate.looks[0]] if generates else trial_rows(self.context)  # a block holds over a hundred predictions
        known = {id(row): answer for row, answer in zip(gate.split.rows, answers, strict=False)}  # rows of a split are shared
        others = [row for row in rows if id(row) not in known]
        if others:
            known |= zip(map(id, others), self._predicted(process, entry, others, batch), strict=True)
        return np.stack([known[id(row)] for row in rows])

    def _predicted(self, process: EngineProcess, entry: exported.Engine, rows: Sequence[Row], batch: int) -> Array:
        """Returns an engine's predictions for rows."""
        with self.context.progress.bar(f"    {entry.engine} {entry.mode}: rows", len(rows)) as advance:
            return process.predict(rows, batch, advance)

    def _measured(self, process: EngineProcess, entry: exported.Engine, compared: exported.Parity, batch: int) -> exported.Engine:
        """Evaluates an engine that has passed; returns its entry."""
        if ENGINES[entry.engine].generates:
            entry = entry.with_(generation=self._generation(process, entry))
        return self._evaluated(entry, compared, self._predicted(process, entry, self.context.data.evaluation.rows, batch))

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

    def _compared(self, entry: exported.Engine, answers: Array) -> Compared:
        """Compares an engine's answers to the first rows of the gate with torch's."""
        return self.gate.compare(self.build, answers, self._rounding(entry.engine), held=entry.float_precision == "fp32")

    def _parity(self, entry: exported.Engine, found: Compared, layers: Sequence[LayerParity] = ()) -> exported.Parity:
        from export.parity.parity import as_rows

        return exported.Parity(engine=entry.engine, mode=entry.mode, layers=as_rows(layers), **found.figures)

    def _log(self, entry: exported.Engine, found: Compared, rows: int) -> None:
        """Logs how an engine compares with torch on the first rows of the gate."""
        own = entry.float_precision in (self.build.float_precision, self.build.precision)
        rest = "" if own else f", rest {entry.float_precision}"
        whole, figures = len(self.gate.split), found.figures
        some = "" if rows == whole else f"; {rows} of {whole} rows are enough"
        self.context.progress.log(
            f"    {entry.engine} {entry.mode}{rest}: on selection rows {figures['disagreements']} of {figures['n']} predictions "
            f"differ from torch, median |d{figures['differs']}| {figures['median_abs']:.4f}, max {figures['max_abs']:.4f}{some}"
        )
        for note in found.notes:
            self.context.progress.log(f"      {note}")

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
        from export.graph.traced_macs import traced_macs
        from export.share import share

        batch, sequence = max(self.context.target.batch_sizes), max(self.preprocessor.buckets, default=None)
        if reads_graph(self.context):
            gemms = count_macs(Graph(model), batch, sequence)
        else:
            assert sequence is not None, "a model that generates reads tokens"
            gemms = traced_macs(self.build.checkpoint, self.context.task, batch, sequence)
        told = process.ask("precisions", gemms=[gemm.node for gemm in gemms], batch=batch, sequence=sequence)["precisions"]
        return share(gemms, told)

    def _layers(self, process: EngineProcess, model: Path, engine: str) -> list[LayerParity]:
        return engine_module(engine).layers(of_precision(self.build.precision), model, lambda entries: self._probe(process, entries))

    def _probe(self, process: EngineProcess, entries: Sequence[WithTensors]) -> dict[str, Array]:
        """Returns the tensors of these layers and sites on some rows of the gate."""
        length = max(self.preprocessor.buckets) if self.preprocessor.buckets else None
        rows = self.gate.split.rows[: max(1, PROBED_TOKENS // length) if length else 1]
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

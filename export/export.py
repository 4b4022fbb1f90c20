"""The stage `export`: from checkpoints to engines that have been checked against torch and evaluated.

What is built, each in a folder `<variant>-<precision>`:

    ends   the baseline in float, the last variant (of each branch, if the recipe has branches), and where that is int8 the float variant
           that it was made of: what int8 has to beat
    all    every variant, int8 where it is quantized

On a processor with bf16 the float variant of the last one is also built in bf16, from the files of its fp32 build: there bf16 is what int8
has to beat. An int8 build gets a mode there whose float part is bf16 (`export.float_part`). For engines whose graph says what runs in
halves, as TensorRT's does, the same is true for fp16 or bf16 (`export.half_graphs`): where such an engine runs, both modes of an int8 build
are made and its answers decide; where it does not, the ranges do, and only the 16-bit mode is proved.

Every engine runs in a process of its own, in the configuration that is timed and served. First it has to agree with torch on selection rows
(`export.parity.parity`), or is left out; where no mode of an engine agrees, the stage fails. Only an engine that stays predicts the whole
evaluation split, so what is built, left out or recommended does not depend on evaluation rows. Halves are compared but not held
to it: of an int8 build the same graph is, with its float part in fp32. A cache of keys and values in less
than float is not held to it either: the engine is with a float cache, and what less costs is recorded (`export.generation.float_cache`).
With `tensor_parallel` the last variant is divided over ranks, too (`export.divided`).
A float build that an earlier export of the store has made is taken from there (`export.reuse`).
`export.json` lists all of it: engines in the order of `target.engines`, of an engine the recommended mode first.

With `zeros: auto` the graph of a build multiplies without the inputs and outputs of a matrix that are all 0, where that is faster
(`export.product_times`).

Left out: engines that need another machine are recorded with `runnable: false` and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from export.choices import FloatSetting, Generation
from foundation.artifacts import exported
from foundation.artifacts.artifact import Artifact, Kind, digest, write_json
from foundation.artifacts.store import BUILD
from foundation.core.arrays import Array
from foundation.core.engines import ENGINES, REFERENCE
from foundation.core.errors import InputError
from foundation.core.named import one_of
from foundation.models.folder import Checkpoint
from foundation.models.library import model_class
from foundation.stage.stage import Stage
from foundation.standalone.preprocess import Preprocessor

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from export.builds import Build, Request
    from export.half_graphs import HalfGraphs
    from export.reuse import Reuse
    from foundation.core.json_value import Json
    from foundation.stage.context import Context

EXPORTED = "export.json"
COMPRESSED = "compressed-tensors"
DIVIDED_ROWS = 64
"""Rows that the ranks of a divided model are checked with."""


class Export(Stage):
    """Builds the engines of the target, checks them against torch and evaluates them."""

    VERSION: ClassVar[int] = 17
    NAME: ClassVar[str] = "export"
    PRODUCES: ClassVar[Kind] = "engine"
    LATER: ClassVar[tuple[str, ...]] = ("tensor_parallel", "expert_parallel", "zeros")

    variants: Literal["ends", "all"] = "ends"
    """ends: the baseline, the last variant (of each branch, if the recipe has branches), and the float variant that it was quantized from;
    all: every variant."""
    float_precision: FloatSetting = "auto"
    """Precision of the float part of int8 engines: OpenVINO in bf16 on processors that have it (fp32 on others), TensorRT in fp16 or
    bf16. auto: a half, unless that brings the answers to selection rows further from the float model than int8 does by itself. Which half
    TensorRT takes is decided by the ranges of its tensors on selection rows: fp16, or bf16 where fp16 would leave matrix products in
    float32. Where no TensorRT runs, nothing but the ranges decides. The fused kernels of torch take fp16 only where it is given, as they
    have no float model to be judged by."""
    compressed_tensors: bool | Literal["auto"] = "auto"
    """Whether to write the last variant in the format compressed-tensors too, which Transformers, vLLM and SGLang load; auto: where it is
    a quantized decoder that the format can hold."""

    generation: Generation = Generation()
    """For language models: how engines that answer prompts keep keys and values, and how their answers are checked."""

    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices that share each layer of the last variant: writes a folder for each, with what it holds of every layer, and checks that
    together they give the answers of the undivided model. Has to divide attention heads and FFN neurons, and may cut no group of int4.
    1: not divided."""
    expert_parallel: bool = False
    """With `tensor_parallel`: whether each device holds some experts of a mixture whole, instead of a part of every expert. It then has to
    divide their number, and not their neurons."""

    zeros: Literal["multiply", "auto"] = "multiply"
    """What graphs do with inputs and outputs of a matrix whose weights are all 0. multiply: they are multiplied like the others. auto: the
    product leaves them out where the first engine of the target is faster by that, as measured for each size; the answers are the same."""

    @model_validator(mode="after")
    def _deals_out_to_several(self) -> Self:
        if self.expert_parallel and self.tensor_parallel == 1:
            raise ValueError("expert_parallel: true given without tensor_parallel: give tensor_parallel: 2 or more, or leave it out")
        return self

    def depends(self, context: Context) -> dict[str, str] | None:
        """The digest of the questions, where a file of them is given."""
        from export.generation.questions import KEY
        from foundation.models.inputs.questions import read_questions

        return None if self.generation.questions is None else {"questions": digest(read_questions(self.generation.questions, KEY))}

    def check(self, config: PreTrainedConfig, teacher: PreTrainedConfig | None, context: Context) -> None:
        """Checks that the engines fit the device of the target and the model, that the processor has the precision, and the questions.

        Raises:
            InputError: An engine does not, the processor has no bf16, or the questions cannot be read or asked.
        """
        from export.generation.questions import KEY
        from foundation.models.inputs.questions import read_questions

        self._check_precision(context)
        self._check_zeros(context)
        _check_cache(config, context)
        _check_model(config, context)
        if self.generation.batch_invariant:
            _check_invariant(config, context, self._key("generation.batch_invariant"))
        if self.tensor_parallel > 1:
            from export.divided.folder import check_division

            check_division(config, self.tensor_parallel, self._key("tensor_parallel"), self.expert_parallel)
        if self.generation.questions is not None:
            read_questions(self.generation.questions, KEY)
            if not context.facts.generates or config.is_encoder_decoder:
                raise InputError(KEY, f"given for {context.task}", "a decoder that answers is asked questions", "leave it out")

    def _check_zeros(self, context: Context) -> None:
        """Raises if products without zeros cannot be timed on the first engine."""
        from export.engines.registry import engine_module

        engine, target = context.target.engines[0], context.target
        built = engine != REFERENCE and engine_module(engine).reads_graph() and not context.facts.two_towers
        if self.zeros == "auto" and not (built and target.device == "cpu"):
            why = f"products are timed on a CPU, in an engine that is built from the graph of one model; {engine} comes first here"
            raise InputError(self._key("zeros"), "auto given", why, "give multiply")

    def _check_precision(self, context: Context) -> None:
        from export.builds import computes_bf16, has_half_graphs

        _check_target(context)
        key, typed = self._key("float_precision"), has_half_graphs(context)
        if self.float_precision == "bf16" and not (typed or computes_bf16(context)):
            raise InputError(key, "bf16 given", "this processor has no bf16", "give auto or fp32")
        if self.float_precision == "fp16" and not any(map(_follows_fp16, context.target.engines)):
            able = list(filter(_follows_fp16, ENGINES))
            raise InputError(key, "fp16 given", f"of the engines {one_of(able)} has it", "add it to target.engines, or give auto")

    def run(self, parent: Artifact, context: Context, out: Path) -> dict[str, Json]:
        """Writes one folder for each build, and `export.json`.

        Returns:
            `builds`: `name`, and the metrics and int8 share of each of its engines; `compressed_tensors`: the folder, or None; `divided`,
            where that was asked for; `reused`: names of the builds that an earlier export had made, where there are any.

        Raises:
            InputError: An engine of the target does not run on its device, the format compressed-tensors was asked for and cannot
                hold the model, or the draft cannot propose tokens.
            ParityError: Integers of an engine are wrong, the predictions of all its modes differ from torch's, or proposals change
                its answers.
            EngineError: An engine failed.
        """
        from export.builds import planned
        from export.exporter import Exporter
        from export.generation.agreement import Agreement
        from export.generation.proposals import with_proposals
        from export.half_graphs import HalfGraphs
        from export.towers import TowersExporter
        from foundation.stage.stage import REUSED

        self._check_precision(context)
        entries, agreement = list[exported.Build](), Agreement(context, self.generation)
        answers: dict[Request, Array] = {}
        builds = planned(context, self.variants, self.generation.draft)
        graphs = HalfGraphs(context, self.float_precision)
        reuse = self._reuse(context, out, answers)
        for build in self._with_rivals(builds, graphs, context, out):
            context.progress.log(f"  {build.name}")
            exporter = TowersExporter if context.facts.two_towers else Exporter
            make = partial(exporter, build, context, out, self.float_precision, answers, agreement, graphs, self.zeros)
            entries.append(reuse.entry(build, make))
        entries = with_proposals(entries, self.generation, context, out)
        packed = self._compressed(context, out)
        document = exported.Exported(schema_=1, builds=tuple(entries), compressed_tensors=packed)
        figures: dict[str, Json] = {"builds": [_summary(entry) for entry in entries], "compressed_tensors": packed}
        if self.tensor_parallel > 1:
            divided = self._divided(context, out)
            document, figures["divided"] = document.with_(divided=divided), divided.written()
        write_json(out / EXPORTED, document.written())
        return {**figures, REUSED: [*reuse.taken]} if reuse.taken else figures

    def reuses(self, context: Context) -> bool:
        """Whether float builds of the checkpoints that are there are kept."""
        from export.builds import planned

        if context.shared is None or not context.checkpoints or not any(context.shared.glob(f"{BUILD}*")):
            return False
        reuse = self._reuse(context, context.shared, {})
        return any(reuse.keeps(build) for build in planned(context, self.variants, self.generation.draft))

    def _reuse(self, context: Context, out: Path, answers: dict[Request, Array]) -> Reuse:
        from export.reuse import Reuse

        zeros = [] if self.zeros == "multiply" else [self.zeros]
        return Reuse(context, out, answers, [self.VERSION, self.float_precision, self.generation.model_dump(mode="json"), *zeros])

    def _with_rivals(self, builds: Sequence[Build], graphs: HalfGraphs, context: Context, out: Path) -> Iterator[Build]:
        """Yields the builds, and last those in 16 bits; which half that is in half graphs is read off the fp32 build, made by then."""
        from export.builds import has_half_graphs, rivals
        from export.exporter import MODEL

        yield from (build for build in builds if not build.is_half)
        if has_half_graphs(context):
            last = [build for build in builds if not build.is_half][-1]
            folder = out / replace(last, variant=last.floating, precision="fp32").name
            graphs.rival = graphs.half_of(folder / MODEL, Preprocessor.load(folder))
        yield from (build for build in builds if build.is_half)
        if graphs.rival is not None:
            yield from rivals(builds, graphs.rival)

    def _compressed(self, context: Context, out: Path) -> str | None:
        """Writes the last variant in the format compressed-tensors; returns its folder, None where there is none."""
        from export.compressed_tensors import is_decoder, obstacle, write
        from export.graph.quantized import precision_of

        variant, artifact = list(context.checkpoints.items())[-1]
        fits = precision_of(Checkpoint(artifact.path)) != "fp32" and is_decoder(Checkpoint(artifact.path))
        reason = obstacle(Checkpoint(artifact.path)) if fits else f"{variant} is no quantized decoder"
        if self.compressed_tensors is True and reason is not None:
            raise InputError(self._key("compressed_tensors"), reason)
        if self.compressed_tensors is False or reason is not None:
            if fits and self.compressed_tensors == "auto":
                context.progress.warn(f"not written as compressed-tensors: {reason}")
            return None
        write(Checkpoint(artifact.path), out / f"{variant}-{COMPRESSED}")
        context.progress.log(f"  {variant}-{COMPRESSED}: load it with transformers.AutoModelForCausalLM.from_pretrained")
        return f"{variant}-{COMPRESSED}"

    def _divided(self, context: Context, out: Path) -> exported.DividedVariant:
        """Divides the last variant over `tensor_parallel` ranks and checks them; returns its entry of export.json."""
        from export.divided.folder import expert_layers, write
        from export.divided.placement import place
        from export.divided.proof import prove
        from export.parity.rows import gate_rows

        variant, artifact = list(context.checkpoints.items())[-1]
        name = f"{variant}-tensor-parallel-{self.tensor_parallel}"
        checkpoint, dealt = Checkpoint(artifact.path), None
        if self.expert_parallel:
            dealt = place(artifact.metrics, expert_layers(checkpoint.config), self.tensor_parallel)
        placements = None if dealt is None else dealt.placements
        folders = write(checkpoint, out / name, self.tensor_parallel, self._key("tensor_parallel"), placements)
        rows = gate_rows(context.data)
        rows = rows.take(range(min(DIVIDED_ROWS, len(rows))))
        found = prove(checkpoint, folders, rows, context.preprocessor(artifact.path), context.task)
        sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders]
        same = "equal to the last bit" if found.equal else f"at most {found.max_abs:.2g} apart"
        context.progress.log(f"  {name}: {self.tensor_parallel} ranks of {max(sizes) / 1e6:.1f} MB; answers to {found.rows} rows {same}")
        found = found.with_(variant=variant, ranks=self.tensor_parallel, folder=name, bytes=tuple(sizes))
        if dealt is None or dealt.busiest is None:
            return found
        beside = f"{dealt.busiest_in_order:.2f} times with experts in order"
        context.progress.log(f"  {name}: the busiest rank reads {dealt.busiest:.2f} times the tokens of the mean, {beside}")
        return found.with_(busiest=dealt.busiest, busiest_in_order=dealt.busiest_in_order)

    def _key(self, name: str) -> str:
        """Returns the key path of a setting, for messages."""
        return f"{self.key}.{name}"


def _follows_fp16(engine: str) -> bool:
    from export.engines.registry import engine_module

    return engine_module(engine).float_part("fp16") == "fp16"


def _check_target(context: Context) -> None:
    for engine in context.target.engines:
        if ENGINES[engine].cpu_only and context.target.device != "cpu":
            others = one_of([name for name, row in ENGINES.items() if not row.cpu_only])
            raise InputError(
                "target.engines", f"{engine} given with target.device {context.target.device}", "it runs on cpu", f"give {others}"
            )


def _check_cache(config: PreTrainedConfig, context: Context) -> None:
    from export.generation.missing_keys import missing_keys

    cached = [engine for engine in context.target.engines if ENGINES[engine].generates == "decoder"]
    if not cached or not context.facts.generates or config.is_encoder_decoder:
        return
    missing = missing_keys(config, model_class(config, context.task))
    if missing is not None:
        raise InputError(
            "target.engines",
            f"{cached[0]} given",
            f"it answers from keys and values of every layer, and {missing}",
            f"give a decoder whose layers all keep them, or leave {cached[0]} out",
        )


def _check_model(config: PreTrainedConfig, context: Context) -> None:
    from export.engines.registry import engine_module

    for engine in context.target.engines:
        if why := engine_module(engine).model_refusal(config):
            raise InputError("target.engines", f"{engine} given", why, f"leave {engine} out")


def _check_invariant(config: PreTrainedConfig, context: Context, key: str) -> None:
    from export.engines.registry import engine_module

    if not context.facts.generates or config.is_encoder_decoder:
        raise InputError(key, f"true given for {context.task}", "it is for decoders that answer", "leave it out")
    able = [engine for engine in ENGINES if engine_module(engine).batch_invariant()]
    answering = [engine for engine in context.target.engines if ENGINES[engine].generates]
    unable = [engine for engine in answering if engine not in able]
    if unable or not answering:
        given = f"true given with {one_of(unable)}" if unable else "true given without an engine that answers"
        raise InputError(key, given, f"{one_of(able)} can be built so", f"give {one_of(able)} alone in target.engines, or leave it out")


def _summary(entry: exported.Build) -> dict[str, Json]:
    engines: list[Json] = [
        {
            "engine": engine.engine,
            "mode": engine.mode,
            "float_precision": engine.float_precision,
            "metrics": {**engine.metrics},
            "int8_share": engine.int8_share,
        }
        for engine in entry.engines
    ]
    return {"name": entry.folder, "engines": engines}

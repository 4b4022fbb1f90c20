"""Post-training quantization of large language models, one decoder layer at a time, from file to file.

    rotation, if one is given         first, into a folder of float32 weights that the rest reads (`quantize.rotation.stored`)
    embeddings, last norm, head       copied as stored; tables of int8 rows are rounded, and written as float32
    each decoder layer                `streamed.stored_layer`: observe, smooth, round, write, advance the hidden states

Apart from the hidden states of the calibration rows, memory does not grow with the depth of the model (`foundation.models.streaming`), so a
model may be larger than memory. The result has the same form and values as quantizing in memory, up to the order of float sums; only the
dtype of the weights is the stored one. Rounding to nearest needs no rows if activations have no ranges, nothing is smoothed and groups do
not take their ranges by the outputs; then the figures have no largest inputs.

Not supported, as they run the whole model many times: training, equalization, bias correction, int8 attention and residuals, sensitivity
and mixed precision, calibration method auto, and range checks on selection rows. Convolutions stay float.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from foundation.artifacts.shards import ShardWriter
from foundation.core.errors import InputError
from foundation.labels.tasks import tasks_with
from foundation.machine.device import computing_device
from foundation.machine.process import freed_memory_returned
from foundation.models.checkpoint import load
from foundation.models.files import TEXT_FILES, copy_files
from foundation.models.folder import Checkpoint
from foundation.models.forward import linears
from foundation.models.streaming import Batch, StreamedModel, is_large, meta_model, structure_problem, takes_much
from foundation.schemes.checkpoint import QUANTIZATION_TENSORS, save_settings
from foundation.schemes.int4 import GRID
from foundation.schemes.table import SCHEMES
from foundation.schemes.tables import save_tables, table_modules
from foundation.stage.context import Context
from quantize.answers import calibration_rows
from quantize.awq import describe as describe_awq
from quantize.choices import Method
from quantize.convolutions import BESIDE_ATTENTION, convolutions
from quantize.embeddings import rounded_table
from quantize.ptq import UNREACHED, choose_layers, range_warnings, silent_warnings
from quantize.rotation.rotation import describe as describe_rotation
from quantize.rotation.stored import rotate_folder
from quantize.rounding.autoround import Options
from quantize.rounding.rounding import summarized
from quantize.settings import QuantizeSettings
from quantize.smoothquant import describe
from quantize.streamed.stored_layer import Settings, Written, quantize_layer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FILES = (*TEXT_FILES, "config.json", "generation_config.json")
WHOLE = ("equalization", "bias_correction", "sensitivity", "mixed_precision", "attention", "residual")
"""Keys of the stage that need the whole model in memory."""
DEEP = 8
"""Number of layers from which on rounding by moments is streamed: the work of the passes in memory grows with its square."""


def needs_whole(stage: QuantizeSettings, *, large: bool) -> str | None:
    """Returns a one-line reason why a stage needs the whole model in memory, or None.

    Args:
        stage: The stage's settings.
        large: Whether the model may not fit into memory even once, to write calibration rows.
    """
    given = [f"mode: {stage.mode}"] * (stage.mode != "ptq") + [key for key in WHOLE if getattr(stage, key)]
    given += ["calibration.method: auto"] * (stage.calibration.method == "auto") + ["convolutions: true"] * (stage.convolutions is True)
    given += ["calibration.answers"] * (large and stage.calibration.answers is not None)
    given += ["rotation: learned"] * (stage.rotation == "learned")
    return f"{', '.join(given)} needs the whole model in memory" if given else None


def check_streamed(stage: QuantizeSettings, config: PreTrainedConfig, context: Context) -> None:
    """Checks from recipe and config that a stage can stream a model.

    Raises:
        InputError: It cannot.
    """
    key = f"stages.{stage.title}.stream: true"
    if not context.facts.generates:
        streamed = tasks_with(lambda row: row.generates)
        raise InputError(key, f"only language models (task {streamed}) can be streamed", f"{context.task} is quantized in memory")
    problem = needs_whole(stage, large=True) or structure_problem(meta_model(config)[0])
    if problem is not None:
        raise InputError(key, problem, remedy="give stream: false")


def worth_streaming(stage: QuantizeSettings, checkpoint: Path, context: Context) -> bool:
    """Returns whether a checkpoint is better streamed, and can be; warns if it is too large for memory but cannot.

    It is too large for memory, or so deep that rounding by moments, which in memory runs the whole model for each layer, takes far longer.
    """
    large, config = context.facts.generates and is_large(Checkpoint(checkpoint)), Checkpoint(checkpoint).config
    if not _gains(stage, config, context, large=large):
        return False
    reason = needs_whole(stage, large=large) or structure_problem(meta_model(config)[0])
    if reason is not None and large:
        warning = f"the float32 model takes more than half of the available memory, and is not streamed: {reason}"
        context.progress.warn(f"{stage.title}: {warning}")
    return reason is None


def will_stream(stage: QuantizeSettings, config: PreTrainedConfig, context: Context, parameters: int) -> bool:
    """Returns whether a model of so many parameters would be streamed, before there is a checkpoint."""
    if stage.stream != "auto":
        return stage.stream is True
    large = takes_much(parameters)
    if not _gains(stage, config, context, large=large):
        return False
    return needs_whole(stage, large=large) is None and structure_problem(meta_model(config)[0]) is None


def _gains(stage: QuantizeSettings, config: PreTrainedConfig, context: Context, *, large: bool) -> bool:
    """Returns whether a model is better streamed: it is too large for memory, or deep."""
    deep = stage.rounding != "nearest" and getattr(config, "num_hidden_layers", 0) >= DEEP
    return context.facts.generates and (large or deep)


def scratch_bytes(stage: QuantizeSettings, config: PreTrainedConfig, context: Context, parameters: int) -> int:
    """Returns the disk space that a stage takes only while it runs: of a streamed model that is rotated, the rotated float32 weights.

    Args:
        stage: The stage's settings.
        config: Transformers config of its output.
        context: Task and target.
        parameters: Number of weights of its output.
    """
    return 4 * parameters if stage.rotation == "hadamard" and will_stream(stage, config, context, parameters) else 0


def quantize_streamed(
    stage: QuantizeSettings, source: Path, out: Path, context: Context
) -> tuple[Mapping[str, object], Mapping[str, str], list[str]]:
    """Quantizes a float checkpoint from file to file, without loading all weights into memory.

    Args:
        stage: The stage's settings.
        source: The float checkpoint of a causal language model.
        out: Existing empty folder.
        context: Data, task, target, scratch folder, progress.

    Returns:
        The figures, as in `Quantize.run`, plus `streamed`: the bytes of the largest unit and of all hidden states; the float layers with
        their reasons; warnings.

    Raises:
        InputError: The model cannot be streamed, `exclude` matches nothing, no layer is left, or an input holds NaN or infinity.
    """
    if stage.rotation == "none":
        return _from_file_to_file(stage, source, out, context)
    rotated = context.scratch / "rotated"
    try:
        rotation = rotate_folder(source, rotated, context.seed, f"{stage.key}.rotation")
        context.progress.log(f"  {describe_rotation(rotation)}")
        figures, kept, warnings = _from_file_to_file(stage, rotated, out, context)
    finally:
        shutil.rmtree(rotated, ignore_errors=True)
    return {"rotation": rotation, **figures}, kept, warnings


def _from_file_to_file(
    stage: QuantizeSettings, source: Path, out: Path, context: Context
) -> tuple[Mapping[str, object], Mapping[str, str], list[str]]:
    """Quantizes a checkpoint as it is: `quantize_streamed` without a rotation."""
    name, settings = stage.title, settings_of(stage, context)
    with freed_memory_returned():
        model = StreamedModel(source)
        found, others = linears(model.shape), convolutions(model.shape)
        floating = dict.fromkeys(others, BESIDE_ATTENTION)
        layers, kept = choose_layers(model.shape, {**found, **others}, stage.exclude, f"stages.{name}.exclude", floating)
        chosen = {path: layer for path, layer in layers.items() if isinstance(layer, nn.Linear)}
        batches: list[Batch] = []
        rows, hidden_bytes = [], 0
        if settings.observes:
            rows = calibration_rows(stage, source, lambda: load(source, computing_device()), context)
            processor = context.preprocessor(source)
            batches, hidden_bytes = model.batches(processor, rows, context.scratch)
        rounded = batches
        if settings.keeps_float:
            rounded, more = model.batches(processor, rows, context.scratch)
            hidden_bytes += more
        stored = [*model.parameters_around(), *(path for index in range(len(model)) for path in model.parameters_of(index))]
        keys = ["input_scale", "input_smooth", *GRID]
        tensors = [f"{path}.{key}" for path in chosen for key in keys]
        written = Written(ShardWriter(out, stored), ShardWriter(out, tensors, Path(QUANTIZATION_TENSORS).stem, None))
        row_scales, noise = _write_around(model, written.weights, tables=stage.embeddings)
        for index in context.progress.track(range(len(model)), f"{name}: decoder layers", len(model)):
            inside = [path for path in chosen if path.startswith(f"{model.layer_name(index)}.")]
            with model.layer(index) as layer:
                quantize_layer(model, index, layer, inside, batches, rounded, settings, written)
        for path, zero_point in written.zero_points.items():
            written.scales.copy(path, zero_point)
        written.weights.close()
        written.scales.close()
    kept |= dict.fromkeys(written.unreached, UNREACHED)
    kept = _float_layers(model, kept, row_scales)
    save_settings(out, stage.scheme, written.entries, kept)
    if row_scales:
        save_tables(out, row_scales)
    count, number = len(written.entries), SCHEMES[stage.scheme].numbers
    _copy_rest(source, out, f"Quantized to {number} ({stage.scheme}) after training: {count} linear layers")
    context.progress.log(f"  streamed: {count} layers in {number}, {len(kept)} in float, {len(rows)} rows")
    figures = _figures(written, settings, len(rows), context.progress.log)
    figures |= {"tables": noise} if row_scales else {}
    figures["streamed"] = {"unit_bytes": max(model.unit_bytes().values()), "hidden_bytes": hidden_bytes}
    return figures, kept, [*range_warnings(rows, written.unreached), *silent_warnings(written.layers)] if batches else []


def _write_around(model: StreamedModel, weights: ShardWriter, *, tables: bool) -> tuple[dict[str, Tensor], dict[str, float | None]]:
    """Writes everything outside the decoder layers; returns what `quantize_tables` does of the tables, where they are to be rounded."""
    scales: dict[str, Tensor] = {}
    noise: dict[str, float | None] = {}
    names = {f"{name}.weight": name for name in table_modules(model.shape)} if tables else {}
    for path in model.parameters_around():  # a tied head is not among them
        if path in names:
            rounded, scales[names[path]], noise[names[path]] = rounded_table(model.weights[path])
            weights.copy(path, rounded)
        else:
            weights.copy(path, model.weights[path])
    return scales, noise


def _float_layers(model: StreamedModel, float_layers: Mapping[str, str], row_scales: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns the float layers with their reasons; a head of int8 rows, be it tied to the embeddings, is none."""
    shape: Any = model.shape
    head = shape.get_output_embeddings() if row_scales else None
    return {path: reason for path, reason in float_layers.items() if shape.get_submodule(path) is not head}


def settings_of(stage: QuantizeSettings, context: Context) -> Settings:
    """Returns the settings for one decoder layer."""
    smoothing = stage.smoothing
    return Settings(
        scheme=stage.scheme,
        bits=stage.bits(context),
        groups=stage.groups,
        rounding=stage.rounding,
        autoround=Options(stage.autoround.steps, stage.autoround.batch_size, context.seed),
        awq=stage.awq,
        calibrator=cast("Method | None", stage.calibrator),
        percentile=stage.calibration.percentile,
        alpha=smoothing.alpha if smoothing else None,
        prescale=bool(smoothing and smoothing.prescale),
    )


def _figures(written: Written, settings: Settings, rows: int, log: Callable[[str], None]) -> dict[str, object]:
    figures: dict[str, object] = {"calibrator": settings.calibrator if settings.ranges else None, "rows": rows}
    if settings.alpha is not None:
        figures["smoothquant"] = written.smoothed
        log(f"  smoothquant: {describe(written.smoothed)}")
    if settings.awq:
        figures["awq"] = written.awq
        log(f"  awq: {describe_awq(written.awq)}")
    if written.rounding:
        figures["rounding"] = {"method": settings.rounding, "layers": written.rounding}
        log(f"  {summarized(settings.rounding, written.rounding)}")
    if written.int4_weights:
        figures["bits_per_weight"] = written.bits / written.int4_weights
    return {**figures, "layers": written.layers}


def _copy_rest(source: Path, out: Path, summary: str) -> None:
    """Copies config and tokenizer and writes the model card."""
    copy_files(source, out, FILES)
    card = (source / "README.md").read_text(encoding="utf-8") if (source / "README.md").is_file() else "# Model\n"
    (out / "README.md").write_text(f"{card.rstrip()}\n- {summary}; load it with compress.api.load_checkpoint\n", encoding="utf-8")

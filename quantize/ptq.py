"""Post-training quantization: choice of layers, calibration batches, range checks, int8 weight scales.

Every linear layer inside the repeated blocks of the model is quantized by its scheme (`schemes`), and those convolutions that
`convolutions` chooses. Embeddings, pooler and head stay float, as do LayerNorm, softmax, GELU and the residual stream. `quantize.in_memory`
calls these functions in order. The scale of an int8 output channel minimizes the squared error over a few clipping factors:

    s_o = argmin over c in (0.8 ... 1.0) of  sum_i (W_oi - Q(W_oi; c * max_i |W_oi| / L))^2

Not supported: quantizing anything but linear layers and convolutions over one or two axes.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor, nn

from foundation.core.arrays import Features
from foundation.core.errors import InputError, Problem, nearest
from foundation.models.folder import Checkpoint
from foundation.models.heads.towers import CAUSAL_TEXT
from foundation.schemes.checkpoint import save_quantization
from foundation.schemes.int8 import on_grid, weight_scale
from foundation.schemes.scales import SMALLEST_SCALE, Layer, Scales
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor, Row
from quantize.calibration import Histogram, LayerFigures, Observed, clipped_share
from quantize.convolutions import block_prefixes

L = TypeVar("L", bound=Layer)
BATCH_SIZE = 32
FEW_ROWS = 64
SELECTION_ROWS = 256
BEYOND = 1.5  # the maximum over a few hundred rows varies by less, except after smoothing, which makes single outliers likelier
BEYOND_SHARE = 1e-3  # share of clipped inputs; ten times what the default calibrator clips
HEAD = "head"  # pooler and classifier: outside the blocks, computed for a single token, and no later layer averages out their error
UNREACHED = "not reached by the calibration rows"
CLIPS = 21


def choose_layers(
    model: nn.Module, layers: Mapping[str, L], exclude: tuple[str, ...], key: str, stay_float: Mapping[str, str] = MappingProxyType({})
) -> tuple[dict[str, L], dict[str, str]]:
    """Splits layers into those to quantize and those that stay float.

    Args:
        model: The model; its repeated blocks are the entries of `nn.ModuleList`s.
        layers: Its linear layers and convolutions by name.
        exclude: Name patterns of layers that stay float.
        key: Key path of `exclude`, for error messages.
        stay_float: Convolutions that stay float, each with the reason (`convolutions`).

    Returns:
        The layers to quantize, and the reason for every other layer.

    Raises:
        InputError: A pattern matches nothing, or nothing is left.
    """
    unused = [pattern for pattern in exclude if not _matching(pattern, layers)]
    if unused:
        named = f"layers are named like {_preview(list(layers))}"
        raise InputError.of(Problem(key, f"{pattern!r} matches no layer", f"{named}{nearest(pattern, layers)}") for pattern in unused)
    blocks = block_prefixes(model)
    reasons = {name: HEAD for name, layer in layers.items() if isinstance(layer, nn.Linear) and not name.startswith(blocks)} | dict(
        stay_float
    )
    reasons |= {name: f"excluded by {pattern!r}" for pattern in exclude for name in _matching(pattern, layers)}
    chosen = {name: layer for name, layer in layers.items() if name not in reasons}
    if not chosen:
        linears = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
        others = f"; its {len(stay_float)} convolutions stay float: {next(iter(stay_float.values()))}" if stay_float else ""
        raise InputError(
            key, "no layer is left to quantize", f"the model has {len(linears)} linear layers, such as {_preview(linears)}{others}"
        )
    return chosen, reasons


def divide(layers: Mapping[str, Layer], observed: Observed[Histogram], key: str) -> tuple[dict[str, Layer], list[str]]:
    """Returns the layers that ran during calibration, and the names of the others.

    Raises:
        InputError: None of them ran; `key` is the key path for the message.
    """
    reached = {name: layer for name, layer in layers.items() if name in observed.group and observed.of(name).total}
    unreached = [name for name in layers if name not in reached]
    if not reached:
        raise InputError(key, f"the calibration rows reach none of the layers to quantize, such as {_preview(unreached)}")
    return reached, unreached


def feature_batches(
    checkpoint: Path, rows: Sequence[Row], context: Context, label: str, batch_size: int = BATCH_SIZE
) -> Iterator[dict[str, Tensor]]:
    """Yields the features of rows batch by batch, with a progress bar of that label; no bar if it is empty.

    With images and texts, a batch holds both as long as there are both: each tower is calibrated on its own rows, and seen in every batch.
    """

    processor = context.preprocessor(checkpoint)
    with context.progress.bar(label, len(rows)) if label else nullcontext(lambda steps: None) as advance:
        batches = _of_both(processor, checkpoint, rows, batch_size) if processor.towers else processor.batches(rows, batch_size)
        for indices, features in batches:
            yield {name: torch.from_numpy(value) for name, value in features.items()}
            advance(len(indices))


def _of_both(processor: Preprocessor, checkpoint: Path, rows: Sequence[Row], batch_size: int) -> Iterator[tuple[list[int], Features]]:
    """Yields batches of images and texts together. Where nothing after the end of a text counts, its mask says what is observed.

    Texts that differ come first, in one length: there may be few, and layers that see the same in every row would be taken for constant.
    """
    towers, text = dict(processor.towers), processor.towers["text"]
    masked = CAUSAL_TEXT[Checkpoint(checkpoint).config.model_type]
    names = (*text.input_names, "attention_mask") if masked else text.input_names
    towers["text"] = replace(text, input_names=names, buckets=text.buckets[-1:])
    members = {name: _different_first(of_tower, rows) for name, of_tower in processor.members(rows).items()}
    own = [towers[name].batches([rows[index] for index in of_tower], batch_size) for name, of_tower in members.items()]
    for batches in zip_longest(*own, fillvalue=([], {})):
        yield [index for indices, _ in batches for index in indices], {key: value for _, found in batches for key, value in found.items()}


def _different_first(members: Sequence[int], rows: Sequence[Row]) -> list[int]:
    """Returns row numbers in an order that repeats no row before all others were used."""
    seen: dict[Row, int] = {}
    turns = []
    for index in members:
        seen[rows[index]] = turn = seen.get(rows[index], 0) + 1
        turns.append((turn, index))
    return [index for _, index in sorted(turns)]


def mse_weight_scale(weight_OI: Tensor, largest: int) -> Tensor:
    """Returns the scale of each output channel with the least squared rounding error, float32 [O].

    Args:
        weight_OI: float32 [O, I].
        largest: Largest code, 127 or 63.
    """
    full_O = weight_scale(weight_OI, largest)
    best_O = full_O
    error_O = _squared_error(weight_OI, full_O, largest)
    for clip in torch.linspace(0.8, 1.0, CLIPS)[:-1].tolist():
        scale_O = (full_O * clip).clamp(min=SMALLEST_SCALE)
        candidate_O = _squared_error(weight_OI, scale_O, largest)
        better_O = candidate_O < error_O
        best_O, error_O = torch.where(better_O, scale_O, best_O), torch.where(better_O, candidate_O, error_O)
    return best_O


def range_warnings(rows: Sequence[Row], unreached: Sequence[str], *, chosen_by: bool = True) -> list[str]:
    """Returns one-line warnings about observed inputs that may not be reliable.

    Args:
        rows: The calibration rows.
        unreached: Layers that never run on them.
        chosen_by: Whether anything is chosen by these rows; otherwise a few will do.
    """
    warnings = []
    if chosen_by and len(rows) < FEW_ROWS:
        warnings.append(f"only {len(rows)} calibration rows; use at least {FEW_ROWS} for reliable ranges")
    if unreached:
        warnings.append(f"{len(unreached)} layers never run on the calibration rows and stay float: {_preview(unreached)}")
    return warnings


def silent_warnings(figures: Sequence[LayerFigures]) -> list[str]:
    """Returns no or one warning about layers whose inputs are 0 on all calibration rows, so that no range is known.

    Args:
        figures: Figures of the layers.
    """
    silent = [figure["name"] for figure in figures if figure["max_abs"] == 0 and "input_scale" in figure]
    if not silent:
        return []
    return [
        f"the inputs of {len(silent)} layers are 0 on all calibration rows; on other rows they would be rounded in steps of 1: "
        f"{_preview(silent)}"
    ]


def compare_ranges(figures: Sequence[LayerFigures], selection: Observed[Histogram], highest: int) -> list[str]:
    """Adds the largest input and the clipped share on selection rows to each layer's figures; warns if calibration does not cover them.

    Args:
        figures: Figures with `name`, `max_abs` and `input_scale`; changed in place.
        selection: The inputs on selection rows.
        highest: Largest code of an input.

    Returns:
        No or one warning.
    """
    for figure in figures:
        histogram = selection.of(figure["name"]) if figure["name"] in selection.group else None
        figure["selection_max_abs"] = histogram.largest if histogram else None
        figure["selection_clipped"] = clipped_share(histogram, figure["input_scale"], highest) if histogram else None
    beyond = [figure["name"] for figure in figures if _is_beyond(figure)]
    if not beyond:
        return []
    return [
        f"the calibration rows do not cover the data: on selection rows the inputs of {len(beyond)} layers are more than {BEYOND} "
        f"times as large, and more than {BEYOND_SHARE:.1%} of them are clipped, first {beyond[0]}; raise calibration.rows"
    ]


def _is_beyond(figure: LayerFigures) -> bool:
    largest, covered, clipped = figure["selection_max_abs"], figure["max_abs"], figure["selection_clipped"]
    if largest is None or covered is None or clipped is None:
        return False
    return largest > BEYOND * covered and clipped > BEYOND_SHARE


def write_checkpoint(
    model: nn.Module, source: Path, out: Path, scales: Mapping[str, Scales], float_layers: Mapping[str, str], what: str = "int8 (w8a8)"
) -> None:
    """Writes a quantized checkpoint: a stock Transformers folder with weights on their grids, plus their scales."""
    from foundation.models.checkpoint import save

    save(
        model.cpu(),
        source,
        out,
        f"Quantized to {what} after training: {len(scales)} layers; load it with compress.api.load_checkpoint",
    )
    save_quantization(out, scales, float_layers)


def _squared_error(weight_OI: Tensor, scale_O: Tensor, largest: int) -> Tensor:
    return (on_grid(weight_OI, scale_O, largest) - weight_OI).square().sum(dim=1)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _preview(names: Sequence[str]) -> str:
    return ", ".join(names[:3])

"""The half graphs of a run, for engines whose graph says what runs in 16-bit floats.

    model.onnx -> ranges on selection rows -> model_<half>.onnx            `export.graph.half_precision`: float32 islands
                                           -> model_<half>_fused.onnx      `export.graph.attention`: each attention one node

An fp16 rule names its fp32 islands; the islands of `range`, `sums` and `gelu` come from the ranges, which are measured once for each graph,
on up to `RANGE_ROWS` selection rows. Which half `auto` takes is read off the ranges too:

    fp16    8 times finer than bf16, as long as every product fits its range
    bf16    where fp16 would leave a product of matrices in float32: it overflows nowhere

Whether the answers are close enough is another question: where the engine runs, `export.float_part` asks it.

Left out: mixing fp16 and bf16 in one graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx

from export.choices import FloatSetting
from export.graph.attention import fuse_attention
from export.graph.half_precision import Half, clamp_masks, float_tensors, to_half_precision
from export.graph.onnx import GEMMS, save
from export.graph.ranges import Ranges, measure
from foundation.artifacts import exported
from foundation.artifacts.graph import Graph
from foundation.core.spread import spread
from foundation.stage.context import Context
from foundation.standalone.preprocess import Preprocessor, Row

RANGE_ROWS: Final = 64
"""Rows that ranges are measured on: `export.graph.half_precision` keeps three quarters of the range for the others."""
BATCH_SIZE: Final = 8


@dataclass(frozen=True)
class HalfGraph:
    """The files of one half graph, and what decided about it."""

    half: Half
    plain: Path
    """Attention as separate products."""
    fused: Path | None
    """Attention as one node each; None where no attention can be."""
    islands: Mapping[str, int]
    """Operations that stay float32, by rule."""
    of: int
    """Operations of the float graph."""
    rows: int
    """Rows that the ranges were measured on."""
    left: Mapping[str, str]
    """Why an attention is not a node, by the name of its last product."""

    def facts(self, root: Path) -> exported.HalfGraph:
        """Returns the facts about the graph for an engine's entry.

        Args:
            root: Folder of export.json.
        """
        return exported.HalfGraph(
            half=self.half,
            islands=dict(self.islands),
            operations=self.of,
            range_rows=self.rows,
            left=dict(self.left),
            plain=str(self.plain.relative_to(root)),
            fused=None if self.fused is None else str(self.fused.relative_to(root)),
        )


class HalfGraphs:
    """Writes half graphs; measures the ranges of each graph once."""

    def __init__(self, context: Context, setting: FloatSetting, rival: Half | None = None) -> None:
        """Writes nothing yet.

        Args:
            context: The context of the stage.
            setting: `float_precision` of the stage.
            rival: What the float build that the last int8 has to beat runs in, in engines with half graphs.
        """
        self._context, self.setting, self.rival = context, setting, rival
        self._ranges: dict[Path, tuple[Ranges, int]] = {}

    def half_of(self, model: Path, preprocessor: Preprocessor) -> Half | None:
        """Returns the type of the float part next to fp32: the setting's, or the result of `pick`; None: only fp32."""
        if self.setting == "fp32":
            return None
        return self.pick(model, preprocessor) if self.setting == "auto" else self.setting

    def pick(self, model: Path, preprocessor: Preprocessor) -> Half:
        """Returns the type that `auto` takes for a float or Q/DQ graph: see above."""
        proto = _loaded(model)
        halved = to_half_precision(proto, self._measured(model, proto, preprocessor)[0], "fp16")
        kinds = {node.name: node.op_type for node in proto.graph.node}
        return "bf16" if any(kinds[name] in GEMMS for name in halved.islands) else "fp16"

    def write(self, model: Path, half: Half, preprocessor: Preprocessor, folder: Path) -> HalfGraph:
        """Writes the half graph of a graph.

        Args:
            model: A float or Q/DQ graph.
            half: The type of everything that is not an island.
            preprocessor: Prepares the rows.
            folder: Where the files go.
        """
        proto = _loaded(model)
        ranges, rows = self._measured(model, proto, preprocessor)
        halved = to_half_precision(proto, ranges, half)
        plain = save(halved.model, folder / f"{model.stem}_{half}.onnx")
        fused = fuse_attention(halved.model, ranges.largest)
        path = save(fused.model, folder / f"{model.stem}_{half}_fused.onnx") if fused.products else None
        return HalfGraph(half, plain, path, dict(Counter(halved.islands.values())), len(proto.graph.node), rows, fused.left)

    def _measured(self, model: Path, proto: onnx.ModelProto, preprocessor: Preprocessor) -> tuple[Ranges, int]:
        if model not in self._ranges:
            rows = range_rows(self._context)
            batches = (features for _, features in preprocessor.batches(rows, BATCH_SIZE))
            self._ranges[model] = measure(proto, float_tensors(proto), batches), len(rows)
        return self._ranges[model]


def range_rows(context: Context) -> list[Row]:
    """Returns the rows that ranges are measured on: of the selection split, of the training rows where that is empty."""
    return spread(context.data.selection.rows or context.data.train.rows, RANGE_ROWS)


def _loaded(model: Path) -> onnx.ModelProto:
    """Reads a graph with its weights, masks clamped."""
    proto = Graph(model).load()
    clamp_masks(proto)
    return proto

"""Timing: measures the latency of model shapes on the target's engine, and the latency table of a model.

The pipeline provides the measurement of a checkpoint (`Context.measure_latency`). Shapes are written as checkpoints with random weights,
since latency does not depend on the values. Measurements are stored in the stage's scratch folder, so that a killed run resumes with the
same figures. A latency table (`prune.latency.table`) is measured once per stage and cached in the user's cache folder, by hardware,
versions and shapes. `prune.latency.budget` uses both to meet a latency target.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from pydantic import Field

from foundation.artifacts.artifact import digest, write_json, writing
from foundation.core.config import Config
from foundation.core.errors import InputError
from foundation.machine.cached import read_cached, write_cached
from foundation.machine.environment import cache_folder
from foundation.measure.latency import Shape
from foundation.stage.context import Context, TimedPrecision

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig

    from foundation.models.architecture.structure import Sizes
    from prune.latency.table import LatencyTable, Written


class Measured(TypedDict):
    """A latency table with what it was made of, as it is cached."""

    table: Written
    points: list[list[float]]
    """Sizes, and the milliseconds of a model of them."""


class LatencyTarget(Config):
    """Target latency of the whole model at one input shape, on the first engine of the target."""

    batch: Annotated[int, Field(ge=1)] = 1
    """Batch size; one of target.batch_sizes."""
    sequence: Annotated[int, Field(ge=1)] | None = None
    """Tokens per row; one of target.sequence_lengths; absent for images."""
    value: Annotated[float, Field(gt=0)]
    """Median latency in milliseconds."""


@dataclass(frozen=True)
class Timing:
    """Measures shapes of one model. Stores measurements in `folder`, so that a killed run resumes with the same figures."""

    model: nn.Module
    """The model whose architecture is measured."""
    source: Path
    """Checkpoint with its tokenizer or image processor."""
    context: Context
    shape: Shape
    precision: TimedPrecision
    folder: Path

    @property
    def label(self) -> str:
        """Engine, precision and input shape, for the log."""
        batch, sequence = self.shape
        return f"{self.context.target.engines[0]} {self.precision} {batch}" + (f"x{sequence}" if sequence is not None else "")

    def of(self, configs: Sequence[PreTrainedConfig]) -> list[float]:
        """Returns the median milliseconds of models with these configs, measured in turns; repeated calls return the first result.

        Raises:
            EngineError: An engine failed.
        """
        known = self.folder / f"{digest(self._key(configs))[:16]}.json"
        if known.is_file():
            found: list[float] = json.loads(known.read_text(encoding="utf-8"))
            return found
        assert self.context.measure_latency is not None, "the pipeline provides measure_latency"
        work = self.folder / "checkpoints"
        shutil.rmtree(work, ignore_errors=True)
        folders = [self._write(config, work / str(number)) for number, config in enumerate(configs)]
        measured = self.context.measure_latency(folders, self.shape, self.precision)
        shutil.rmtree(work)
        write_json(known, measured)
        return measured

    def table(self, models: Sequence[Sizes], step: int, key: str) -> tuple[LatencyTable, dict[str, object]]:
        """Returns the latency table of models of one architecture and its figures, from the cache if this machine measured it before.

        Args:
            models: Sizes of the models; blocks are timed like those of the first.
            step: FFN neurons are kept in multiples of this.
            key: Key path of the stage, for messages.

        Raises:
            InputError: The latency of the blocks cannot be distinguished from noise.
        """
        from prune.latency.table import LatencyTable, grid, points

        sizes = models[0]
        heads = grid(max(count for model in models for count in model.key_value_heads), 1)
        ffn = grid(max(count for model in models for count in model.ffn), step)
        wanted = points(heads, ffn)
        largest = self._config(sizes, *wanted[0], key)  # it and the points determine all others, which take a second to compute
        file = table_folder() / f"{digest([self._key([largest]), wanted])[:32]}.json"
        cached = _read(file)
        if cached is None:
            configs = [largest, *(self._config(sizes, *point, key) for point in wanted[1:])]
            self.context.progress.log(f"  measuring {len(configs)} models of equal blocks: {self.label}")
            ms = self.of(configs)
            measured = LatencyTable.of(dict(zip(wanted, ms, strict=True)), heads, ffn)
            if measured.block(heads[-1], ffn[-1]) <= 0:
                deep, shallow = ms[0], ms[1]
                raise InputError(
                    f"{key}.measure",
                    "latency given",
                    f"{self.label}: {wanted[0][0]} blocks take {deep:.4g} ms and {wanted[1][0]} take {shallow:.4g} ms, "
                    "so their latency cannot be told from noise",
                    "give measure: macs, or a larger batch size",
                )
            cached = {"table": measured.as_json(), "points": [[*point, value] for point, value in zip(wanted, ms, strict=True)]}
            write_cached(file, cached)  # a cache that cannot be written is skipped, since it only saves time
        table = LatencyTable.read(cached["table"])
        batch, sequence = self.shape
        place = {"engine": self.context.target.engines[0], "precision": self.precision, "batch": batch, "sequence": sequence}
        return table, {**place, **cached["table"], "points": cached["points"]}

    def _config(self, sizes: Sizes, depth: int, heads: int, ffn: int, last_heads: int, last_ffn: int, key: str) -> PreTrainedConfig:
        """Returns the config of a model of `depth` blocks, equal but for the last."""
        from foundation.models.architecture.blocks import with_layers
        from foundation.models.architecture.shapes import with_sizes

        group = sizes.heads[0] // sizes.key_value_heads[0]
        block = min(range(len(sizes.heads)), key=lambda number: -sizes.key_value_heads[number])
        equal = replace(
            sizes.of_layers([block] * depth),
            heads=(*[group * heads] * (depth - 1), group * last_heads),
            key_value_heads=(*[heads] * (depth - 1), last_heads),
            ffn=(*[ffn] * (depth - 1), last_ffn),
        )
        return with_sizes(with_layers(self.model.config, [block] * depth), equal, key)

    def _write(self, config: PreTrainedConfig, folder: Path) -> Path:
        from foundation.models.architecture.shapes import remade
        from foundation.models.checkpoint import save

        with writing(folder) as temporary:
            save(remade(self.model, config), self.source, temporary, "Random weights, to be timed")
        return folder

    def _key(self, configs: Sequence[PreTrainedConfig]) -> object:
        """Returns everything that a measurement depends on, JSON types."""
        context, ignored = self.context, {"_name_or_path", "id2label", "label2id"}
        shapes = [{name: value for name, value in config.to_dict().items() if name not in ignored} for config in configs]
        target = context.target
        settings = context.measure_latency.settings if context.measure_latency else None
        engine = [target.engines[0], target.device, target.num_threads, target.batch_sizes, settings]
        return json.loads(json.dumps([shapes, self.shape, self.precision, engine, context.fingerprint], default=str))


def depends_on(context: Context) -> list[object]:
    """Returns what measured latencies depend on besides the model: the target, the machine, and the settings of the measurement."""
    settings = context.measure_latency.settings if context.measure_latency else None
    return [context.target.model_dump(mode="json"), dict(context.fingerprint), settings]


def target_shape(context: Context, latency: LatencyTarget | None, key: str) -> Shape:
    """Returns the input shape to measure, (batch size, tokens per row): the shape of `latency_ms`, else the largest of the recipe's target.

    Raises:
        InputError: The target does not have that shape.
    """
    target, fixed = context.target, not context.facts.has_lengths(context.target.sequence_lengths)
    if latency is None:
        return max(target.batch_sizes), None if fixed else max(target.sequence_lengths, default=context.max_length)
    lengths = [None] if fixed else sorted({*target.sequence_lengths, context.max_length})
    if latency.batch not in target.batch_sizes:
        raise InputError(f"{key}.batch", f"{latency.batch} given", remedy=f"give a batch size of the target: {_list(target.batch_sizes)}")
    if latency.sequence not in lengths:
        raise InputError(f"{key}.sequence", f"{latency.sequence} given", remedy=f"give a sequence length of the target: {_list(lengths)}")
    return latency.batch, latency.sequence


def table_folder() -> Path:
    """Returns the cache folder of latency tables."""
    return cache_folder() / "latency"


def _read(file: Path) -> Measured | None:
    from prune.latency.table import LatencyTable

    contents: Any = read_cached(file)
    try:
        LatencyTable.read(contents["table"])
    except (ValueError, KeyError, TypeError):
        return None  # absent, or truncated by a kill: measure again
    measured: Measured = contents
    return measured


def _list(values: Sequence[int | None]) -> str:
    return ", ".join("none (rows have one size)" if value is None else str(value) for value in values)

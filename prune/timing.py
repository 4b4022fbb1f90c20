"""Timing: from a shape to milliseconds on the engine that it is going to be served with, and from milliseconds asked for to a shape.

    table        measured once a stage (`prune.latency_table`), kept in the user's cache by hardware, versions and shapes
    cost         of blocks, in milliseconds, read from the table: what allocations and learned masks go by
    settle       choose a shape for a budget, measure it, set the budget to asked * predicted / measured, choose again

The table predicts; what comes of it is measured, together with the model that came in. `settle` ends within `NEAR` of what was asked for,
or after `ROUNDS` with the nearest shape that was seen. Models that are measured have random weights: time does not depend on them.

The pipeline says how a checkpoint is timed (`Context.measure_latency`). Left out: the time of embeddings and head is taken as it is;
channels of the residual stream and experts are not in the table.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from torch import Tensor, nn

from compress.artifacts.artifact import digest, write_json, writing
from compress.core.config import Config
from compress.core.errors import InputError
from compress.core.tasks import TASKS
from compress.machine.environment import cache_folder
from compress.measure.latency import Shape
from compress.models.blocks import with_layers
from compress.models.structure import Sizes, Structure
from compress.stage.context import Context, TimedPrecision
from prune.cost import Component, count_of
from prune.latency_table import LatencyTable, grid, points
from prune.surgery import Kept

T = TypeVar("T")
NEAR = 0.03
ROUNDS = 4


class LatencyTarget(Config):
    """What the model may take at one shape, in the first engine of the target."""

    batch: Annotated[int, Field(ge=1)] = 1
    """Rows; one of target.batch_sizes."""
    sequence: Annotated[int, Field(ge=1)] | None = None
    """Tokens, one of target.sequence_lengths; absent for images."""
    value: Annotated[float, Field(gt=0)]
    """Median in milliseconds."""


@dataclass(frozen=True)
class LatencyCost:
    """The cost of the blocks of one model in milliseconds."""

    structure: Structure
    table: LatencyTable
    experts_per_token: int = 0

    def total(self, sizes: Sizes | None = None, blocks: Sequence[int] | None = None) -> float:
        """Returns the milliseconds of all blocks, or of some."""
        sizes = sizes or self.structure.sizes
        numbers = range(len(sizes.heads)) if blocks is None else blocks
        return sum(self.table.block(sizes.key_value_heads[number], sizes.ffn[number]) for number in numbers)

    def unit(self, number: int, what: Component, sizes: Sizes) -> float:
        """Returns what a group of heads or a neuron costs, on average over those of the block."""
        prices = self.prices(number, what)
        return max(prices[-1], 1e-9) / count_of(sizes, number, what)  # never 0: scores are divided by it

    def prices(self, number: int, what: Component) -> tuple[float, ...]:
        """Returns what 0, 1, ... groups of heads or neurons cost beside the rest of the block."""
        curve = self.table.heads if what == "heads" else self.table.ffn
        return tuple(curve.at(count) for count in range(count_of(self.structure.sizes, number, what) + 1))

    def expected(self, counts: Mapping[tuple[int, Component], Tensor], hidden: Tensor | int, present_L: Tensor) -> Tensor:
        """Returns the milliseconds of all blocks, float32 `[]`; see `prune.cost.Costs`."""
        sizes, costs = self.structure.sizes, []
        for number in range(self.structure.depth):
            cost: Tensor = present_L[number] * self.table.block_ms
            whats: tuple[tuple[Component, Any], ...] = (("heads", self.table.heads), ("ffn", self.table.ffn))
            for what, curve in whats:
                given = counts.get((number, what))
                cost = cost + present_L[number] * (curve.at(count_of(sizes, number, what)) if given is None else curve.expected(given))
            costs.append(cost)
        total: Tensor = sum(costs[1:], costs[0])
        return total


@dataclass(frozen=True)
class Timing:
    """How shapes of one model are timed.

    What was measured is kept in `folder`, so that a run that was killed goes on with the same figures.
    """

    model: nn.Module
    """Whose class the models that are measured have."""
    source: Path
    """Checkpoint with its tokenizer or image processor."""
    context: Context
    shape: Shape
    precision: TimedPrecision
    folder: Path

    @property
    def place(self) -> str:
        """The engine and the shape, for the log and the report."""
        batch, sequence = self.shape
        return f"{self.context.target.engines[0]} {self.precision} {batch}" + (f"x{sequence}" if sequence is not None else "")

    def of(self, configs: Sequence[Any]) -> list[float]:
        """Returns the median milliseconds of models of these configs, measured in turns; a second time what was found the first.

        Raises:
            EngineError: An engine failed.
        """
        known = self.folder / f"{digest(self._key(configs))[:16]}.json"
        if known.is_file():
            found: list[float] = json.loads(known.read_text(encoding="utf-8"))
            return found
        assert self.context.measure_latency is not None, "the pipeline says how a checkpoint is timed"
        work = self.folder / "checkpoints"
        shutil.rmtree(work, ignore_errors=True)
        folders = [self._write(config, work / str(number)) for number, config in enumerate(configs)]
        measured = self.context.measure_latency(folders, self.shape, self.precision)
        shutil.rmtree(work)
        write_json(known, measured)
        return measured

    def table(self, sizes: Sizes, step: int, key: str) -> tuple[LatencyTable, dict[str, Any]]:
        """Returns the table of a model, from the cache where it was measured on this machine before, and its figures.

        Args:
            sizes: Of the model.
            step: Neurons are kept in multiples of it.
            key: Key path of the stage, for messages.
        """
        heads, ffn = grid(max(sizes.key_value_heads), 1), grid(max(sizes.ffn), step)
        wanted = points(heads, ffn)
        configs = [self._config(sizes, *point, key) for point in wanted]
        file = table_folder() / f"{digest(self._key(configs))[:32]}.json"
        cached = _read(file)
        if cached is None:
            self.context.progress.log(f"  measuring {len(configs)} models of equal blocks: {self.place}")
            ms = self.of(configs)
            measured = LatencyTable.of(dict(zip(wanted, ms, strict=True)), heads, ffn)
            if measured.block(heads[-1], ffn[-1]) <= 0:
                deep, shallow = ms[0], ms[1]
                raise InputError(
                    f"{key}.measure: latency given; {self.place}: {wanted[0][0]} blocks take {deep:.4g} ms and {wanted[1][0]} take "
                    f"{shallow:.4g} ms, so that no time of theirs can be told from noise: count macs, or time a larger batch"
                )
            cached = {"table": measured.as_json(), "points": [[*point, value] for point, value in zip(wanted, ms, strict=True)]}
            _keep(file, cached)
        table = LatencyTable.read(cached["table"])
        batch, sequence = self.shape
        place = {"engine": self.context.target.engines[0], "precision": self.precision, "batch": batch, "sequence": sequence}
        return table, {**place, **cached["table"], "points": cached["points"]}

    def _config(self, sizes: Sizes, depth: int, heads: int, ffn: int, key: str) -> Any:
        """Returns the config of a model of equal blocks."""
        from compress.models.shapes import with_sizes

        group = sizes.heads[0] // sizes.key_value_heads[0]
        block = min(range(len(sizes.heads)), key=lambda number: -sizes.key_value_heads[number])
        equal = replace(
            sizes.of_layers([block] * depth),
            heads=(group * heads,) * depth,
            key_value_heads=(heads,) * depth,
            ffn=(ffn,) * depth,
        )
        return with_sizes(with_layers(self.model.config, [block] * depth), equal, key)

    def _write(self, config: Any, folder: Path) -> Path:
        from compress.models.checkpoint import save
        from compress.models.shapes import remade

        with writing(folder) as temporary:
            save(remade(self.model, config), self.source, temporary, "Random weights, to be timed")
        return folder

    def _key(self, configs: Sequence[Any]) -> Any:
        """Returns everything that a measurement depends on, JSON types."""
        context, told = self.context, {"_name_or_path", "id2label", "label2id"}
        shapes = [{name: value for name, value in config.to_dict().items() if name not in told} for config in configs]
        target = context.target
        settings = context.measure_latency.settings if context.measure_latency else None
        engine = [target.engines[0], target.device, target.num_threads, target.batch_sizes, settings]
        return json.loads(json.dumps([shapes, self.shape, self.precision, engine, context.fingerprint], default=str))


@dataclass(frozen=True)
class Ruler:
    """The milliseconds of one stage: what was measured before, and what is asked for."""

    timing: Timing
    table: LatencyTable
    whole: Any
    """Config of the model that came in."""
    before_ms: float
    """What it takes."""
    asked_ms: float | None
    """What the result may take; None where a share of the blocks is asked for."""
    relative: bool
    """Whether what is asked for is a ratio: then the model that came in is measured in the same turns as the result."""
    figures: dict[str, Any]
    """For the manifest; grows."""

    @classmethod
    def of(cls, timing: Timing, sizes: Sizes, step: int, asked: LatencyTarget | None, speedup: float | None, key: str) -> Ruler:
        """Measures a model that comes in, and the table of its blocks.

        Args:
            timing: How it is timed.
            sizes: Its sizes.
            step: Neurons are kept in multiples of it.
            asked: What the result may take.
            speedup: How many times faster the result is to be.
            key: Key path of the stage, for messages.
        """
        table, figures = timing.table(sizes, step, key)
        (before,) = timing.of([timing.model.config])
        predicted = table.predict(sizes)
        asked_ms = asked.value if asked else before / speedup if speedup else None
        found = {**figures, "asked_ms": asked_ms, "before": {"predicted_ms": predicted, "measured_ms": before}, "rounds": []}
        timing.context.progress.log(f"  {timing.place}: {before:.3f} ms, {predicted:.3f} ms by the table")
        return cls(timing, table, timing.model.config, before, asked_ms, speedup is not None, found)

    def sparsity(self, given: float, whole: float, lowest: float, key: str) -> float:
        """Returns the share of the blocks that has to go, going by the table.

        Args:
            given: The share where no time is asked for.
            whole: Milliseconds of the blocks.
            lowest: Share of them that is left at the least.
            key: Key path of the stage, for messages.

        Raises:
            InputError: Nothing can be that fast.
        """
        if self.asked_ms is None:
            return given
        scale = (self.table.rest_ms + whole) / self.before_ms
        if self.asked_ms * scale < self.table.rest_ms + lowest * whole:
            least = (self.table.rest_ms + lowest * whole) / scale
            raise InputError(f"{key}: {self.asked_ms:.4g} ms asked for; what may be taken away leaves {least:.4g} ms: ask for more time")
        return min(1.0, max(0.0, 1 - (self.asked_ms * scale - self.table.rest_ms) / whole))

    def measure(self, kept: Kept, model: nn.Module, sizes: Sizes, key: str) -> float:
        """Returns what a model takes of which so much is kept, in milliseconds.

        Args:
            kept: What is kept.
            model: Of what.
            sizes: Those of the model.
            key: Key path of the stage, for messages.
        """
        from compress.models.shapes import with_sizes

        small = with_sizes(with_layers(model.config, kept.layers), kept.sizes(sizes), key)
        whole, measured = self.timing.of([self.whole, small])
        predicted = self.table.predict(kept.sizes(sizes))
        found = self.before_ms * measured / whole if self.relative else measured
        asked = "" if self.asked_ms is None else f", {self.asked_ms:.3f} asked for"
        self.timing.context.progress.log(f"  {self.timing.place}: {found:.3f} ms, {predicted:.3f} by the table{asked}")
        self.figures["rounds"].append({"predicted_ms": predicted, "measured_ms": found, "speedup": whole / measured})
        return found

    def settled(
        self, choose: Callable[[float], Kept], model: nn.Module, sizes: Sizes, budget_ms: float, least_ms: float, whole_ms: float, key: str
    ) -> tuple[Kept, float]:
        """Returns what is kept, as fast as was asked for where it was, and the share of the milliseconds of the blocks that is left.

        Args:
            choose: What is kept with so many milliseconds for the blocks.
            model: Of what.
            sizes: Those of the model.
            budget_ms: Milliseconds of the blocks to begin with.
            least_ms: The least that can be chosen for.
            whole_ms: Milliseconds of the blocks of the model that came in.
            key: Key path of the stage, for messages.
        """
        rest = self.table.rest_ms

        def predict(kept: Kept) -> float:
            return self.table.predict(kept.sizes(sizes))

        def measure(kept: Kept) -> float:
            return self.measure(kept, model, sizes, key)

        if self.asked_ms is None:
            kept, number = choose(budget_ms), 0
            measure(kept)
        else:
            kept, number = settle(lambda ms: choose(max(ms - rest, least_ms)), predict, measure, self.asked_ms, budget_ms + rest)
        self.figures["after"] = self.figures["rounds"][number]
        return kept, (predict(kept) - rest) / whole_ms


def settle(
    choose: Callable[[float], T], predict: Callable[[T], float], measure: Callable[[T], float], asked_ms: float, budget_ms: float
) -> tuple[T, int]:
    """Searches a budget whose choice takes as long as was asked for.

    Args:
        choose: What is kept where the table may say so many milliseconds.
        predict: What the table says of that.
        measure: What it takes.
        asked_ms: What it may take.
        budget_ms: Milliseconds to begin with.

    Returns:
        What is kept, and the round that it was chosen in, from 0: the nearest one.
    """
    tried: list[tuple[float, int, T]] = []
    for number in range(ROUNDS):
        kept = choose(budget_ms)
        if any(kept == earlier for *_, earlier in tried):
            break  # the steps of heads and neurons are coarser than what is missing
        measured = measure(kept)
        tried.append((abs(measured / asked_ms - 1), number, kept))
        if tried[-1][0] <= NEAR:
            break
        budget_ms = asked_ms * predict(kept) / measured
    _, number, kept = min(tried, key=lambda entry: entry[:2])
    return kept, number


def target_shape(context: Context, asked: LatencyTarget | None, key: str) -> Shape:
    """Returns the shape that is timed: the one asked for, else the largest of the target.

    Raises:
        InputError: It is no shape of the target.
    """
    target, images = context.target, TASKS[context.task].modality == "image"
    if asked is None:
        return max(target.batch_sizes), None if images else max(target.sequence_lengths, default=context.max_length)
    lengths = [None] if images else sorted({*target.sequence_lengths, context.max_length})
    if asked.batch not in target.batch_sizes:
        raise InputError(f"{key}.batch: {asked.batch} given; a batch size of the target is needed: {_list(target.batch_sizes)}")
    if asked.sequence not in lengths:
        raise InputError(f"{key}.sequence: {asked.sequence} given; a length of the target is needed: {_list(lengths)}")
    return asked.batch, asked.sequence


def table_folder() -> Path:
    """Returns the folder of measured tables."""
    return cache_folder() / "latency"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        LatencyTable.read(found["table"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, or cut off by a kill: measured again
    return found


def _keep(file: Path, contents: Mapping[str, Any]) -> None:
    """Writes a table to the cache; where that cannot be written nothing is remembered, as nothing depends on it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, contents)
    except OSError:
        return


def _list(values: Sequence[Any]) -> str:
    return ", ".join("none (images have no length)" if value is None else str(value) for value in values)

"""Measures the cost of a cache of keys and values in a lower precision than the engine's.

The gate of parity checks whether a graph computes what torch does, so that an engine answers it with a cache in the precision that it
computes in. The cache that was asked for may then change answers: the engine as it is served is evaluated, not held to torch, and compared
with the first.

    metrics    of the first, on the evaluation split; `predictions` is their file
    tokens     the greedy answers of both (`foundation.measure.tokens`)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from export.engines.spec import EngineSpec
from export.generation.agreement import Agreement
from export.generation.prompts import Tokens
from foundation.artifacts import exported, figures
from foundation.core.arrays import Array
from foundation.labels.form import Labels
from foundation.measure.answers import load_predictions, save_predictions
from foundation.measure.engine_process import EngineProcess
from foundation.measure.metrics import metrics
from foundation.measure.tokens import compare_tokens, load_answers
from foundation.stage.context import Context


def rounds_cache(entry: exported.Engine) -> bool:
    """Whether an engine of export.json keeps keys and values in less than it computes in; False where it keeps none."""
    return entry.cache_precision not in (None, entry.float_precision)


def with_float_cache(spec: EngineSpec) -> EngineSpec:
    """Returns the spec of the same engine with keys and values in the precision that it computes in."""
    from export.engines.openvino_genai import CACHE, CACHE_PRECISION

    return replace(spec, properties={**spec.properties, CACHE_PRECISION: CACHE[spec.float_precision]})


@dataclass(frozen=True)
class FloatCache:
    """Answers of an engine with such a cache to the evaluation split."""

    predictions: Path
    tokens: Tokens
    """Its greedy answers to the evaluation prompts, int32 [n, T]."""

    @classmethod
    def of(cls, process: EngineProcess, logits: Array, labels: Labels, agreement: Agreement, path: Path) -> FloatCache:
        """Asks an open engine for tokens; its predictions for the evaluation split are written to `path`."""
        save_predictions(path, logits, labels)
        return cls(path, agreement.answered(process))

    def cost(self, entry: exported.Engine, root: Path, context: Context) -> exported.Engine:
        """Compares the engine as it is served with this one.

        Args:
            entry: Its entry of export.json, evaluated.
            root: Folder of export.json.
            context: The context of the stage.

        Returns:
            The entry, with `metrics`, `predictions` and `tokens` as `float_cache` of its `generation`.
        """
        generation = entry.generation
        assert generation is not None, "an engine with a cache has answered"
        compared = figures.Tokens(**compare_tokens(self.tokens, load_answers(root / str(generation.file))[1]))
        found, metric = metrics(context.task, *load_predictions(self.predictions, context.task)), context.facts.metric
        context.progress.log(
            f"      cache in {entry.cache_precision}: {metric} {entry.metrics[metric]:.4f}, in {entry.float_precision} "
            f"{found[metric]:.4f}; {100 * (compared.equal_share or 0.0):.1f} % of the tokens are the same"
        )
        predictions = self.predictions.relative_to(root).as_posix()
        there = exported.FloatCache(metrics=found, predictions=predictions, tokens=compared)
        return entry.with_(generation=generation.with_(float_cache=there))

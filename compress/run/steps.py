"""The steps of a run: the stages of a recipe with what the pipeline adds to them."""

from __future__ import annotations

from compress.recipe import Recipe
from compress.run.choose_buckets import Buckets
from compress.run.implicit import Evaluate, Latency, Source, is_variant
from export.export import Export
from foundation.core.step_names import BASELINE, BUCKETS, EVALUATION, LATENCY, SOURCE
from foundation.stage.stage import Stage
from foundation.training.finetune import Finetune
from quantize.quantize import Quantize


def plan_steps(recipe: Recipe) -> list[Stage]:
    """Returns the stages of a recipe with the implicit steps: the source model, an evaluation after each variant, the choice of buckets
    before export if it is asked for, and latency after export."""
    steps: list[Stage] = []
    finetunes = any(isinstance(stage, Finetune) for stage in recipe.stages)
    source = Source(id=SOURCE if finetunes else BASELINE, model=recipe.model, tokenizer=recipe.tokenizer)
    for stage in (source, *recipe.stages):
        if isinstance(stage, Export) and recipe.target.buckets == "auto":
            steps.append(Buckets(id=BUCKETS, quantized=any(isinstance(other, Quantize) for other in recipe.stages)))
        steps.append(stage)
        if is_variant(stage, (source, *recipe.stages)):
            steps.append(Evaluate(id=f"{EVALUATION}{stage.id}"))
        if isinstance(stage, Export):
            steps.append(Latency(id=LATENCY))
    return steps

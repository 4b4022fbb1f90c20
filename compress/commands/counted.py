"""Counts of `compress plan` from data and model: everything in a plan that depends neither on recorded runs nor on the clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compress.commands.remembered import CountedStep, Facts
from compress.forecast import PlannedStep, steps_of
from compress.recipe import Recipe
from compress.report import phrases
from compress.run.buckets import measured_at
from compress.run.inputs import num_truncated
from compress.run.prepare import noted, prepare, questionable_goals
from compress.run.sharing import offered
from foundation.core.progress import ConsoleProgress
from foundation.models.inputs.tokenizer import resolve_tokenizer
from foundation.models.own_shape import tokens_of
from foundation.models.size import count
from foundation.stage.context import Context

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SHORTEST = 128
"""Sequence length below which the attention products cost next to nothing."""


@dataclass(frozen=True)
class Counted:
    """The counts."""

    facts: Facts
    planned: list[PlannedStep]
    context: Context


def counted(recipe: Recipe, folder: Path) -> Counted:
    """Counts a recipe.

    Args:
        recipe: The recipe.
        folder: The run folder, whose finished stages count as done, as do those in the store of the recipe.

    Raises:
        InputError: The recipe, the data or the model does not allow the run, or the store does not answer.
    """
    context = prepare(recipe, folder, ConsoleProgress("quiet"))
    context.count_macs()
    with offered(recipe, folder) as offer:
        planned = list(steps_of(recipe, folder, context, offer))
    data, task = context.data, context.facts
    unit = f"blocks of {context.max_length} tokens" if task.generates else "rows"
    above = [
        f"data: {len(data.train)} train, {len(data.selection)} selection, {len(data.evaluation)} evaluation {unit}",
        *_truncated(recipe, planned[0].config, context),
        *questionable_goals(recipe, data),
        *noted(recipe, planned[0].config, context),
    ]
    steps = [
        CountedStep(
            id=str(entry.step.id),
            stage=entry.step.NAME,
            parameters=entry.size.parameters if entry.size else None,
            flops=entry.size.flops if entry.size else None,
            disk_bytes=entry.disk_bytes,
            scratch_bytes=entry.scratch_bytes,
            memory_bytes=entry.memory_bytes,
            parts=dict(entry.parts),
            cached=entry.cached is not None,
            stored=entry.stored,
            reuses=entry.reuses,
            note="".join(_tokens(entry, planned)),
        )
        for entry in planned
    ]
    facts = Facts(above=above, steps=steps, below=_by_length(planned, context), threads=context.target.num_threads)
    return Counted(facts, planned, context)


def _truncated(recipe: Recipe, config: PreTrainedConfig, context: Context) -> Iterator[str]:
    """Yields the number of rows of each split that are longer than data.max_length, if there are any."""
    splits = {name: getattr(context.data, name) for name in ("train", "selection", "evaluation")}
    tokenizer = resolve_tokenizer(recipe.tokenizer, context.data.tokenizer)
    longer = {name: num_truncated(recipe.model, config, tokenizer, context, split.rows) for name, split in splits.items()}
    if any(longer.values()):
        sizes = {name: max(1, len(split)) for name, split in splits.items()}
        each = ", ".join(f"{number} of {len(splits[name])} {name} ({number / sizes[name]:.1%})" for name, number in longer.items())
        yield f"truncated to data.max_length {context.max_length}: {each} rows"


def _tokens(entry: PlannedStep, planned: Sequence[PlannedStep]) -> Iterator[str]:
    """Yields which shares of the tokens stay after the blocks of a variant, where that is not as in the variant before it."""
    if entry.lineage and (shares := tokens_of(entry.config)):
        before = [other.config for other in planned for stage in entry.lineage[-2:-1] if other.step is stage]
        if not before or tokens_of(before[0]) != shares:
            yield f"  {phrases.tokens_left(shares)}"


def _by_length(planned: list[PlannedStep], context: Context) -> list[str]:
    """Returns what a row of each length costs in the last variant, and the share of attention; nothing for rows that are no texts."""
    variants = [entry for entry in planned if entry.lineage]
    if context.facts.modality != "text" or context.facts.generates or not variants:
        return []
    target, longest = context.target, context.max_length
    lengths = target.lengths if target.buckets != "auto" else [length for length in measured_at(longest) if length >= SHORTEST]
    told = []
    for length in sorted({length for length in lengths if length < longest} | {longest}):
        size = count(variants[-1].config, context.task, length)
        told.append(f"{length} tokens {size.flops / 1e9:.3f} ({size.attention_macs / max(1, size.macs):.0%})")
    return [f"GFLOPs of a row in {variants[-1].step.id}, with the share of attention's products: {', '.join(told)}"]

"""The steps of pruning a model in memory: each calls the file of its method, tells the log, and returns figures for the report.

    iterate     one iteration: cut, train again, keep the result      `recovery`
    cut         score, divide the budget, choose, take out            `scores`, `allocation`, `selection`, `least_squares`, `surgery`
    learn       scores from a training with masks                     `learned`
    scan        what a count of heads or neurons costs                `sensitivity`

`prune.prune` puts them in order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from compress.artifacts.artifact import write_json, writing
from compress.core.tasks import TASKS
from compress.measure.closeness import Trial
from compress.models.checkpoint import load, save
from compress.models.origin import Origin
from compress.models.structure import Structure
from compress.stage.context import Context
from compress.training.supervised import supervised
from compress.training.train import training_device
from prune.allocation import Counts, Part, by_distance, by_score, by_worth, uniform
from prune.calibration import calibration_batches
from prune.cost import Component, Costs
from prune.learned import Learned, learn
from prune.least_squares import update
from prune.proof import prove
from prune.recovery import Recover, part_of, recover
from prune.scores import RELATIVE, scores_of
from prune.selection import Allocate, Limits, Scores, Whole, lowest_share, select
from prune.sensitivity import SCAN_ROWS, SHARES, Sensitivity, scan
from prune.settings import PruneSettings
from prune.surgery import Kept, shrink
from prune.timing import Ruler

STEP, FIGURES = "step-{}", "step.json"


@dataclass(frozen=True)
class Steps:
    """What the steps share."""

    stage: PruneSettings
    name: str
    """Of the stage, for messages and bars."""
    whole: Whole
    """The model that came in."""
    ruler: Ruler | None
    """Of milliseconds, where they are what is counted."""
    source: Path
    """Checkpoint with the tokenizer or image processor."""
    context: Context

    def iterate(self, number: int, share: float, model: nn.Module, origin: Origin) -> tuple[nn.Module, Origin, dict[str, Any]]:
        """One iteration; a finished one is taken from the scratch folder.

        Args:
            number: Of the iteration, from 1.
            share: What is left of the cost after it.
            model: As the iteration before left it.
            origin: Where the layers and channels of the model come from.

        Returns:
            The model, the origin of what is left of it, and the figures.
        """
        stage, context = self.stage, self.context
        folder, last = context.scratch / STEP.format(number), number == len(stage.shares)
        if (folder / FIGURES).is_file():
            found = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
            context.progress.log(f"  {self.name}: iteration {number} is finished already")
            return load(folder), Origin(*map(_tuples, found["origin"])), found["figures"]
        small, origin, figures = self.cut(model, origin, share, last)
        if stage.recover is not None:
            assert context.teacher is not None, "the pipeline hands over the teacher"
            own, epochs = part_of(context, stage.recover.epochs, number, len(stage.shares), stage.recover.batch_size)
            history = recover(
                small,
                stage.recover,
                epochs,
                origin,
                self.source,
                stage.taught,
                own,
                context.scratch / f"training-{number}",
                self.name,
                {"stage": stage.model_dump(mode="json"), "teacher": context.teacher.digest, "iteration": number},
            )
            figures |= {"losses": history.losses, "selection": history.selection, "best_step": history.best_step, "steps": history.steps}
        if not last:
            with writing(folder) as temporary:
                save(small, self.source, temporary, f"Iteration {number}")
                write_json(temporary / FIGURES, {"figures": figures, "origin": [origin.layers, origin.hidden, origin.heads]})
        return small, origin, figures

    def cut(self, model: nn.Module, origin: Origin, share: float, last: bool) -> tuple[nn.Module, Origin, dict[str, Any]]:
        """Takes away what is least important until the share is left; returns the small model, its origin, and the figures.

        Args:
            model: As the iteration before left it.
            origin: Where its parts come from.
            share: What is left of the cost.
            last: Whether no iteration follows, so that the result is what is timed.
        """
        stage, key, whole = self.stage, self.stage.key, self.whole.after(origin.layers)
        model.to(training_device())
        structure = Structure.of(model, key)
        cost, limits = stage.cost(model, structure, self.ruler), stage.limits(structure)
        batches = partial(calibration_batches, model, self.source, stage.rows, self.context)
        figures: dict[str, Any] = {"share": share}
        if stage.method == "joint" or stage.method == "movement":
            scores = Scores.equal(structure, limits.inside)
            if share < 1 and limits.free(structure):
                scores = self.learn(stage.method, model, cost, whole, share, limits, figures)
            allocate: Allocate = by_worth(scores.components)
        else:
            hidden, loss = "hidden" in stage.granularity, supervised(self.context.task)
            scores = scores_of(stage.method, model, structure, partial(batches, f"{self.name}: scoring"), loss, hidden)
            allocate = self.allocation(model, structure, scores, figures)
        learned = stage.method == "joint"

        def choose(budget: float) -> Kept:
            return select(cost, whole, budget / whole.cost, limits, scores, allocate, key, learned)

        if self.ruler is None or not last:
            kept = choose(share * whole.cost)
        else:
            least = lowest_share(cost, whole, limits, scores) * whole.cost
            kept, figures["share"] = self.ruler.settled(choose, model, structure.sizes, share * whole.cost, least, whole.cost, key)
        prove(model, structure, kept, next(iter(batches(""))), key)
        if stage.least_squares:
            update(model, structure, kept, batches(f"{self.name}: least squares"))
        left = origin.after(kept.layers, kept.hidden, kept.query_heads(structure.sizes))
        return shrink(model, structure, kept, key), left, figures

    def allocation(self, model: nn.Module, structure: Structure, scores: Scores, figures: dict[str, Any]) -> Allocate:
        """Returns how a budget is divided; each part is scanned once, whatever the number of budgets, which goes into the figures."""
        found: dict[tuple[int, Component], Sensitivity] = {}

        def distance(part: Part, count: int) -> float:
            return found[part.block, part.what].at(count) if count < part.size else 0.0

        def allocate(parts: Sequence[Part], budget: float) -> Counts:
            if self.stage.allocation == "uniform":
                return uniform(parts, budget)
            of_parts = {part: scores.components[part.block, part.what] for part in parts}
            if self.stage.method in RELATIVE:  # so that what a unit of cost is worth is the same in every component, on average
                of_parts = {part: score * part.cost for part, score in of_parts.items()}
            if self.stage.allocation == "global":
                return by_score(parts, of_parts, budget)
            missing = [part for part in parts if len(part.counts()) > 1 and (part.block, part.what) not in found]
            if missing:  # another budget may keep other blocks
                found.update(self.scan(model, structure, missing, of_parts, figures))
            return by_distance(parts, distance, budget)

        return allocate

    def learn(
        self, method: Learned, model: nn.Module, cost: Costs, whole: Whole, share: float, limits: Limits, figures: dict[str, Any]
    ) -> Scores:
        """Trains masks with the weights, in place; returns what they say. The course of the training goes into the figures."""
        stage, teacher = self.stage, self.context.teacher
        assert teacher is not None, "the pipeline hands over the teacher"
        lesson = learn(
            method,
            model,
            cost,
            whole,
            1 - share,
            limits,
            stage.learn,
            stage.recover or Recover(),
            self.source,
            stage.taught,
            self.context,
            stage.key,
            {"stage": stage.model_dump(mode="json"), "teacher": teacher.digest, "share": share},
        )
        figures["learned"] = dict(lesson.figures)
        model.to(training_device())
        return lesson.scores

    def scan(
        self, model: nn.Module, structure: Structure, parts: Sequence[Part], scores: Mapping[Part, Any], figures: dict[str, Any]
    ) -> dict[tuple[int, Component], Sensitivity]:
        """Returns what counts of some components cost in distance, by block and kind; the figures grow by it."""
        context = self.context
        trial = Trial.prepare(model, self.source, context.data.calibration(self.stage.rows, context.seed).rows, context).fewer(SCAN_ROWS)
        with context.progress.bar(f"{self.name}: sensitivity", len(parts) * len(SHARES)) as advance:
            found = scan(model, structure, parts, scores, trial.look, advance)
        steepest = sorted(found, key=lambda entry: -entry.at(entry.part.size // 2))[:3]
        context.progress.log(f"  most sensitive: {', '.join(entry.name for entry in steepest)}")
        if "sensitivity" not in figures:
            whole = {} if trial.labels is None else {"metric": TASKS[context.task].metric, "whole": trial.metric_before()}
            figures["sensitivity"] = {"measure": trial.measure, "rows": len(trial.rows), **whole, "layers": []}
        figures["sensitivity"]["layers"] += [entry.as_row() for entry in found]
        return {(entry.part.block, entry.part.what): entry for entry in found}


def _tuples(value: Any) -> Any:
    """Returns lists within lists, as JSON gives them, as tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

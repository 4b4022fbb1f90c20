"""The steps of pruning a model in memory: each calls the file of its method, logs, and returns figures for the report.

    iterate   one iteration: cut, fine-tune, save the result              `recovery`
    cut       score, allocate the budget, select, compensate, remove      `scores`, `allocation`, `selection`, `least_squares`, `surgery`
    learn     learn the scores by training masks                          `learned`
    scan      measure how sensitive the outputs are to each component     `sensitivity`

`prune.prune` runs them in order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from foundation.artifacts.artifact import write_json, writing
from foundation.machine.device import computing_device
from foundation.measure.closeness import Trial
from foundation.models.architecture.origin import Origin
from foundation.models.architecture.structure import Structure
from foundation.models.checkpoint import load, save
from foundation.stage.context import Context
from foundation.training.supervised import supervised
from prune.allocation import Counts, Part, by_distance, by_score, by_worth, uniform
from prune.calibration import calibration_batches
from prune.choices import Member, Recover
from prune.cost import Component
from prune.latency.budget import LatencyBudget
from prune.least_squares import update
from prune.masks.learned import SparsityGoal, learn
from prune.methods import METHODS, Scoring, is_learned, scores_of
from prune.proof import prove
from prune.recovery import RecoveryJob, part_of, recover
from prune.selection import Allocate, Incoming, Scores, lowest_share, select
from prune.sensitivity import SCAN_ROWS, SHARES, Sensitivity, scan
from prune.settings import PruneSettings
from prune.surgery import KeptUnits, shrink
from prune.together import Cut, broadcast_cut, received, tuples
from prune.tokens.significance import significance
from prune.tokens.tokens import check_tokens, prove_merging, prove_tokens, shares_of, with_merged_tokens, with_tokens
from prune.width.principal import principal, project, prove_width

STEP, FIGURES = "step-{}", "step.json"


@dataclass(frozen=True)
class Steps:
    """State that all steps share."""

    stage: PruneSettings
    name: str
    """Name of the stage, for messages and progress bars."""
    incoming: Incoming
    """The incoming model, whose cost all shares refer to."""
    latency: LatencyBudget | None
    """The latency target and table, if the cost is latency."""
    source: Path
    """Checkpoint with the tokenizer or image processor."""
    context: Context
    tokens: tuple[float, ...] = ()
    """Share of the tokens after each layer of the incoming model, if tokens left it; units are scored on a model that sees all of them."""
    merged: bool = False
    """Whether the others merged with these."""

    def iterate(self, number: int, share: float, model: nn.Module, origin: Origin) -> tuple[nn.Module, Origin, dict[str, object]]:
        """Runs one iteration; a finished one is loaded from the scratch folder.

        Args:
            number: Number of the iteration, from 1.
            share: Share of the incoming cost that remains after it.
            model: The model after the previous iteration.
            origin: Layers, channels and heads of the incoming model that `model` consists of.

        Returns:
            The pruned model, its origin, and the figures of the iteration.
        """
        stage, context = self.stage, self.context
        folder, last = context.scratch / STEP.format(number), number == len(stage.shares)
        if (folder / FIGURES).is_file():
            found = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
            context.progress.log(f"  {self.name}: iteration {number} is already finished")
            for trained in (is_learned(stage.method), stage.recover is not None):
                if trained:
                    broadcast_cut(context.team, None, context.scratch)
            return load(folder), Origin(*map(tuples, found["origin"])), found["figures"]
        small, origin, figures = self.cut(model, origin, share, last)
        if last:
            small = self.drop_tokens(small, origin)
        if stage.recover is not None:
            broadcast_cut(context.team, Cut(small, self.source, origin), context.scratch)
            history = recover(small, recovery_job(stage, stage.recover, number, self.source, origin, context))
            figures |= {"losses": history.losses, "selection": history.selection, "best_step": history.best_step, "steps": history.steps}
            figures |= history.of_experts
        if not last:
            with writing(folder) as temporary:
                save(small, self.source, temporary, f"Iteration {number}")
                write_json(temporary / FIGURES, {"figures": figures, "origin": [origin.layers, origin.hidden, origin.heads]})
        return small, origin, figures

    def cut(self, model: nn.Module, origin: Origin, share: float, last: bool) -> tuple[nn.Module, Origin, dict[str, object]]:
        """Removes the least important units until only `share` of the cost remains.

        Args:
            model: The model after the previous iteration.
            origin: Parts of the incoming model that it consists of.
            share: Share of the incoming cost that remains.
            last: Whether this is the last iteration, whose latency is measured.

        Returns:
            The small model, its origin, and the figures of the cut.
        """
        stage, key, incoming = self.stage, self.stage.key, self.incoming.after(origin.layers)
        model.to(computing_device())
        structure = Structure.of(model, key)
        if share == 1 and self.latency is None and not is_learned(stage.method):
            return shrink(model, structure, KeptUnits.everything(structure.sizes), key), origin, {"share": share}
        cost, limits = stage.cost(model, structure, self.latency), stage.limits(structure)
        batches = partial(calibration_batches, model, self.source, stage.rows, self.context)
        figures: dict[str, Any] = {"share": share}
        if is_learned(stage.method):
            goal = SparsityGoal(cost, incoming, 1 - share, limits)
            masks = share < 1 and limits.free(structure)
            scores = self.learn(model, goal, figures) if masks else Scores.equal(structure, limits.inside)
            if not masks:
                broadcast_cut(self.context.team, None, self.context.scratch)
            allocate: Allocate = by_worth(scores.components)
        else:
            hidden, loss = "hidden" in stage.granularity, supervised(self.context.task, labels=self.context.data.train.labels)
            scoring = Scoring(model, structure, partial(batches, f"{self.name}: scoring"), loss, hidden)
            scores = scores_of(stage.method, scoring, stage.layer_score)
            if stage.layer_score == "loss":
                figures["layer_losses"] = scores.layers.tolist()
                self.context.progress.log(f"  loss without each layer: {', '.join(f'{value:.4g}' for value in figures['layer_losses'])}")
            allocate = self.allocation(model, structure, scores, figures)
        basis = None
        if "width" in stage.granularity:
            basis = principal(model, structure, batches(f"{self.name}: principal components"), key)
            scores = replace(scores, hidden=basis.variances_D)
        learned = stage.method == "joint"

        def choose(budget: float) -> KeptUnits:
            return select(cost, incoming, budget / incoming.cost, limits, scores, allocate, key, learned)

        if self.latency is None or not last:
            kept = choose(share * incoming.cost)
        else:
            least = lowest_share(cost, incoming, limits, scores) * incoming.cost
            kept, figures["share"] = self.latency.fit(choose, model, structure.sizes, share * incoming.cost, least, incoming.cost, key)
        prove(model, structure, kept, next(iter(batches(""))), key)
        if stage.least_squares:
            update(model, structure, kept, batches(f"{self.name}: least squares"))
        if basis is not None:
            features = next(iter(batches(""))).features
            prove_width(model, structure, basis, features, key)
            project(model, structure, basis, len(kept.hidden), features)
        left = origin.after(kept.layers, kept.hidden, kept.query_heads(structure.sizes))
        return shrink(model, structure, kept, key), left, figures

    def drop_tokens(self, model: nn.Module, origin: Origin) -> nn.Module:
        """Returns the model that tokens leave as the stage asks, or as they left the incoming one; the same model if neither."""
        stage = self.stage
        if stage.tokens is None and not self.tokens:
            return model
        whole = model.to(computing_device()).eval()  # no tokens have left it yet, whatever the incoming model did
        structure = Structure.of(whole, stage.key)
        check_tokens(whole, structure, self.context.task, stage.key)
        merged = self.merged if stage.tokens is None else stage.token_reduction == "merge"
        if stage.tokens is None:
            shares = tuple(self.tokens[layer] for layer in origin.layers)
        else:
            shares = shares_of(stage.tokens, structure.depth, stage.key, merged)
        rows = next(iter(calibration_batches(whole, self.source, stage.rows, self.context, ""))).features
        if merged:
            first_stays = prove_merging(whole, rows, stage.key)
            self.context.progress.log(f"  tokens that are left behind each layer: {', '.join(f'{share:.0%}' for share in shares[:-1])}")
            return with_merged_tokens(whole, shares, stage.key, first_stays)
        prove_tokens(whole, rows, stage.key)
        label = f"{self.name}: significant tokens"
        batches = calibration_batches(whole, self.source, stage.rows, self.context, label)
        weights = significance(whole, batches, self.context.task, stage.key, self.context.seed)
        self.context.progress.log(f"  tokens that stay behind each layer: {', '.join(f'{share:.0%}' for share in shares[:-1])}")
        return with_tokens(whole, shares, weights, stage.key)

    def allocation(self, model: nn.Module, structure: Structure, scores: Scores, figures: dict[str, Any]) -> Allocate:
        """Returns the function that allocates a budget. It scans each component at most once and adds the scan to `figures`."""
        found: dict[tuple[int, Component], Sensitivity] = {}

        def distance(part: Part, count: int) -> float:
            return found[part.block, part.component].at(count) if count < part.size else 0.0

        def allocate(parts: Sequence[Part], budget: float) -> Counts:
            if self.stage.allocation == "uniform":
                return uniform(parts, budget)
            of_parts = {part: scores.components[part.block, part.component] for part in parts}
            if METHODS[self.stage.method].relative:  # the mean score per unit of cost is then the same in every component
                of_parts = {part: score * part.cost for part, score in of_parts.items()}
            if self.stage.allocation == "global":
                return by_score(parts, of_parts, budget)
            missing = [part for part in parts if len(part.counts()) > 1 and (part.block, part.component) not in found]
            if missing:  # another budget may keep other blocks, which are not scanned yet
                found.update(self.scan(model, structure, missing, of_parts, figures))
            return by_distance(parts, distance, budget)

        return allocate

    def learn(self, model: nn.Module, goal: SparsityGoal, figures: dict[str, Any]) -> Scores:
        """Learns masks together with the weights, in place; returns the scores and adds the training's figures to `figures`."""
        stage, context = self.stage, self.context
        broadcast_cut(context.team, Cut(model, self.source, None), context.scratch)
        goal = context.team.broadcast_object(goal)
        learned = learn(stage.method, model, goal, stage.learn, learning_job(stage, self.source, goal, context), stage.key)
        figures["learned"] = dict(learned.figures)
        model.to(computing_device())
        return learned.scores

    def scan(
        self, model: nn.Module, structure: Structure, parts: Sequence[Part], scores: Mapping[Part, Any], figures: dict[str, Any]
    ) -> dict[tuple[int, Component], Sensitivity]:
        """Measures how pruning each component changes the outputs; adds the curves to `figures` and returns them by block and component."""
        context = self.context
        trial = Trial.prepare(model, self.source, context.data.calibration(self.stage.rows, context.seed).rows, context).fewer(SCAN_ROWS)
        with context.progress.bar(f"{self.name}: sensitivity", len(parts) * len(SHARES)) as advance:
            found = scan(model, structure, parts, scores, trial.look, advance)
        steepest = sorted(found, key=lambda entry: -entry.at(entry.part.size // 2))[:3]
        context.progress.log(f"  most sensitive: {', '.join(entry.name for entry in steepest)}")
        if "sensitivity" not in figures:
            whole = {} if trial.labels is None else {"metric": context.facts.metric, "whole": trial.metric_before()}
            figures["sensitivity"] = {"measure": trial.measure, "rows": len(trial.rows), **whole, "layers": []}
        figures["sensitivity"]["layers"] += [entry.as_row() for entry in found]
        return {(entry.part.block, entry.part.component): entry for entry in found}


def recovery_job(
    stage: PruneSettings, settings: Recover, number: int, source: Path, origin: Origin | None, context: Context
) -> RecoveryJob:
    """Returns the fine-tuning after an iteration.

    Args:
        stage: The stage.
        settings: Its fine-tuning, of all iterations together.
        number: Number of the iteration, from 1.
        source: Checkpoint with the tokenizer or image processor.
        origin: Parts of the incoming model that the pruned one consists of.
        context: Context of the stage.
    """
    assert context.teacher is not None, "the pipeline provides the teacher"
    member, iterations = stage.member or Member(), len(stage.shares)
    place, places = (member.number - 1) * iterations + number, member.count * iterations
    part, epochs = part_of(context, settings.epochs * member.count, place, places, settings.batch_size)
    return RecoveryJob(
        settings=settings.model_copy(update={"epochs": epochs}),
        source=source,
        origin=origin,
        key=f"{stage.key}.recover",
        context=part,
        scratch=context.scratch / f"training-{number}",
        label=stage.title,
        depends={"stage": stage.model_dump(mode="json"), "teacher": context.teacher.digest, "iteration": number},
    )


def learning_job(stage: PruneSettings, source: Path, goal: SparsityGoal, context: Context) -> RecoveryJob:
    """Returns the training of masks.

    Args:
        stage: The stage.
        source: Checkpoint with the tokenizer or image processor.
        goal: What may be pruned, and how much.
        context: Context of the stage.
    """
    teacher, structure = context.teacher, goal.cost.structure
    assert teacher is not None, "the pipeline provides the teacher"
    return RecoveryJob(
        settings=stage.recover or Recover(),
        source=source,
        origin=Origin.whole(structure.depth, structure.sizes.hidden),
        key=f"{stage.key}.recover",
        context=context,
        scratch=context.scratch / "masks",
        label=f"{stage.title}: learning masks",
        depends={"stage": stage.model_dump(mode="json"), "teacher": teacher.digest, "share": 1 - goal.sparsity},
    )


def take_part(stage: PruneSettings, context: Context) -> None:
    """Learns masks and fine-tunes with the first process, which prunes."""
    team = context.team
    for number in range(1, len(stage.shares) + 1):
        if is_learned(stage.method) and (whole := received(team)) is not None:
            goal: SparsityGoal = team.broadcast_object(None)  # type: ignore[assignment]  # of the first process
            learn(stage.method, whole.model, goal, stage.learn, learning_job(stage, whole.source, goal, context), stage.key)
        if stage.recover is not None and (cut := received(team)) is not None:
            recover(cut.model, recovery_job(stage, stage.recover, number, cut.source, cut.origin, context))

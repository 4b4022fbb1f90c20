"""The table of pruning methods: how importance is measured. Recipes, their schema and `compress list` follow from its rows.

To add a method, write a file in this folder with the score of a structure, and add a row here that makes `Scores` of it. Methods without a
score of their own learn masks together with the weights (`prune.masks.learned`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from foundation.core.named import Named, one_of
from prune.fisher import fisher
from prune.scores import Batches, by_activation, by_gradient, by_magnitude, comparable, unread_first
from prune.taylor import taylor

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foundation.models.architecture.structure import Structure
    from foundation.training.train import Objective
    from prune.selection import Scores


@dataclass(frozen=True)
class Scoring:
    """Inputs of a scoring method."""

    model: nn.Module
    """The model, in evaluation mode; it is not changed."""
    structure: Structure
    batches: Batches
    """Starts a new pass over the calibration rows."""
    objective: Objective
    """The loss of a batch."""
    hidden: bool
    """Whether the channels of the residual stream are pruned, so that gradients have to be taken there as well."""


@dataclass(frozen=True)
class MethodFacts:
    """All that sets a method apart, apart from its code."""

    score: Callable[[Scoring], Scores] | None = None
    """Returns the scores of a model; None for a method that learns masks with the weights."""
    reads_labels: bool = False
    """Whether scores are gradients of the loss against labels."""
    relative: bool = False
    """Whether scores are comparable within a layer only, so that they are divided by their mean in each layer."""


def _by_gradient(score: Callable[[Tensor], Tensor]) -> Callable[[Scoring], Scores]:
    """Returns a method that scores gradients at gates; blocks and channels without a gradient are scored by activation."""

    def scores(scoring: Scoring) -> Scores:
        from prune.selection import Scores

        activations = by_activation(scoring.model, scoring.structure, scoring.batches)
        found = by_gradient(score, scoring.model, scoring.structure, scoring.batches, scoring.objective, scoring.hidden)
        components = {where: value for where, value in found.items() if isinstance(where, tuple)}
        return Scores(components, activations.layers, found["hidden"] if scoring.hidden else activations.hidden)

    return scores


METHODS: Mapping[str, MethodFacts] = {
    "magnitude": MethodFacts(lambda given: by_magnitude(given.model, given.structure), relative=True),
    "taylor": MethodFacts(_by_gradient(taylor), reads_labels=True),
    "fisher": MethodFacts(_by_gradient(fisher), reads_labels=True),
    "activation": MethodFacts(lambda given: by_activation(given.model, given.structure, given.batches), relative=True),
    "joint": MethodFacts(),
    "movement": MethodFacts(),
}

Method = Annotated[str, Named(METHODS)]
"""The name of a method; in a recipe it has to be a row of `METHODS`."""
LayerScore = Literal["influence", "loss"]
"""How blocks are ranked, apart from what is inside of them."""


def is_learned(method: Method) -> bool:
    """Whether a method learns masks with the weights."""
    return METHODS[method].score is None


def scored() -> str:
    """Returns the names of the methods that score, for messages: "a, b or c"."""
    return one_of([name for name, row in METHODS.items() if row.score is not None])


def scores_of(method: Method, scoring: Scoring, layer_score: LayerScore | None = None) -> Scores:
    """Returns the scores of a model by a method that has some; units that no nonzero weight reads score 0.

    Args:
        method: The name of the method.
        scoring: Inputs of the method.
        layer_score: How blocks are scored; None: as the method does.
    """
    from prune.layer_loss import losses_without

    row = METHODS[method]
    assert row.score is not None, f"{method} learns its masks"
    scores = row.score(scoring)
    if layer_score == "loss":
        scores = replace(scores, layers=losses_without(scoring.model, scoring.structure, scoring.batches, scoring.objective))
    elif layer_score == "influence":
        scores = replace(scores, layers=by_activation(scoring.model, scoring.structure, scoring.batches).layers)
    return unread_first(comparable(scores) if row.relative else scores, scoring.model, scoring.structure)

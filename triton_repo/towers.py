"""Served models with two towers: a build is two models, `<variant>-<precision>-image` and `<variant>-<precision>-text`.

Each is asked for the rows of its tower, and compared with the engine on them. What both served together is reported once both have run: the
vectors of the second are compared with the vectors that the first one served, not with its engine's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from foundation.artifacts.triton import Results
from foundation.core.arrays import Array
from foundation.labels.form import Labels
from foundation.labels.zero_shot import SIDES
from foundation.measure.answers import load_logits

if TYPE_CHECKING:
    from triton_repo.layout import Served


def beside_the_other(model: Served, answers: Array, labels: Labels, out: Path) -> Array:
    """Returns the predictions of a split: the answers of a model, and next to them, where it is a tower, the vectors of the other one.

    Args:
        model: The model.
        answers: What it answered to its rows, float32 `[m, D]`.
        labels: Labels of the split.
        out: Folder of the predictions of the models that were served before.
    """
    if model.tower is None:
        return answers
    other = next(name for name in SIDES if name != model.tower)
    served = out / f"{model.name.removesuffix(model.tower)}{other}.safetensors"
    evaluated = model.predictions
    assert evaluated is not None, "engines that are served were evaluated"
    whole = load_logits(served if served.exists() else evaluated)
    whole[labels.of_tower(model.tower)] = answers
    return whole


def with_both_towers(results: Results) -> Results:
    """Returns the contents of triton.json where the first tower of a build has the metrics and predictions of both, as the second has."""
    last = {(model.variant, model.precision): model for model in results.models}
    both = [(model, last[model.variant, model.precision]) for model in results.models]
    return results.with_(
        models=tuple(model.with_(metrics=of.metrics, n=of.n, predictions=of.predictions) for model, of in both),
    )

"""The typed union of all losses against a teacher, and published combinations of them, selected with the key `loss`.

Deviations from the papers: `mixkd` adds soft targets on unmixed rows, where the paper runs the teacher only on mixtures; `distilbert` uses
the task's hard-target loss instead of masked language modelling; `minilm` and `minilmv2` add soft targets, as relations alone do not train
the head; `gatekeeper` adds soft targets, so that the order of the other classes stays the teacher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from foundation.training.distillation.schedules import Ramp
from foundation.training.losses.distillation.distilbert import Cosine
from foundation.training.losses.distillation.gatekeeper import Gatekeeper
from foundation.training.losses.distillation.generalized_jsd import GeneralizedJsd
from foundation.training.losses.distillation.hidden import Hidden
from foundation.training.losses.distillation.logit_standardization import LogitStandardization
from foundation.training.losses.distillation.margin_mse import MarginMSE
from foundation.training.losses.distillation.minilm import MiniLM, MiniLMv2
from foundation.training.losses.distillation.mixkd import MixKD
from foundation.training.losses.distillation.projected import Projected
from foundation.training.losses.distillation.relational import Relational
from foundation.training.losses.distillation.similarity import Similarity
from foundation.training.losses.distillation.soft_target import SoftTarget
from foundation.training.losses.distillation.tinybert import TinyBert

AnyLoss = Annotated[
    SoftTarget
    | Gatekeeper
    | GeneralizedJsd
    | Cosine
    | Hidden
    | TinyBert
    | MiniLM
    | MiniLMv2
    | MixKD
    | LogitStandardization
    | Relational
    | Similarity
    | MarginMSE
    | Projected,
    Field(discriminator="name"),
]


@dataclass(frozen=True)
class Preset:
    """A published combination of losses with its weights."""

    losses: tuple[AnyLoss, ...]
    hard_weight: float | Ramp
    temperature: float | Ramp = 2.0


LossName = Literal[
    "soft_target",
    "distilbert",
    "minilm",
    "minilmv2",
    "pkd",
    "tinybert",
    "mixkd",
    "logit_standardization",
    "relational",
    "similarity",
    "projected",
    "margin_mse",
    "gatekeeper",
]
"""Published combinations of losses."""
PresetName = Literal[LossName, "hard_target"]
PRESETS: Mapping[PresetName, Preset] = {
    "soft_target": Preset((SoftTarget(),), 0.5),
    "distilbert": Preset((SoftTarget(weight=5.0), Cosine()), 2.0),
    "minilm": Preset((SoftTarget(), MiniLM()), 0.0),
    "minilmv2": Preset((SoftTarget(), MiniLMv2()), 0.0),
    "pkd": Preset((SoftTarget(weight=0.5), Hidden(layers="skip", tokens="first", normalize=True)), 0.5, 5.0),
    "tinybert": Preset((TinyBert(steps=(0.0, 0.75)), SoftTarget(steps=(0.75, 1.0))), 0.0, 1.0),
    "mixkd": Preset((SoftTarget(), MixKD()), 1.0),
    "logit_standardization": Preset((LogitStandardization(weight=9.0),), 0.1),
    "relational": Preset((SoftTarget(), Relational()), 0.5),
    "similarity": Preset((Similarity(),), 0.0),
    "projected": Preset((Projected(),), 0.0),
    "margin_mse": Preset((MarginMSE(),), 0.0),
    "gatekeeper": Preset((SoftTarget(weight=0.5), Gatekeeper()), 0.0),
    "hard_target": Preset((), 1.0),
}


def preset_of(
    loss: PresetName | None, losses: tuple[AnyLoss, ...], hard_weight: float | Ramp | None = None, temperature: float | Ramp | None = None
) -> Preset:
    """Returns the losses of a training with every default filled in.

    Args:
        loss: A published combination; None: `losses`, or soft targets if these are empty.
        losses: Individual losses.
        hard_weight: Weight of the labels; None: the published value with `loss`, 0 with `losses`.
        temperature: Softens the logits; None: the published value with `loss`, 2 with `losses`.
    """
    preset = Preset(losses, 0.0) if losses else PRESETS[loss or "soft_target"]
    return Preset(
        preset.losses,
        preset.hard_weight if hard_weight is None else hard_weight,
        preset.temperature if temperature is None else temperature,
    )

"""Presets: published combinations of losses, selected with the key `loss`, and the union of all losses.

Deviations from the papers: `mixkd` adds soft targets on unmixed rows, where the paper runs the teacher only on mixtures; `distilbert` uses
the task's hard-target loss instead of masked language modelling; `minilm` and `minilmv2` add soft targets, as relations alone do not train
the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from distill.losses.distilbert import Cosine
from distill.losses.generalized_jsd import GeneralizedJsd
from distill.losses.hidden import Hidden
from distill.losses.logit_standardization import LogitStandardization
from distill.losses.margin_mse import MarginMSE
from distill.losses.minilm import MiniLM, MiniLMv2
from distill.losses.mixkd import MixKD
from distill.losses.projected import Projected
from distill.losses.relational import Relational
from distill.losses.similarity import Similarity
from distill.losses.soft_target import SoftTarget
from distill.losses.tinybert import TinyBert
from distill.schedules import Ramp
from foundation.stage.distillation import LossName

AnyLoss = Annotated[
    SoftTarget
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
    "hard_target": Preset((), 1.0),
}

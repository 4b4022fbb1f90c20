"""Published combinations of losses, by the name that the key `loss` has for them, and the union of all losses.

Where a combination is not quite the published one: `mixkd` adds soft targets on the rows as they are, which the paper asks the teacher
about in mixtures alone; `distilbert` has the labels of the task in the place of the masked language model; `minilm` and `minilmv2` add soft
targets, as relations alone do not train the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from compress.stage.taught import LossName
from distill.losses.distilbert import Cosine
from distill.losses.hidden import Hidden
from distill.losses.logit_standardization import LogitStandardization
from distill.losses.minilm import MiniLM, MiniLMv2
from distill.losses.mixkd import MixKD
from distill.losses.relational import Relational
from distill.losses.soft_target import SoftTarget
from distill.losses.tinybert import TinyBert
from distill.schedules import Ramp

AnyLoss = Annotated[
    SoftTarget | Cosine | Hidden | TinyBert | MiniLM | MiniLMv2 | MixKD | LogitStandardization | Relational, Field(discriminator="name")
]


@dataclass(frozen=True)
class Preset:
    """A published combination."""

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
    "hard_target": Preset((), 1.0),
}

"""Settings of the stage `cascade`: its typed recipe keys."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from export.cascade.certificate import alpha_of
from foundation.artifacts.artifact import Kind
from foundation.stage.stage import Stage


class CascadeSettings(Stage):
    """Small models answer the rows that they are sure of, the original the others; a certificate says how often answers differ."""

    NAME: ClassVar[str] = "cascade"
    PRODUCES: ClassVar[Kind] = "cascade"

    max_disagreement: Annotated[float, Field(gt=0, lt=1)]
    """Largest share of rows whose answer is another one than the original's (the baseline in torch, fp32), as a fraction: 0.01 is one in a
    hundred."""
    max_distance: Annotated[float, Field(gt=0)] | None = None
    """Where answers are numbers or vectors: how far an answer may be from the original's and still count as the same. Of a number the
    absolute difference, in the unit of the labels; of a vector the length of the difference over the length of the original's (0.1 is a
    cosine of 0.995 for vectors of length 1). Needed there, and for nothing else."""
    confidence: Annotated[float, Field(ge=0.5, le=0.9999)] = 0.95
    """How sure the bound is: of draws of the certificate rows, the largest share 1 - confidence leads to a cascade above it."""
    tiers: Annotated[tuple[str, ...], Field(min_length=2, max_length=3)] | None = None
    """Ids of the models in rising order of cost; the last is baseline. Each takes its fastest engine that agrees with torch. null: one or
    two models before the baseline, chosen for the least time on selection rows."""
    score: Literal["auto", "margin", "entropy", "energy", "calibrated"] = "auto"
    """How sure a model is of an answer. margin: the difference of the two largest logits; entropy and energy: of all logits; calibrated: a
    logistic model of all three, fitted on selection rows; auto: margin, unless another one ranks selection rows better. Numbers and vectors
    have calibrated alone: a linear model of how far rows like this one are from the original's answer."""
    max_drop: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A second bound with the same confidence: the largest drop of the share of right answers against the original, as a fraction. It needs
    labels (`data.certify`). null: none."""

    @property
    def alpha(self) -> float:
        """One minus the confidence."""
        return alpha_of(self.confidence)

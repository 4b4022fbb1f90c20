"""The key `audit` of the stage `triton_repo`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from foundation.core.config import Config


class Audit(Config):
    """How a served cascade is watched: is what was certified still true of the rows that come?"""

    share: Annotated[float, Field(ge=0, le=1)] = 0.005
    """Share of the rows that the last tier answers, too, off the answer's path, to see how often it answers otherwise. 0: none, and drift
    that the first tiers are confident about is not seen."""
    false_alarm: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """Largest probability that any alarm of the cascade ever rings without cause, from one start of the server to the next."""

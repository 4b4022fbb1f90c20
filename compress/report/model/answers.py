"""Engines that answer prompts in report.json: their tokens, their speed, and what proposed tokens and a smaller cache do."""

from __future__ import annotations

from pydantic import Field

from foundation.artifacts.document import Document, Number
from foundation.artifacts.figures import Drop, Metrics, Quality, Tokens
from foundation.artifacts.timed import ProposedSpeed, Speed


class Agreement(Document):
    """Greedy answers compared with torch."""

    baseline: Tokens | None = None
    """With the float baseline in torch."""
    torch: Tokens | None = None
    """With the same checkpoint in torch; of a compressed one on up to 32 of the prompts."""


class CacheCost(Document):
    """Cost of a cache in less than `float_precision`."""

    metrics: Metrics = Field(default_factory=dict)
    """Every metric of the same engine with a cache in `float_precision`."""
    change: Drop = Drop()
    """Loss of the primary metric by the cache."""
    tokens: Tokens = Tokens()
    """Greedy answers compared with those with such a cache."""


class Speculation(Document):
    """Effect of the tokens that are proposed to an engine."""

    draft: str | None = None
    """Build that proposes tokens; null: the text itself does (prompt look-up)."""
    tokens: int = 0
    """Tokens that are proposed at once."""
    compared: Tokens = Tokens()
    """Greedy answers with proposals compared with answers without."""
    proposed: int = 0
    """Tokens that were proposed for those answers."""
    accepted: int = 0
    """Proposed tokens that the model would have chosen itself."""
    tokens_per_step: Number = 0.0
    """Tokens of those answers / passes of the model."""
    speeds: tuple[ProposedSpeed, ...] = ()
    """Speeds with proposals, one for each load."""


class Answer(Document):
    """An engine that answers prompts."""

    engine: str = ""
    """An engine that answers prompts."""
    mode: str = ""
    """`paged`: many requests at once; `stateful`: one after the other."""
    precision: str = ""
    """Precision of its build."""
    float_precision: str = ""
    """Precision of the layers that are not quantized."""
    cache_precision: str = ""
    """Precision of keys and values in the cache."""
    metrics: Metrics = Field(default_factory=dict)
    """Every metric, from the logits of blocks that go through the cache."""
    prompt_tokens: Number | None = None
    """Tokens of the prompts that were compared; the median, where they differ."""
    questions: bool | None = None
    """Whether the prompts were questions, and not the starts of rows."""
    quality: Quality | None = None
    """For text-to-text: BLEU and chrF of the greedy answers; null for other tasks."""
    agreement: Agreement = Agreement()
    """Greedy answers compared with torch."""
    cache_cost: CacheCost | None = None
    """Cost of its cache; null if the cache is in `float_precision`."""
    speeds: tuple[Speed, ...] = ()
    """Its speeds, one for each load."""
    speculation: Speculation | None = None
    """Effect of proposed tokens; null without them."""
